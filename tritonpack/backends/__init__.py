"""The backends of attention: their interface, their registry, and the choice of one.

A backend is a module of this folder with the four functions of `BackendModule`. Its name is listed in `Backend`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Literal, Protocol, cast, get_args

import torch
from torch import Tensor

from tritonpack.checks import check_choice
from tritonpack.errors import BackendUnavailableError

if TYPE_CHECKING:
    from tritonpack.backends.tile_table import TileTables
    from tritonpack.masks.block_diagonal import BlockDiagonalMask
    from tritonpack.options import AttentionOptions

# The registry: each name is the name of a module; "auto" chooses one of them.
Backend = Literal["auto", "triton", "gluon", "blocked", "reference"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


class BackendModule(Protocol):
    """The functions of a backend. Their inputs are already checked; rows and documents may be empty anywhere."""

    def check_device(self, q: Tensor) -> None:
        """Refuse unsupported devices and dtypes.

        Raises:
            BackendUnavailableError: the backend can't compute tensors like q on this machine.
        """

    def plan_tiles(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, options: AttentionOptions, *, backward: bool
    ) -> TileTables:
        """Make the tile tables of the kernels on the mask's device; without `backward` only the table of forward.

        torch.compile traces this function, and it must not wait for the device. A backend that needs no tables returns
        `NO_TABLES`.

        Raises:
            BackendUnavailableError: a head dimension or an option that the backend doesn't support.
        """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, options: AttentionOptions, tiles: TileTables
    ) -> tuple[Tensor, Tensor]:
        """Compute out (T_q, H, D_v) in q's dtype and lse (H, T_q) in float32, or float64 for float64."""

    def backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: BlockDiagonalMask,
        options: AttentionOptions,
        tiles: TileTables,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Compute (dq, dk, dv, dsinks) in the shapes and dtypes of q, k, v and the options' sinks."""


def resolve_backend(backend: Backend, q: Tensor) -> str:
    """Return the name of the backend for inputs like q, never "auto".

    Raises:
        ValueError: an unknown name.
        BackendUnavailableError: the named backend can't run on these inputs.
    """
    check_choice(backend, BACKENDS, "backend")
    if backend == "auto":
        kernels = q.dtype == torch.float32 or (q.dtype != torch.float64 and q.is_cuda and has_matrix_products(q.device))
        backend = "triton" if q.is_cuda and kernels else "blocked"
    load(backend).check_device(q)
    return backend


@cache
def has_matrix_products(device: torch.device) -> bool:
    """Return whether Triton has matrix instructions for 16-bit types on this GPU. Without them it is very slow."""
    if torch.version.hip:  # CDNA, and since RDNA 3
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        return name.startswith(("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12"))
    return torch.cuda.get_device_capability(device) >= (8, 0)


def load(name: str) -> BackendModule:
    """Return the module of a backend, imported at its first use.

    Raises:
        BackendUnavailableError: a package that the backend imports isn't installed.
    """
    if torch.compiler.is_compiling() or name not in loaded:  # torch.compile caches what it reads from `loaded`
        _import(name)
    return loaded[name]


loaded: dict[str, BackendModule] = {}


def _import(name: str) -> None:
    if name in loaded:
        return
    try:
        loaded[name] = cast("BackendModule", import_module(f"{__name__}.{name}"))
    except ImportError as error:
        raise BackendUnavailableError(
            f"backend={name!r} needs Triton 3.6 or later, which can't be imported here ({error}); run pip install "
            "'triton>=3.6', or use backend='blocked'."
        ) from error


# This mark makes torch.compile run the import instead of tracing it. torch.compiler.assume_constant_result sets it,
# too, but imports the compiler, which takes seconds.
_import._dynamo_marked_constant = True  # type: ignore[attr-defined]
