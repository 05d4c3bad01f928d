"""The demo's documents: the documented functions of the Python standard library, as bytes."""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

END_OF_DOCUMENT = 256
VOCABULARY_SIZE = 257  # 256 bytes and the end of a document

_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}

Document = NDArray[np.int64]


@dataclass(frozen=True)
class Corpus:
    """Documents of bytes, each ending with END_OF_DOCUMENT, in a random order that the seed decides.

    Attributes:
        training: documents to train on.
        validation: documents held out.
        functions: how many functions the documents were made from.
        split: how many of those were longer than the maximum and became several documents.
        unreadable: source files that this Python couldn't parse.
    """

    training: tuple[Document, ...]
    validation: tuple[Document, ...]
    functions: int
    split: int
    unreadable: int

    def steps(self, num_steps: int, documents_per_step: int, seed: int) -> list[list[Document]]:
        """The training documents of each step: epoch after epoch, every epoch in an order of its own."""
        rng = np.random.default_rng([seed, 1])
        stream: list[int] = []
        while len(stream) < num_steps * documents_per_step:
            stream.extend(rng.permutation(len(self.training)).tolist())
        return [
            [self.training[item] for item in stream[start : start + documents_per_step]]
            for start in range(0, num_steps * documents_per_step, documents_per_step)
        ]


def read_corpus(max_length: int, num_validation: int, seed: int) -> Corpus:
    """The documented functions of the standard library that runs this program.

    Args:
        max_length: tokens per document at most; longer functions are split into pieces of that length and a rest.
        num_validation: documents to hold out.
        seed: decides the order.

    Raises:
        ValueError: the library's sources aren't there, or hold too few functions.
    """
    library = Path(sysconfig.get_path("stdlib"))
    functions, unreadable = _documented_functions(library)
    documents: list[Document] = []
    split = 0
    for source in functions:
        tokens = np.append(np.frombuffer(source, dtype=np.uint8).astype(np.int64), END_OF_DOCUMENT)
        split += len(tokens) > max_length
        documents.extend(tokens[start : start + max_length] for start in range(0, len(tokens), max_length))
    if len(documents) <= num_validation:
        raise ValueError(
            f"{library} holds {len(documents)} documents, and the demo needs more than {num_validation}; run it with a "
            "Python whose standard library comes as source files."
        )
    order = np.random.default_rng([seed, 0]).permutation(len(documents))
    shuffled = tuple(documents[item] for item in order)
    return Corpus(shuffled[num_validation:], shuffled[:num_validation], len(functions), split, unreadable)


def _documented_functions(library: Path) -> tuple[Sequence[bytes], int]:
    """The source of every distinct function with a docstring, and the number of files that couldn't be parsed."""
    functions: dict[bytes, None] = {}  # a set that keeps the order
    unreadable = 0
    for path in sorted(library.rglob("*.py")):
        if _NOT_THE_LIBRARY.isdisjoint(path.relative_to(library).parts):
            source = path.read_bytes()
            try:
                functions.update(dict.fromkeys(_functions_of(source)))
            except (SyntaxError, ValueError):
                unreadable += 1
    return tuple(functions), unreadable


def _functions_of(source: bytes) -> Iterator[bytes]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the library's own string literals
        tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node):
            yield b"".join(lines[node.lineno - 1 : node.end_lineno])
