"""The classes of transformers that the tests have shown to be packed exactly, and in which of its versions."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import Literal

import transformers
from transformers import PreTrainedModel

# How documents are laid out for a model: in packed rows, each in a row of a padded batch, or each in a row of a batch
# with others of its length.
Layout = Literal["packed", "padded", "lengths"]
LAYOUTS: tuple[Layout, ...] = ("packed", "padded", "lengths")  # the best one first


def shown_layout(kind: type) -> Layout | None:
    """Return the layout of a model class, if `exact_classes.csv` lists it for the installed version of transformers.

    A subclass, or remote code of the same name, is another class.
    """
    kind = without_wrappers(kind)
    if not kind.__module__.startswith("transformers."):
        return None
    return next((layout for layout in LAYOUTS if installed() in versions()[layout].get(kind.__name__, ())), None)


def newest_packed(kind: type) -> str | None:
    """Return the newest version of transformers in which `exact_classes.csv` lists a class of it as packed, if any."""
    found = versions()["packed"].get(kind.__name__, ()) if kind.__module__.startswith("transformers.") else ()
    return max(found, key=lambda version: [int(part) for part in version.split(".")], default=None)


def installed() -> str:
    """Return the installed version of transformers as `exact_classes.csv` writes it, such as "5.23"."""
    return ".".join(transformers.__version__.split(".")[:2])


def without_wrappers(kind: type) -> type:
    """Return the class that a model was built from: FSDP's `fully_shard` gives a model a subclass made by torch."""
    models = [base for base in kind.__mro__ if issubclass(base, PreTrainedModel)]
    return next((base for base in models if not base.__module__.startswith("torch.")), kind)


@cache
def versions() -> dict[Layout, dict[str, set[str]]]:
    """Read the table as {layout: {class: versions of transformers}}."""
    with Path(__file__).with_name("exact_classes.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {layout: {row["class"]: set(row[layout].split()) for row in rows} for layout in LAYOUTS}
