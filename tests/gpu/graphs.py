"""CUDA graphs, for the tests that replay one."""

from collections.abc import Callable

import torch
from torch import Tensor


def capture(step: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """A graph of a step, and the tensors that its replays write. Before the capture the step runs on another stream, so
    that kernels are compiled and lasting memory is allocated there."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # offsets that aren't written yet would fail an assertion
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured
