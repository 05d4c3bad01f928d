"""The training benchmark: its documents, its models and its rows."""

import numpy as np

from benchmarks import training
from examples.demo.corpus import END_OF_DOCUMENT
from examples.demo.training import Run

# Seconds, MiB and computed tokens of a step.
WAYS = {"padded": (2.0, 800, 200), "unpadded": (1.25, 500, 100), "naive": (1.0, 500, 100), "packed": (1.0, 400, 100)}


def runs():
    return {
        way: Run((3.0, 2.5, 2.0), (seconds,) * 3, (100,) * 3, (computed,) * 3, mib * 2**20, 2.1)
        for way, (seconds, mib, computed) in WAYS.items()
    }


def test_documents_have_the_lengths_drawn():
    text = np.arange(10)
    documents = list(training.documents_of([4, 1, 12], text))
    assert [len(document) for document in documents] == [4, 1, 12]
    assert [document[-1] for document in documents] == [END_OF_DOCUMENT] * 3
    assert documents[0].tolist() == [0, 1, 2, END_OF_DOCUMENT]
    assert documents[2][:-1].tolist() == [5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5]  # from the start again after the end


def test_figures_compare_with_padded():
    padded, unpadded, naive, packed = training.figures_of(runs()).values()
    assert [row["speed"] for row in (padded, unpadded, naive, packed)] == [1.0, 1.6, 2.0, 2.0]
    assert (padded["memory"], packed["memory"]) == (1.0, 0.5)
    assert (padded["padding"], packed["padding"]) == (0.5, 0.0)
    assert packed["gap_to_padded"] == "0.0e+00"
    assert {*training.PRINTED} <= {*packed}
