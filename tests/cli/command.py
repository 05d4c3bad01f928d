"""Run command lines."""

import re

import pytest

from tritonpack.cli import main


def run(*arguments: object) -> object:
    """The exit code of a command line."""
    with pytest.raises(SystemExit) as exit_info:
        main([str(argument) for argument in arguments])
    return exit_info.value.code


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The message of a wrong command line: on standard error, exit code 2, nothing on standard output."""
    capsys.readouterr()
    assert run(*arguments) == 2, arguments
    captured = capsys.readouterr()
    assert captured.out == ""
    error = re.sub(r"(?m)^tritonpack: compiling .*\n", "", captured.err)  # at a machine's first use
    if "error: " not in error:  # typer's box
        return " ".join(re.sub(r"[─│╭╮╰╯]", "", error).split())
    assert re.fullmatch(r"error: [^\n]*\n", error), error
    return error
