"""Small batches on the CPU, one for each kind of attention that is measured."""

from benchmarks.harness.batch import Batch, Shape, make_batch

LENGTHS = (37, 1, 80, 20)
KINDS = {
    "causal": Shape("file", 138, 4, 2, 16, dtype="float32"),
    "bidirectional": Shape("file", 138, 4, 2, 16, causal=False, dtype="float32"),
    "window": Shape("file", 138, 4, 2, 16, window=(16, 0), dtype="float32"),
    "ungrouped": Shape("file", 138, 4, 4, 16, dtype="float32"),
}


def batch_of(kind: str) -> Batch:
    return make_batch(KINDS[kind], LENGTHS, "cpu")
