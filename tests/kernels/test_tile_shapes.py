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
from tritonpack.kernels.tile_shapes import (
    FEATURE_TILES,
    TILES,
    TileShape,
    load_tiles,
    save_tiles,
    select_tile,
    why_illegal,
)

FEATURES = ("softcap", "sinks", "alibi", "dropout", "tree")
ROWS: list[Any] = [
    (arch, kernel, d, tile) for arch in TILES for kernel in TILES[arch] for d, tile in TILES[arch][kernel].items()
]
FEATURE_ROWS: list[Any] = [
    (arch, kernel, d, feature, tile)
    for arch, kernels in FEATURE_TILES.items()
    for kernel, rows in kernels.items()
    for d, tiles in rows.items()
    for features, tile in tiles.items()
    for feature in features.split()
]


@pytest.fixture(autouse=True)
def _nothing_loaded() -> Iterator[None]:
    yield
    tiles._loaded.clear()


def test_every_row_is_legal_and_taken() -> None:
    for arch, kernel, row, tile in ROWS:
        assert why_illegal(kernel, tile, row, arch) is None, (arch, kernel, row)
        assert select_tile(kernel, row, torch.bfloat16, arch) == tile
    for arch, kernel, row, feature, tile in FEATURE_ROWS:
        assert feature in FEATURES
        assert why_illegal(kernel, tile, row, arch) is None, (arch, kernel, row, feature)
        assert select_tile(kernel, row, torch.bfloat16, arch, frozenset({feature})) == tile != TILES[arch][kernel][row]


@pytest.mark.parametrize("feature", FEATURES)
def test_dk_and_dv_have_the_same_block_n(feature: str) -> None:
    for arch in TILES:
        for row in TILES[arch]["dk"]:
            dk, dv = (select_tile(k, row, torch.bfloat16, arch, frozenset({feature})) for k in ("dk", "dv"))
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
    save_tiles(tmp_path / "tiles.json", mine, device="a GPU")  # type: ignore[arg-type]
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
BAD = {
    "no file": (None, "FileNotFoundError"),
    "no json": ("tiles", "JSONDecodeError"),
    "no tiles": ({}, r"must hold \{\"tiles\": \[...\]\}; got dict \{\}"),
    "a missing size": ([{k: v for k, v in GOOD.items() if k != "block_n"}], "block_n"),
    "an unknown architecture": ([GOOD | {"arch": "sm_70"}], "no table has a row for 'sm_70'"),
    "a row that no table has": ([GOOD | {"block_d": 96}], "no table has a row for 'sm_90', 'forward', 96"),
    "an illegal tile": (
        [GOOD, GOOD | {"block_m": 100}],
        "forward on sm_90 at head dimension 128: block_m must be a power of two",
    ),
    "a list": ("[1, 2]", r"must hold \{\"tiles\": \[...\]\}; got list"),
    "tiles that are no list": ({"tiles": {"arch": "sm_90"}}, "must hold .*got dict"),
    "a row that is no tile": ([GOOD, "sm_90"], "row 1 must be a mapping; got str 'sm_90'"),
    "an unknown size": ([GOOD | {"num_warp": 4}], "row 0 has 'num_warp'.*allowed"),
    "half a row": ([GOOD | {"block_m": 128.9}], "block_m of row 0 must be an integer; got 128.9"),
    "a float": ([GOOD | {"block_m": 128.0}], "block_m of row 0 must be an integer; got 128.0"),
    "true": ([GOOD | {"heads": True}], "heads of row 0 must be an integer; got True"),
    "a number for a choice": ([GOOD | {"deferred": 1}], "deferred of row 0 must be true or false; got 1"),
    "an output that dQ can't defer": ([GOOD | {"kernel": "dq", "deferred": True}], "deferred must be false but in fo"),
    "a text": ([GOOD | {"block_m": "128"}], "block_m of row 0 must be an integer; got '128'"),
    "infinite stages": (
        json.dumps({"tiles": [GOOD]}).replace('"num_stages": 2', '"num_stages": Infinity'),
        "num_stages of row 0 must be an integer; got inf",
    ),
    "a list for an architecture": ([GOOD | {"arch": ["sm_90"]}], r"no table has a row for \['sm_90'\]"),
    "a float head dimension": ([GOOD | {"block_d": 128.0}], "no table has a row for 'sm_90', 'forward', 128.0"),
    "the same place twice": ([GOOD, GOOD | {"block_m": 128}], "row 1 is a second tile for sm_90, forward, 128"),
    "not text": (b"\xff\xfe", "UnicodeDecodeError"),
    "dk without its dv": (
        [GOOD | {"kernel": "dk", "block_d": 256, "block_n": 64, "block_m": 16}],
        "dk and dv of sm_90 at 256 must have the same block_n",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "arch"),
    [
        ("gfx908", "gfx942"), ("gfx90a:sramecc+:xnack-", "gfx942"), ("gfx942", "gfx942"), ("gfx950", "gfx942"),
        ("gfx1100", "gfx1100"), ("gfx1103", "gfx1100"), ("gfx1151", "gfx1100"), ("gfx1170", "gfx1100"),
        ("gfx1200", "gfx1201"), ("gfx1201", "gfx1201"), ("gfx1250", "gfx1201"),
    ],
)  # fmt: skip
def test_amd_gpus_use_the_tiles_of_their_family(gpu: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=gpu))
    assert tiles.current_arch.__wrapped__(torch.device("cuda", 0)) == arch


@pytest.mark.parametrize(
    ("capability", "kib"), [((8, 0), None), ((8, 6), 99), ((8, 9), 99), ((9, 0), None), ((12, 0), 99), ((7, 5), 64)]
)
def test_gpus_with_little_shared_memory(
    capability: tuple[int, int], kib: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert tiles.small_shared_kib.__wrapped__(torch.device("cuda", 0)) == kib
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert tiles.small_shared_kib.__wrapped__(torch.device("cuda", 0)) is None


@pytest.mark.parametrize("name", BAD)
def test_bad_file_loads_no_tile(name: str, tmp_path: Path) -> None:
    content, message = BAD[name]
    path = tmp_path / "tiles.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        document = {"tiles": content} if isinstance(content, list) else content
        path.write_text(content if isinstance(content, str) else json.dumps(document))
    with pytest.raises(ValueError, match=message):
        load_tiles(path)
    assert not tiles._loaded


@pytest.mark.parametrize("path", [None, 1.5, 0, True, ["tiles.json"], {}])
def test_path_must_be_a_path(path: Any) -> None:
    with pytest.raises(ValueError, match="path must be the name of a file, a str or a Path; got "):
        load_tiles(path)
