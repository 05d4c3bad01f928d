"""Kernels' assertions in Triton's interpreter, which evaluates them only with its option `debug`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import interpreter_builder

from tritonpack import kernels


@contextmanager
def assertions() -> Iterator[pytest.MonkeyPatch]:
    """Build masks by kernels, and evaluate their assertions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "serve", lambda x: True)
        options = replace(interpreter_builder.options, debug=True, sanitize_overflow=False)
        patch.setattr(interpreter_builder, "options", options)
        yield patch


def fails(message: str) -> AbstractContextManager[Any]:
    """Expect a kernel's assertion with a message that this expression matches."""
    return pytest.raises(InterpreterError, match=rf"AssertionError\(.{message}")
