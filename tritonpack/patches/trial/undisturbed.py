"""Build and run a small model whatever contexts the caller is in, and leave no trace of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn
from transformers import logging
from transformers.initialization import guard_torch_init_functions

T = TypeVar("T")


def undisturbed(function: Callable[[], T]) -> T:
    """Call a function as in a process that has just begun: on the CPU, in float32, with gradients.

    torch keeps most of a caller's contexts (a default device, the mode of gradients and inference, autocast, fake
    tensors) per thread, so the function runs in a thread of its own, which has none of them. What belongs to the whole
    process (the default dtype, the random state of the CPU) is put back afterwards.
    """
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(_run, function).result()


def _run(function: Callable[[], T]) -> T:
    dtype = torch.get_default_dtype()
    # transformers' no_init_weights replaces torch's functions that fill weights; the guard puts working ones there.
    with torch.random.fork_rng(devices=[]), guard_torch_init_functions(), quiet():
        torch.set_default_dtype(torch.float32)
        try:
            return function()
        finally:
            torch.set_default_dtype(dtype)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that transformers gives to those who train or generate."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


@contextmanager
def as_found(model: nn.Module) -> Iterator[None]:
    """In evaluation mode, with the modes and the random state restored afterwards."""
    training = [module for module in model.modules() if module.training]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    model.eval()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module in training:
            module.training = True
