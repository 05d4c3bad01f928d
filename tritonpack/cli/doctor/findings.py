"""The findings of the doctor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        what: the name of the check.
        outcome: "right"; "wrong": it should work here and doesn't; "warning": it works, but something else may not;
            "not here": this machine can't run it and doesn't need to.
        detail: figures, or the reason and the remedy.
        seconds: how long the check took.
    """

    what: str
    outcome: str
    detail: str
    seconds: float = 0.0


class NotHereError(Exception):
    """Raised by a check that this machine can't run and doesn't need to; the message says why."""
