"""Which classes of transformers the tests have shown to be packed exactly, and with which of its versions."""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files

import transformers
from transformers import PreTrainedModel


def is_shown(kind: type) -> bool:
    """Whether a model class is one that `shown.csv` lists for the installed version of transformers.

    The class must be transformers' own: a subclass or remote code of the same name is another class.
    """
    kind = without_wrappers(kind)
    return kind.__module__.startswith("transformers.") and installed() in _versions().get(kind.__name__, ())


def installed() -> str:
    """The installed version of transformers as `shown.csv` has it, such as "5.23"."""
    return ".".join(transformers.__version__.split(".")[:2])


def without_wrappers(kind: type) -> type:
    """The class that a model was built of: FSDP's `fully_shard` gives a model a subclass made by torch."""
    models = [base for base in kind.__mro__ if issubclass(base, PreTrainedModel)]
    return next((base for base in models if not base.__module__.startswith("torch.")), kind)


@cache
def _versions() -> dict[str, frozenset[str]]:
    lines = files("tritonpack.patches").joinpath("shown.csv").read_text(encoding="utf-8").splitlines()
    return {row["class"]: frozenset(row["versions"].split()) for row in csv.DictReader(lines)}
