import ast

import numpy as np
import pytest

pytest.importorskip("rich")

from examples.demo.corpus import END_OF_DOCUMENT, read_corpus


def text(tokens):
    assert tokens[-1] == END_OF_DOCUMENT
    return bytes(tokens[:-1].astype(np.uint8)).decode()


def test_each_documented_function_is_a_document(small_library):
    corpus = read_corpus(max_length=4096, num_validation=10, seed=0)
    assert corpus.functions == 80
    assert (len(corpus.training), len(corpus.validation)) == (70, 10)
    names = [ast.parse(text(document)).body[0].name for document in corpus.training + corpus.validation]
    assert sorted(names) == sorted(f"function_{i}" for i in range(80))


def test_long_documents_are_split_without_loss(small_library):
    whole = read_corpus(max_length=4096, num_validation=1, seed=0)
    pieces = read_corpus(max_length=100, num_validation=1, seed=0)
    lengths = [len(document) for document in whole.training + whole.validation]
    parts = [len(document) for document in pieces.training + pieces.validation]
    assert max(parts) == 100
    assert sum(parts) == sum(lengths)
    assert len(parts) == sum(-(-length // 100) for length in lengths)


def test_every_document_is_taken_once_per_epoch(small_library):
    corpus = read_corpus(4096, 10, seed=0)
    steps = corpus.steps(num_steps=20, documents_per_step=7, seed=0)
    assert [len(step) for step in steps] == [7] * 20
    epochs = [[id(document) for step in steps[start : start + 10] for document in step] for start in (0, 10)]
    assert set(epochs[0]) == set(epochs[1]) == set(map(id, corpus.training))
    assert epochs[0] != epochs[1]


def test_too_few_functions_are_refused(small_library):
    with pytest.raises(ValueError, match="holds 80 documents, and the demo needs more than 80"):
        read_corpus(4096, num_validation=80, seed=0)
