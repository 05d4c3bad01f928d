"""The demo's documents: the documented functions of the Python standard library, as bytes."""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

END_OF_DOCUMENT = 256
VOCABULARY_SIZE = 257  # 256 bytes and the end of a document

_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}

Document = NDArray[np.int64]


class Corpus(NamedTuple):
    """Documents of bytes in random order, each with END_OF_DOCUMENT at its end.

    Attributes:
        training: documents to train on.
        validation: documents held out.
        functions: the number of functions that the documents are made of.
    """

    training: list[Document]
    validation: list[Document]
    functions: int

    def steps(self, num_steps: int, documents_per_step: int, seed: int) -> list[list[Document]]:
        """The training documents of each step. Every epoch has its own order."""
        rng = np.random.default_rng([seed, 1])
        total = num_steps * documents_per_step
        epochs = [rng.permutation(len(self.training)) for _ in range(0, total, len(self.training))]
        order = np.concatenate(epochs)[:total].reshape(num_steps, documents_per_step)
        return [[self.training[item] for item in step] for step in order]


def read_corpus(max_length: int, num_validation: int, seed: int) -> Corpus:
    """Read the documented functions of the standard library that runs this program.

    Args:
        max_length: the most tokens of a document; longer functions are split.
        num_validation: documents to hold out.
        seed: decides the order.

    Raises:
        ValueError: the library has no sources, or too few functions.
    """
    library = Path(sysconfig.get_path("stdlib"))
    functions: dict[bytes, None] = {}  # each distinct function once, in order
    for path in sorted(library.rglob("*.py")):
        if _NOT_THE_LIBRARY.isdisjoint(path.relative_to(library).parts):
            with suppress(SyntaxError, ValueError):  # a file for another version of Python
                functions.update(dict.fromkeys(_documented_functions(path.read_bytes())))
    documents: list[Document] = []
    for source in functions:
        tokens = np.append(np.frombuffer(source, dtype=np.uint8).astype(np.int64), END_OF_DOCUMENT)
        documents.extend(tokens[start : start + max_length] for start in range(0, len(tokens), max_length))
    if len(documents) <= num_validation:
        raise ValueError(
            f"{library} holds {len(documents)} documents, and the demo needs more than {num_validation}; run it with a "
            "Python whose standard library comes as source files."
        )
    shuffled = [documents[item] for item in np.random.default_rng([seed, 0]).permutation(len(documents))]
    return Corpus(shuffled[num_validation:], shuffled[:num_validation], len(functions))


def _documented_functions(source: bytes) -> Iterator[bytes]:
    """The source of every function with a docstring."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about string literals of the library
        tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node):
            yield b"".join(lines[node.lineno - 1 : node.end_lineno])
