"""The backends of attention: their contract, and the registry that every other module asks.

A backend is a module of this folder with the functions of `BackendModule`. The module has the backend's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, get_args

from torch import Tensor

from tritonpack.errors import BackendUnavailableError

if TYPE_CHECKING:
    from tritonpack.backends.tile_table import TileTables
    from tritonpack.masks.block_diagonal import BlockDiagonalMask
    from tritonpack.options import AttentionOptions

Backend = Literal["auto", "triton", "gluon", "blocked", "reference"]  # "auto" stands for one of the others
BACKENDS: tuple[Backend, ...] = get_args(Backend)


class BackendModule(Protocol):
    """What a backend computes. Its inputs are checked already; rows and documents may be empty anywhere."""

    def check_device(self, q: Tensor) -> None:
        """Refuse a device or a dtype.

        Raises:
            BackendUnavailableError: the backend can't compute with tensors like q on this machine.
        """

    def plan_tiles(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, options: AttentionOptions, *, backward: bool
    ) -> TileTables:
        """The tables that the kernels read, on the mask's device; without `backward` only those of forward.

        Nothing waits for the device here, and torch.compile traces it. A backend without tables has `NO_TABLES`.

        Raises:
            BackendUnavailableError: a head dimension or an option that the backend doesn't have.
        """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, options: AttentionOptions, tiles: TileTables
    ) -> tuple[Tensor, Tensor]:
        """out (T_q, H, D_v) in q's dtype and lse (H, T_q) in float32, or float64 for float64."""

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
        """(dq, dk, dv, dsinks) in the shapes and dtypes of q, k, v and the options' sinks."""


def load(name: str) -> BackendModule:
    """The backend of a name, imported when it is first used.

    Each import is written out, because torch.compile traces no `import_module`.

    Raises:
        BackendUnavailableError: what the backend imports isn't installed.
    """
    module: BackendModule
    try:
        if name == "triton":
            from tritonpack.backends import triton as module
        elif name == "gluon":
            from tritonpack.backends import gluon as module
        elif name == "blocked":
            from tritonpack.backends import blocked as module
        else:
            assert name == "reference", name
            from tritonpack.backends import reference as module
    except ImportError as error:
        raise BackendUnavailableError(
            f"backend={name!r} needs Triton 3.6 or later, which can't be imported here ({error}); install it or use "
            "backend='blocked'."
        ) from error
    return module
