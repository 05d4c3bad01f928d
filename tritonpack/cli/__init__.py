"""The command line: `tritonpack check`, `check-backend`, `doctor`, `pack` and `plan`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from tritonpack.removed import COMMANDS

# Python arguments in messages of tritonpack.packing, such as tail='keep' or columns=input_ids,labels.
_ARGUMENTS = re.compile(r"\b(objective|overlong|tail|columns|out)=('?[\w./-]+(?:,\w+)*'?(?:(?:, | or )'\w+')*)")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line, without the program's name; None means the arguments of the process.

    Raises:
        SystemExit: with the exit code of the command; 1 if output can't be written, or for another error of the system;
            2 for a wrong command line, 130 for Ctrl-C.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        words = f"{' '.join(arguments)} ".replace("=", " ")
        for removed in COMMANDS:
            if re.match(removed.replace(" ", " (.* )?", 1) + " ", words):
                raise ValueError(f"tritonpack {removed} was removed: {COMMANDS[removed]}")
        from tritonpack.cli.app import app

        app(arguments or ["--help"], prog_name="tritonpack")
    except ModuleNotFoundError as error:
        _fail(2, f"this needs {error.name}, which isn't installed; pip install {error.name}")
    except ValueError as error:
        _fail(2, _ARGUMENTS.sub(lambda found: f"--{found[1]} {found[2].replace(chr(39), '')}", str(error)))
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes what is left of the output when it ends
        _fail(1, str(error))
    sys.exit()


def _fail(code: int, text: str) -> NoReturn:
    print(f"error: {text}", file=sys.stderr)
    sys.exit(code)
