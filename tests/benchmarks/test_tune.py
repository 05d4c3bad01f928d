"""The tuner: its candidates, and its choice."""

from typing import Any

import torch

from benchmarks import tune
from tritonpack.kernels.tile_shapes import TileShape, select_tile


def test_fastest_tile_wins() -> None:
    wanted = TileShape(64, 32, 4, 3)
    assert wanted in set(tune.candidates("forward", 128, "sm_90"))
    shipped = select_tile("forward", 128, torch.bfloat16, "sm_90")

    def measure(kernel: Any, tile: TileShape, block_d: int) -> float | None:
        return {wanted: 1.0, shipped: 2.0}.get(tile)  # the others don't run

    assert tune.tune("forward", 128, "sm_90", measure) == wanted
    assert tune.tune("forward", 128, "sm_90", lambda *_: None) == shipped
    assert tune.tune("dv", 256, "sm_90", lambda *_: 1.0, block_n=64).block_n == 64
