"""The classes of transformers that the tests have shown to be packed exactly, and in which of its versions."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

import transformers
from transformers import PreTrainedModel


def is_shown(kind: type, *, in_trees: bool = False) -> bool:
    """Whether `exact_classes.csv` lists a model class for the installed version of transformers.

    A subclass, or remote code of the same name, is another class. `in_trees` asks for documents that share the tokens
    that they begin with.
    """
    kind = without_wrappers(kind)
    known = versions()["in_trees" if in_trees else "versions"]
    return kind.__module__.startswith("transformers.") and installed() in known.get(kind.__name__, ())


def installed() -> str:
    """Return the installed version of transformers as `exact_classes.csv` writes it, such as "5.23"."""
    return ".".join(transformers.__version__.split(".")[:2])


def without_wrappers(kind: type) -> type:
    """Return the class that a model was built from: FSDP's `fully_shard` gives a model a subclass made by torch."""
    models = [base for base in kind.__mro__ if issubclass(base, PreTrainedModel)]
    return next((base for base in models if not base.__module__.startswith("torch.")), kind)


@cache
def versions() -> dict[str, dict[str, set[str]]]:
    """Read the table as {column: {class: versions of transformers}}; `in_trees` is for documents that share tokens."""
    with Path(__file__).with_name("exact_classes.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {column: {row["class"]: set(row[column].split()) for row in rows} for column in ("versions", "in_trees")}
