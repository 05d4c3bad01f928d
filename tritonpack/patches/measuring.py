"""Tools of a proof: lay documents out in rows, cut outputs into documents, and run calls that leave no trace."""

from __future__ import annotations

import math
import random
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import logging

from tritonpack import notices
from tritonpack.patches.configurations import special_tokens
from tritonpack.patches.families import PROMPT_TYPES
from tritonpack.patches.modules import models_in, modules_in
from tritonpack.patches.parse_inputs import CACHES


@dataclass(frozen=True)
class Batch:
    """Documents laid out in rows.

    Attributes:
        ids: (B, T) token ids, 0 for padding.
        spans: the row of each document, and the places of its tokens in that row, in the documents' order.
        arguments: the arguments of the call besides the ids.
        source: the encoder's documents, if `ids` are the decoder's; else None.
    """

    ids: Tensor
    spans: Sequence[tuple[int, Any]]
    arguments: dict[str, Any]
    source: Batch | None = None

    def gather(self, values: Tensor) -> Tensor:
        """Gather values of rows `[b, t, n]` into values of all documents, one after the other, `[tokens, n]`."""
        return torch.cat([values[row, span] for row, span in self.spans])


def lay_out(rows: Iterable[Iterable[int]], documents: Sequence[Tensor], *, left: bool = False, more: int = 0) -> Batch:
    """Lay out documents (1, n) in rows, each a list of numbers of documents, with `more` tokens of padding.

    Rows are padded to the longest. The arguments are position ids and the mask.
    """
    rows = [list(row) for row in rows]
    width = max(sum(documents[i].numel() for i in row) for row in rows) + more
    ids, places, mask = (torch.zeros(len(rows), width, dtype=torch.long, device="cpu") for _ in range(3))
    spans: dict[int, tuple[int, slice]] = {}
    for r, row in enumerate(rows):
        at = width - sum(documents[i].numel() for i in row) if left else 0
        for i in row:
            n = documents[i].numel()
            spans[i] = (r, slice(at, at + n))
            ids[spans[i]], places[spans[i]], mask[spans[i]] = documents[i][0], torch.arange(n, device="cpu"), 1
            at += n
    return Batch(ids, [spans[i] for i in range(len(documents))], {"position_ids": places, "attention_mask": mask})


def ordinary_tokens(model: Any, size: int | None = None) -> Tensor:
    """Return (k,), the token ids below `size` without the special tokens of the configuration, such as padding."""
    size = size or model.get_input_embeddings().num_embeddings
    named = special_tokens(model.config) if hasattr(model, "config") else set()
    tokens = torch.tensor([token for token in range(size) if token not in named], device="cpu")
    return tokens if len(tokens) > 1 else torch.arange(size, device="cpu")


def draw(tokens: Tensor, lengths: Sequence[int], seed: int) -> list[Tensor]:
    """Draw documents (1, n) of these lengths from token ids (k,)."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return [tokens[torch.randint(len(tokens), (1, n), generator=generator, device="cpu")] for n in lengths]


def as_prompts(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Return the argument that marks all tokens (B, T) as prompts, for models that require it (`PROMPT_TYPES`)."""
    typed = any(module.config.model_type in PROMPT_TYPES for module in models_in(model))
    return {"token_type_ids": torch.zeros_like(ids)} if typed else {}


def tensors_in(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point tensors in an output with their names; "." marks those in tuples and lists.

    Losses, attention weights and caches are left out.
    """
    if isinstance(output, Mapping):
        for key, value in output.items():
            if not str(key).endswith(("loss", "attentions")) and key not in CACHES:
                yield from tensors_in(value, f"{name}[{key}]" if name else str(key))
    elif isinstance(output, (tuple, list)):
        for i, value in enumerate(output):
            yield from tensors_in(value, f"{name}.{i}" if name else f"output {i}")
    elif isinstance(output, Tensor) and output.is_floating_point():
        yield name or "output", output


def cut(x: Tensor, batch: Batch) -> list[Tensor] | None:
    """Cut values for each token, (B, T, ...), (k, B, T, ...) or (B * T, ...), into documents; None for other shapes."""
    for side in filter(None, (batch, batch.source)):
        rows, width = side.ids.shape
        if x.ndim > 1 and x.shape[:1] == (rows * width,) and rows * width > 1:
            x = x.unflatten(0, (rows, width))
        if x.shape[:2] == (rows, width):
            return [x[row, place] for row, place in side.spans]
        if x.shape[1:3] == (rows, width):
            return [x[:, row, place] for row, place in side.spans]
    return None


def parts_in(output: Any, batch: Batch) -> dict[str, list[Tensor] | Tensor]:
    """Cut all tensors of an output into documents. A tensor that has no part for each document stays whole."""
    parts_by_name: dict[str, list[Tensor] | Tensor] = {}
    for name, x in tensors_in(output):
        parts = cut(x, batch)
        if parts is None and "." not in name and x.shape[:1] == (len(batch.spans),):
            parts = list(x)
        if parts is not None or "." not in name:  # other tensors in tuples are caches
            parts_by_name[name] = x if parts is None else parts
    return parts_by_name


@contextmanager
def logits_drawn(model: Any, batch: Batch, draws: Sequence[tuple[int, int]]) -> Iterator[list[torch.dtype]]:
    """Replace the logits of a model's output embeddings by random ones, and yield the dtypes of the replaced logits.

    `draws` are the seed and the size of each document's logits.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    dtypes: list[torch.dtype] = []

    def replace(module: nn.Module, given: Any, logits: Any) -> Tensor | None:
        if type(logits) is not Tensor or logits.shape[:-1].numel() != batch.ids.numel():
            return None
        dtypes.append(logits.dtype)
        drawn = torch.zeros(*batch.ids.shape, logits.shape[-1], device="cpu")
        for place, (seed, size) in zip(batch.spans, draws, strict=True):
            drawn[place] = size * torch.randn(
                drawn[place].shape, generator=torch.Generator(device="cpu").manual_seed(seed), device="cpu"
            )
        return drawn.to(logits).view_as(logits)

    hook = head.register_forward_hook(replace) if isinstance(head, nn.Module) else None
    try:
        yield dtypes
    finally:
        if hook is not None:
            hook.remove()


@torch.no_grad()
def apart(expected: Sequence[Tensor | None], got: Sequence[Tensor | None]) -> float:
    """Return the largest difference, relative to the largest of all expected values.

    None stands for zeros, as in gradients of unused parameters. The result is infinite if shapes differ, if an expected
    value is NaN, or if only one of two values is finite.
    """
    largest, worst = torch.finfo(torch.float32).eps, 0.0  # smaller values count as rounding
    for a, b in zip(expected, got, strict=True):
        if a is None and b is None:
            continue
        a = torch.zeros_like(b) if a is None else a  # type: ignore[arg-type]
        b = torch.zeros_like(a) if b is None else b
        if a.shape != b.shape:
            return math.inf
        finite = a.isfinite()
        if bool(a.isnan().any()) or not torch.equal(finite, b.isfinite()):
            return math.inf
        if bool(finite.any()):
            largest = max(largest, float(a[finite].abs().max()))
            worst = max(worst, float((a - b)[finite].abs().max()))
    return worst / largest


def half_the_digits(dtype: torch.dtype) -> float:
    """Return the largest relative difference that counts as rounding between two ways to compute a whole model."""
    return max(torch.finfo(dtype).eps ** 0.5, 8 * torch.finfo(torch.float32).eps)  # float64 models use float32, too


def rounding_of(dtype: torch.dtype) -> float:
    """Return the largest relative difference that counts as rounding between two shapes of a call.

    It is 256 units in the last place. In 16 bits it is one unit, because wrong positions may change results by little
    more.
    """
    eps = torch.finfo(dtype).eps
    return max(256 * eps if eps < 1e-4 else eps, 8 * torch.finfo(torch.float32).eps)


def first_moved(model: nn.Module, run: Callable[[Batch], Any], before: Batch, after: Batch, kept: Iterable[int]) -> str:
    """Return the first module that mixes documents, with its class; empty if there is none.

    The batches of the two calls have the documents `kept` in common. For these the module gets equal inputs and returns
    different outputs.
    """
    kept = list(kept)
    seen: list[dict[str, list[list[Tensor]]]] = []

    def note(name: str, batch: Batch, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        cuts = ([cut(x, batch) for _, x in tensors_in(values)] for values in ([args, kwargs], [output]))
        sides = [[parts[i].detach() for parts in side if parts is not None for i in kept] for side in cuts]
        seen[-1].setdefault(name, sides)

    for batch in (before, after):
        seen.append({})
        handles = [
            module.register_forward_hook(partial(note, name, batch), with_kwargs=True)
            for name, module in model.named_modules()
        ]
        try:
            note("", batch, model, (), {}, run(batch))  # in case the forward is called without its hooks
        finally:
            for handle in handles:
                handle.remove()
    for name, sides in seen[0].items():
        others = seen[1].get(name, sides)
        same = [len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(sides, others, strict=True)]
        if same == [True, False]:
            return f"{name or 'the model itself'} ({type(model.get_submodule(name)).__name__})"
    return ""


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings of transformers and tritonpack."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(), notices.silenced():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


def own_weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module without those of modules inside that FSDP2 shards by themselves."""
    inside = {id(p) for m in modules_in(module) if m is not module and hasattr(m, "reshard") for p in m.parameters()}
    return [p for p in module.parameters() if id(p) not in inside]


@contextmanager
def no_trace(model: nn.Module) -> Iterator[None]:
    """Run in evaluation mode without compilation; then restore modes, buffers, attributes, hooks and random state."""
    modules = list(modules_in(model))
    buffers = {id(b): b for b in model.buffers() if not b.is_meta and not b.is_inference()}.values()
    copies = [(b, b.detach().clone()) for b in buffers]
    # FSDP replaces parameters itself, and makes attributes with their names.
    left = [(m, {"_parameters", "_modules", *m._parameters}) for m in modules]
    attributes = [{k: v for k, v in m.__dict__.items() if k not in names} for m, names in left]
    # Dicts and lists stay the same objects. The hooks of state dicts that FSDP's first forward registers are kept.
    kinds = dict, list, OrderedDict
    contents = [{k: v.copy() for k, v in x.items() if type(v) in kinds and "state_dict" not in k} for x in attributes]
    sharded: list[Any] = [(m, own_weights(m)) for m in modules if hasattr(m, "reshard")]  # by FSDP2
    random_states = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    for module in modules:
        module.training = False
    try:
        with quiet(), torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        random.setstate(random_states[0])
        np.random.set_state(random_states[1])
        for module, weights in sharded:  # an optimizer that is made next must not get whole weights
            if any(p is not q for p, q in zip(weights, own_weights(module), strict=True)):
                module.reshard()
            if any(p is not q for p, q in zip(weights, own_weights(module), strict=True)):  # its forward has raised
                module.set_reshard_after_forward(True, recurse=False)
                module.reshard()
                module.set_reshard_after_forward(False, recurse=False)
        for (module, names), before, content_of in zip(left, attributes, contents, strict=True):
            for name in [k for k in module.__dict__ if k not in before and k not in names]:
                del module.__dict__[name]
            module.__dict__.update(before)
            for name, content in content_of.items():
                before[name].clear()
                if isinstance(content, list):
                    before[name].extend(content)
                else:
                    before[name].update(content)
        torch.clear_autocast_cache()  # else a weight that was cast without gradients would get none
        for buffer, copy in copies:
            buffer.data.copy_(copy)  # a graph may have saved an unchanged buffer, so no version may move
