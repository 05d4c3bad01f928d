"""A process whose kernels Triton compiles says so once; a process that finds them in Triton's cache is silent."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from triton import knobs

from tests.fresh import FreshInterpreters
from tritonpack import notices
from tritonpack.kernels import compilation
from tritonpack.kernels.intervals import offsets_kernel

PROGRAM = """
import os, warnings
warnings.simplefilter("ignore")
os.environ.update({environment!r})
from tests.virtual_gpu.driver import fake_gpu
from tritonpack import BlockDiagonalMask
from tritonpack.backends.tile_table import Cut, tile_tables

mask = BlockDiagonalMask.from_seqlens([3, 5])
with fake_gpu() as launches:
    tile_tables(mask, Cut(16))
    print(len(launches))
"""
LINE = "tritonpack: compiling Triton kernels, once per machine for each dtype and head dimension"


@pytest.mark.compile
@pytest.mark.slow
def test_first_launches_say_that_kernels_are_compiled(fresh: FreshInterpreters, tmp_path: Path) -> None:
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "PATH": os.environ["PATH"]}
    lines = []
    for _ in range(2):
        done = fresh.run(PROGRAM.format(environment=environment))
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) > 1
        lines.append(done.stderr.splitlines())
    assert [line[: len(LINE)] for line in lines[0]] == [LINE]
    assert lines[1] == []


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """What was printed since the last call."""
    monkeypatch.setattr(notices, "_said", {})
    monkeypatch.setattr(knobs.compilation, "listener", None)
    return lambda: capsys.readouterr().err


OURS, FOREIGN = SimpleNamespace(fn=offsets_kernel), SimpleNamespace(fn=SimpleNamespace(fn=os.getcwd))


def test_listener_waits_for_a_kernel_of_this_package_that_is_compiled(told: Any) -> None:
    compilation.announce_compilation()
    listener: Any = knobs.compilation.listener
    for src, cache_hit in ((OURS, True), (FOREIGN, False), (SimpleNamespace(), False)):
        listener(src=src, cache_hit=cache_hit, metadata={}, metadata_group={}, times=None)
        assert (told(), knobs.compilation.listener) == ("", listener)
    listener(src=OURS, cache_hit=False, metadata={}, metadata_group={}, times=None)
    assert told().startswith(LINE)
    assert knobs.compilation.listener is None


def test_listener_of_others_is_called_and_stays(told: Any) -> None:
    heard = []

    def others(*, src: Any, **facts: Any) -> None:
        heard.append((src, facts))

    knobs.compilation.listener = others
    compilation.announce_compilation()
    listener: Any = knobs.compilation.listener
    listener(src=OURS, cache_hit=False, metadata={}, metadata_group={}, times=None)
    assert heard == [(OURS, {"cache_hit": False, "metadata": {}, "metadata_group": {}, "times": None})]
    assert knobs.compilation.listener is others
