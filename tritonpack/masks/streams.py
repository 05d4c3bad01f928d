"""Which CUDA stream runs work that is launched now, and whether a CUDA graph is captured on it.

A tensor that one stream computes may not be ready on another. A tensor that is computed during a capture lives in the
graph: it has values only after a replay, and its memory is reused outside of the graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Stream(NamedTuple):
    """A stream's handle, None without CUDA and in traced code; and whether a CUDA graph is captured on it."""

    handle: int | None
    capturing: bool


def current_stream(device: torch.device) -> Stream:
    """The stream on which work for a device is launched now; not for devices of fake tensors."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return Stream(None, False)
    index = torch.cuda.current_device() if device.index is None else device.index
    return Stream(torch._C._cuda_getCurrentRawStream(index), torch.cuda.is_current_stream_capturing())
