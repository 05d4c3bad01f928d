"""CUDA graphs, and programs in processes of their own for tests of what ends all work on the GPU, as assertions do."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]


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


def goes_on(program: str) -> bool:
    """Run a program; whether the device still answers at its end. The reason why it doesn't is printed."""
    program = f"{program}\nimport torch\ntorch.cuda.synchronize()\nprint('went on')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    print(done.stderr)
    return "went on" in done.stdout
