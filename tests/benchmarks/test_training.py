"""The training benchmark: its documents, its models and its rows."""

from benchmarks import training
from examples.demo.training import Run

# Seconds, MiB and computed tokens of a step.
WAYS = {"padded": (2.0, 800, 200), "unpadded": (1.25, 500, 100), "naive": (1.0, 500, 100), "packed": (1.0, 400, 100)}


def runs():
    return {
        way: Run((3.0, 2.5, 2.0), (seconds,) * 3, (100,) * 3, (computed,) * 3, mib * 2**20, 2.1)
        for way, (seconds, mib, computed) in WAYS.items()
    }


def test_figures_compare_with_padded():
    padded, unpadded, naive, packed = training.figures_of(runs()).values()
    assert [row["speed"] for row in (padded, unpadded, naive, packed)] == [1.0, 1.6, 2.0, 2.0]
    assert (padded["memory"], packed["memory"]) == (1.0, 0.5)
    assert (padded["padding"], packed["padding"]) == (0.5, 0.0)
    assert packed["gap_to_padded"] == "0.0e+00"
    assert {*training.PRINTED} <= {*packed}
