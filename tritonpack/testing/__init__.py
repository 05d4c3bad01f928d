"""Checks that a project which uses or extends tritonpack may import in its own tests."""

from typing import TYPE_CHECKING, Any

from tritonpack.testing.cases import CASES, Case, Inputs, make_inputs
from tritonpack.testing.tolerance import Errors, check_backend, check_outputs

if TYPE_CHECKING:
    from tritonpack.testing.isolation import check_isolation

__all__ = ["CASES", "Case", "Errors", "Inputs", "check_backend", "check_isolation", "check_outputs", "make_inputs"]


def __getattr__(name: str) -> Any:
    if name != "check_isolation":
        raise AttributeError(f"module 'tritonpack.testing' has no attribute {name!r}; it has {', '.join(__all__)}")
    from tritonpack.testing.isolation import check_isolation  # which needs transformers

    return check_isolation
