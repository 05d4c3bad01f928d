"""What the doctor finds, one thing at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["right", "wrong", "warning", "not here"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: its name.
        outcome: "right"; "wrong": it should work here and doesn't; "warning": it works, but something may not;
            "not here": this machine can't do it, and needn't.
        detail: figures, or the reason and the remedy.
        seconds: how long the look took.
    """

    what: str
    outcome: Outcome
    detail: str
    seconds: float = 0.0


class NotHereError(Exception):
    """What was to be tried can't run on this machine, and needn't; the message says why."""
