"""Checks that a project which uses or extends tritonpack may import in its own tests."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tritonpack.testing.cases import CASES as CASES
    from tritonpack.testing.cases import Case as Case
    from tritonpack.testing.cases import Inputs as Inputs
    from tritonpack.testing.cases import make_inputs as make_inputs
    from tritonpack.testing.isolation import check_isolation as check_isolation
    from tritonpack.testing.tolerance import Errors as Errors
    from tritonpack.testing.tolerance import check_backend as check_backend
    from tritonpack.testing.tolerance import check_outputs as check_outputs

_HOMES = {
    "CASES": "cases",
    "Case": "cases",
    "Errors": "tolerance",
    "Inputs": "cases",
    "check_backend": "tolerance",
    "check_isolation": "isolation",
    "check_outputs": "tolerance",
    "make_inputs": "cases",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tritonpack.testing' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"tritonpack.testing.{_HOMES[name]}"), name)
