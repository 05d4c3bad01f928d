"""Run a command line and return its exit code."""

import pytest

from tritonpack.cli import main


def run(*arguments: object) -> object:
    with pytest.raises(SystemExit) as exit_info:
        main([str(argument) for argument in arguments])
    return exit_info.value.code
