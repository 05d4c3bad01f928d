"""Small batches on the CPU, of every kind that the benchmark of attention has."""

import torch

from benchmarks.gpu.shapes import Shape, make_batch
from tritonpack.cli.bench.batch import Batch

LENGTHS = (37, 1, 80, 20)
KINDS = {
    "causal": Shape("file", 138, 4, 2, 16, dtype="float32"),
    "bidirectional": Shape("file", 138, 4, 2, 16, causal=False, dtype="float32"),
    "window": Shape("file", 138, 4, 2, 16, window=(16, 0), dtype="float32"),
    "ungrouped": Shape("file", 138, 4, 4, 16, dtype="float32"),
}


def batch_of(kind: str) -> Batch:
    return make_batch(KINDS[kind], LENGTHS, torch.device("cpu"))
