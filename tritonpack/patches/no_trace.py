"""Run a model without a trace: modes, buffers, attributes, hooks, warnings and random state stay as they are."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import logging

from tritonpack import notices
from tritonpack.errors import UnsupportedModelError

LARGE = 2**24  # a buffer with more elements isn't copied; a model that changes one is refused


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out the warnings that transformers and tritonpack give to users who train or generate."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(), notices.unheard():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


@contextmanager
def no_trace(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, nothing compiled anew. Modes, buffers, attributes, hooks and random state are restored then.

    Raises:
        UnsupportedModelError: the model has changed a buffer that is too large to be copied.
    """
    modules = list(model.modules())
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    buffers = {id(b): b for b in model.buffers() if not b.is_meta and not b.is_inference()}.values()
    copies = [(b, b._version, b.detach().clone() if b.numel() < LARGE else None) for b in buffers]
    # FSDP exchanges parameters itself. A dict of buffers or hooks is the same object before and after.
    attributes = [{k: v for k, v in m.__dict__.items() if k not in ("_parameters", "_modules")} for m in modules]
    dicts = [{k: v.copy() for k, v in one.items() if isinstance(v, dict)} for one in attributes]
    parameters = [frozenset(m._parameters) for m in modules]  # FSDP makes attributes of these
    for module in modules:
        module.training = False
    try:
        with quiet(), torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, before, contents, names in zip(modules, attributes, dicts, parameters, strict=True):
            for name in [k for k in module.__dict__ if k not in before and k[0] != "_" and k not in names]:
                del module.__dict__[name]
            module.__dict__.update({k: v for k, v in before.items() if k not in names})
            for name, content in contents.items():
                before[name].clear()
                before[name].update(content)
        torch.clear_autocast_cache()  # a weight that was cast without gradients would get none
        with torch.no_grad():
            for buffer, version, copied in copies:
                if buffer._version != version and copied is None:
                    raise UnsupportedModelError(f"{type(model).__name__} changes a large buffer in evaluation mode.")
                if copied is not None and buffer._version != version:
                    buffer.copy_(copied)
