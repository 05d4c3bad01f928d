"""The registry of what is measured: each case is the same work for several implementations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.harness.ledger import joined

OURS = "tritonpack"
REPEATS = 20


@dataclass(frozen=True)
class Call:
    """A call to be timed.

    Attributes:
        function: called without arguments.
        around: makes a context for the call, which is entered and left outside of the time.
        flops, nbytes: what a call computes and writes; the row says how much in a second.
    """

    function: Callable[[], object]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    flops: float = 0
    nbytes: float = 0


@dataclass(frozen=True)
class Case:
    """Implementations that do the same work, on the same inputs.

    Attributes:
        name: of its module and function, by which -k selects.
        benchmarks: the names of its measurements.
        parameters: what tells the case from others; the first is named on the axis of a plot.
        prepare: makes the inputs, and implementation -> its call, or, if there are several benchmarks, a function that
            yields one for each as its results are checked.
        implementations: the names, where they are known before.
        repeats: how often each call is timed at most.
    """

    name: str
    benchmarks: Sequence[str]
    parameters: Mapping[str, object]
    prepare: Callable[[], Mapping[str, Any]]
    implementations: Sequence[str] = ()
    repeats: int = REPEATS

    @property
    def text(self) -> str:
        """The parameters as a row has them."""
        return joined(self.parameters)

    def calls(self, prepared: Any) -> Iterator[Call]:
        """The calls of an implementation, one for each benchmark."""
        made = prepared() if len(self.benchmarks) > 1 else [prepared]
        return (one if isinstance(one, Call) else Call(one) for one in made)

    def __str__(self) -> str:
        return f"{self.name.removeprefix('benchmarks.')}: {self.text or self.benchmarks[0]}"


CASES: list[Case] = []


def register(*benchmarks: str, repeats: int = REPEATS, **parameters: Sequence[object]) -> Callable[..., Any]:
    """Register a function of some parameters as `Case.prepare`: a case for each combination of their values."""

    def registered(function: Callable[..., Mapping[str, Any]]) -> Callable[..., Mapping[str, Any]]:
        name = f"{function.__module__}.{function.__name__}"
        for values in itertools.product(*parameters.values()):
            given = dict(zip(parameters, values, strict=True))
            CASES.append(Case(name, benchmarks, given, partial(function, **given), repeats=repeats))
        return function

    return registered


def selected(words: str) -> list[Case]:
    """The cases whose name, benchmarks and parameters hold all of these words."""

    def text(case: Case) -> str:
        return f"{case.name} {' '.join(case.benchmarks)} {case.text}"

    return [case for case in CASES if all(word.removeprefix("test_") in text(case) for word in words.split())]
