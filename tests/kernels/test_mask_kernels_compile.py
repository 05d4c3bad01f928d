"""Compiles the kernels that build and write masks for each architecture, without the hardware."""

import re
from unittest.mock import patch

import pytest

pytest.importorskip("triton")

from tests.kernels.aot import Launch, recorded
from tests.kernels.launches import mask_calls
from tritonpack import kernels
from tritonpack.kernels.tile_shapes import TILES

pytestmark = pytest.mark.compile

CALLS = {call.name: call for call in mask_calls()}


def launches_of(name: str, arch: str) -> list[Launch]:
    given = CALLS[name].prepare("cpu")
    with recorded(arch) as launches, patch.object(kernels, "serve", lambda x: True):
        CALLS[name].launch(given)
    assert launches or arch.startswith("gfx")  # where nothing is asserted
    return launches


@pytest.mark.parametrize("arch", TILES)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.fast(*(f"{name}-sm_90" for name in ("dense-bool", "tables", "ids-positions", "transpose", "ends")))
def test_compiles_without_spills(name: str, arch: str) -> None:
    rdna = arch.startswith("gfx1")
    for launch in launches_of(name, arch):
        resources, code = launch.compile()
        assert resources.spills == 0
        # At least two programs of up to 512 threads fit on a multiprocessor; one of tables, of which a call has three.
        # RDNA has more registers.
        assert resources.registers <= (128 if name.startswith("tables") else 64) * (3 if rdna else 1)
        if name.startswith("dense"):
            any_store = "STG" if arch.startswith("sm") else "buffer_store"
            wide = {"STG": r"STG\.E\S*\.128"}.get(any_store, "buffer_store_b128" if rdna else "buffer_store_dwordx4")
            assert len(re.findall(wide, code)) == len(re.findall(any_store, code)) > 0


@pytest.mark.fast("ids-segments")
@pytest.mark.parametrize(
    "name", ["offsets-int32", "ids-segments", "ids-padding", "bounds", "parents", "ends", "bounds-tree"]
)
def test_assertions_are_compiled(name: str) -> None:
    assert any("__assertfail" in launch.compile()[1] for launch in launches_of(name, "sm_90"))
