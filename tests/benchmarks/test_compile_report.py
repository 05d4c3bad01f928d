"""The compile report: its rows, which of them are out of date, compilers that fail."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from benchmarks import compile_report
from benchmarks.compile_report import Row, compile_rows, make_row, stale
from tests.kernels import lint
from tests.kernels.aot import USES_TILES_OF, Configuration, Resources
from tests.kernels.lint import SHARED_KIB, findings, key, launchable
from tests.kernels.sass import Loop
from tritonpack.kernels.tile_shapes import current_arch

FORWARD, DKDV, DQ = launchable()[:3]
RESOURCES = Resources(
    registers=128, spills=9, shared_bytes=2048, matrix_instructions=8, instructions=500,
    loops=(Loop(200, 4, 5, 2, 3), Loop(100, 4, 0, 1, 2)),
)  # fmt: skip


def resources(**changed: Any) -> Resources:
    return Resources(**{**vars(RESOURCES), "loops": (Loop(200, 4),), "spills": 0, **changed})


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (resources(), []),
        (resources(instructions=20), ["no code"]),
        (resources(matrix_instructions=0), ["no matrix instructions"]),
        (resources(loops=()), ["no loop that multiplies"]),
        (resources(shared_bytes=164 * 1024), ["164 of 163 KiB"]),
        (resources(spills=133, loops=(Loop(300, 4, spills=1), Loop(300, 4, spills=12))),
         ["13 spills in loops", "120 spills outside"]),
        ("RuntimeError: no", ["doesn't compile"]),
    ],
    ids=str,
)  # fmt: skip
def test_findings(found: Any, expected: list[str]) -> None:
    assert [finding.text for finding in findings(FORWARD, found)] == expected
    assert [finding.is_minor for finding in findings(FORWARD, found)] == [x.endswith("outside") for x in expected]


def row(configuration: Any, version: str = triton.__version__, **facts: str) -> Row:
    return make_row(configuration, RESOURCES) | {"triton": version} | facts


def test_every_name_is_unique_and_every_gpu_has_kernels() -> None:
    names = [str(configuration) for configuration in launchable()]
    assert len(names) == len({*names})
    assert {name.split("-")[2 if name.startswith("gluon") else 1] for name in names} == SHARED_KIB.keys()
    for expected in ("dkdv-sm_89-d128-bf16-group1-dropout", "forward-sm_120-d64-bf16-group8-sinks-tree",
                     "dq-gfx942-d64-bf16-dlse", "dq-gfx950-d64-bf16-large", "dv-sm_90-d512-bf16",
                     "dq-sm_100-d192-128-bf16"):  # fmt: skip
        assert expected in names
    assert not any(name.startswith("dkdv") and "sinks" in name for name in names)


@pytest.mark.parametrize("gpu", SHARED_KIB)
def test_gpus_use_the_tiles_that_the_launcher_chooses(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0" if gpu.startswith("gfx") else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(int(gpu[3:]), 10))
    properties = SimpleNamespace(gcnArchName=f"{gpu}:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert current_arch.__wrapped__(torch.device("cuda", 0)) == USES_TILES_OF.get(gpu, gpu)


@pytest.mark.parametrize(
    ("module", "change", "expected"),
    [
        ("primitives", lambda code: f"{code}\n# A comment.\n", [False, False]),
        ("forward", lambda code: code.replace('"""', '"""A docstring. ', 1), [False, False]),
        ("forward", lambda code: f"{code}\nVALUE = 1\n", [True, False]),
        ("backward", lambda code: f"{code}\nVALUE = 1\n", [False, True]),
        ("primitives", lambda code: f"{code}\nVALUE = 1\n", [True, True]),
    ],
)
def test_key_depends_on_code(
    module: str, change: Callable[[str], str], expected: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [key(FORWARD), key(DQ)]
    for name in ("forward", "backward", "primitives"):
        code = (lint.KERNELS / f"{name}.py").read_text()
        (tmp_path / f"{name}.py").write_text(change(code) if name == module else code)
    monkeypatch.setattr(lint, "KERNELS", tmp_path)
    lint._code.cache_clear()
    after = [key(FORWARD), key(DQ)]
    lint._code.cache_clear()
    assert [a != b for a, b in zip(before, after, strict=True)] == expected


def test_stale_rows_are_absent_changed_or_of_another_version() -> None:
    rows = [row(FORWARD), row(DKDV, key="0123"), row(DQ, version="3.0.0")]
    assert stale(rows, [FORWARD, DKDV, DQ]) == [DKDV, DQ]
    assert stale([row(FORWARD, tile="16x16 w4 s2")], [FORWARD]) == [FORWARD]


def test_a_compiler_may_raise_or_end_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_configuration(configuration: Configuration) -> Resources:
        if configuration is FORWARD:
            os._exit(1)
        if configuration is DKDV:
            raise RuntimeError("a\nno such layout")
        return RESOURCES

    monkeypatch.setattr(compile_report, "compile_configuration", compile_configuration)
    rows = {r["configuration"]: r for r in compile_rows([FORWARD, DKDV, DQ], jobs=2)}
    assert rows[str(FORWARD)]["error"] == "the compiler ended its process"
    assert rows[str(DKDV)]["error"] == "RuntimeError: no such layout"
    assert {rows[str(c)]["findings"] for c in (FORWARD, DKDV)} == {"doesn't compile"}
    assert rows[str(DQ)] == make_row(DQ, RESOURCES)
