"""Run a model's code independently of the caller's torch contexts, and without effects on the process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from transformers import logging
from transformers.initialization import guard_torch_init_functions

from tritonpack import notices

T = TypeVar("T")


def undisturbed(function: Callable[[], T]) -> T:
    """Call a function as in a process that has just begun: on the CPU, in float32, with gradients.

    torch keeps most contexts (a default device, the modes of gradients and inference, autocast, fake tensors) per
    thread, so the function runs in a new thread, which has none of them. What belongs to the whole process (the default
    dtype, the random state of the CPU) is restored afterwards.
    """
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(_run, function).result()


def _run(function: Callable[[], T]) -> T:
    dtype = torch.get_default_dtype()
    # transformers' no_init_weights replaces torch's functions that fill weights; the guard restores them.
    with torch.random.fork_rng(devices=[]), guard_torch_init_functions(), quiet():
        torch.set_default_dtype(torch.float32)
        try:
            return function()
        finally:
            torch.set_default_dtype(dtype)


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
