"""The command line: `tritonpack check`, `check-backend`, `doctor`, `pack` and `plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave Python with its exit code.

    Args:
        arguments: the command line without the program's name; None means the arguments of the process.
    """
    from tritonpack.cli.app import run

    run(arguments)
