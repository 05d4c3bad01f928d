"""Tile shapes: every table is legal, and a file with a bad row loads no tile."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tritonpack.kernels import tile_shapes as tiles
from tritonpack.kernels.tile_shapes import FEATURE_TILES, TILES, TileShape, load_tiles, select_tile, why_illegal

FEATURES = ("softcap", "sinks", "alibi", "dropout", "tree")
ROWS: list[Any] = [
    (arch, kernel, d, tile) for arch in TILES for kernel in TILES[arch] for d, tile in TILES[arch][kernel].items()
]


@pytest.fixture(autouse=True)
def _nothing_loaded() -> Iterator[None]:
    yield
    tiles._loaded.clear()


def test_every_row_is_legal_and_taken() -> None:
    for arch, kernel, row, tile in ROWS:
        assert why_illegal(kernel, tile, row, arch) is None, (arch, kernel, row)
        assert select_tile(kernel, row, torch.bfloat16, arch) == tile
        of_features = FEATURE_TILES.get(arch, {}).get(kernel, {}).get(row, {})
        for feature, other in ((one, x) for features, x in of_features.items() for one in features.split()):
            assert feature in FEATURES
            assert why_illegal(kernel, other, row, arch) is None, (arch, kernel, row, feature)
            assert select_tile(kernel, row, torch.bfloat16, arch, frozenset({feature})) == other != tile


def test_dk_and_dv_have_the_same_block_n() -> None:
    for arch, kernel, row, _ in ROWS:
        for features in (frozenset({one}) for one in FEATURES if kernel == "dk"):
            dk, dv = (select_tile(k, row, torch.bfloat16, arch, features) for k in ("dk", "dv"))
            assert dk.block_n == dv.block_n


def test_first_of_several_features_decides() -> None:
    both = select_tile("dq", 128, torch.bfloat16, "sm_90", frozenset({"tree", "alibi"}))
    assert both == FEATURE_TILES["sm_90"]["dq"][128]["alibi dropout"]


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        (TileShape(96, 64, 4, 2), "block_m must be a power of two from 16; got 96"),
        (TileShape(64, 8, 4, 2), "block_n must be a power of two from 16; got 8"),
        (TileShape(128, 64, 3, 2), "warps must be 1, 2, 4, 8 or 16"),
        (TileShape(64, 64, 8, 2), "8 warps compute the same twice unless a tile has 128 rows; got 64"),
        (TileShape(128, 64, 8, 2, heads=3), "heads must be 1, 2, 4, 8 or 16"),
        (TileShape(128, 128, 8, 4), "about 288 KiB of shared memory, of 227"),
    ],
)
def test_illegal_tiles(tile: TileShape, message: str) -> None:
    assert message in str(why_illegal("forward", tile, 128, "sm_90"))


def test_a_file_replaces_tiles(tmp_path: Path) -> None:
    mine = {
        ("sm_90", "forward", 128): TileShape(64, 64, 4, 2, deferred=True),
        ("sm_80", "dq", 64): TileShape(64, 32, 4, 1),
    }
    tiles.save_tiles(tmp_path / "tiles.json", mine, device="a GPU")  # type: ignore[arg-type]
    assert load_tiles(tmp_path / "tiles.json") == 2
    tile = mine["sm_90", "forward", 128]
    assert select_tile("forward", 128, torch.bfloat16, "sm_90") == tile
    for feature in ("softcap", "alibi", "dropout"):
        assert select_tile("forward", 128, torch.bfloat16, "sm_90", frozenset({feature})) != tile
    assert select_tile("forward", 128, torch.bfloat16, "sm_90", frozenset({"sinks"})) == tile
    assert select_tile("forward", 128, torch.float32, "sm_90") != tile
    assert select_tile("forward", 64, torch.bfloat16, "sm_90") == TILES["sm_90"]["forward"][64]


GOOD = {
    "arch": "sm_90", "kernel": "forward", "block_d": 128, "block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2,
}  # fmt: skip
# What differs from GOOD in a row, and words of the refusal
CHANGED: list[tuple[dict[str, Any], str]] = [
    ({"arch": "sm_70"}, "no table has a row for 'sm_70'"),
    ({"block_d": 128.0}, "no table has a row for 'sm_90', 'forward', 128.0"),
    ({"block_m": 100}, "forward on sm_90 at head dimension 128: block_m must be a power of two"),
    ({"block_m": 128.0}, "block_m of row 1 must be an integer; got 128.0"),
    ({"num_stages": float("inf")}, "num_stages of row 1 must be an integer; got inf"),
    ({"heads": True}, "heads of row 1 must be an integer; got True"),
    ({"deferred": 1}, "deferred of row 1 must be true or false; got 1"),
    ({"kernel": "dq", "deferred": True}, "deferred must be false but in fo"),
    ({"num_warp": 4}, "row 1 has 'num_warp'.*allowed"),
    ({}, "row 1 is a second tile for sm_90, forward, 128"),
    ({"kernel": "dk", "block_d": 256, "block_m": 16}, "dk and dv of sm_90 at 256 must have the same block_n"),
]
BAD: list[tuple[Any, str]] = [
    *(({"tiles": [GOOD, GOOD | changes]}, message) for changes, message in CHANGED),
    ({"tiles": [{k: v for k, v in GOOD.items() if k != "block_n"}]}, "row 0 lacks block_n"),
    ({"tiles": [GOOD, "sm_90"]}, "row 1 must be a mapping; got str 'sm_90'"),
    ({}, r"must hold \{\"tiles\": \[...\]\}; got dict \{\}"),
    ([1, 2], r"must hold \{\"tiles\": \[...\]\}; got list"),
    ("tiles", "JSONDecodeError"),
    (b"\xff\xfe", "UnicodeDecodeError"),
    (None, "FileNotFoundError"),
]


@pytest.mark.parametrize(
    ("gpu", "arch"),
    [("gfx90a:sramecc+:xnack-", "gfx942"), ("gfx1103", "gfx1100"), ("gfx1170", "gfx1100"), ("gfx1250", "gfx1201")],
)
def test_amd_gpus_use_the_tiles_of_their_family(gpu: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=gpu))
    assert tiles.current_arch.__wrapped__(torch.device("cuda", 0)) == arch


def test_gpus_with_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    found = {(8, 0): None, (8, 6): 99, (8, 9): 99, (9, 0): None, (12, 0): 99, (7, 5): 64}
    for capability, kib in found.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, it=capability: it)
        assert tiles.small_shared_kib.__wrapped__(torch.device("cuda", 0)) == kib
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert tiles.small_shared_kib.__wrapped__(torch.device("cuda", 0)) is None


@pytest.mark.parametrize(("content", "message"), BAD)
def test_bad_file_loads_no_tile(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=message):
        load_tiles(path)
    assert not tiles._loaded
    with pytest.raises(ValueError, match="path must be the name of a file, a str or a Path; got "):
        load_tiles([path])  # type: ignore[arg-type]
