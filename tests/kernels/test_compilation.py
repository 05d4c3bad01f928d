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


def test_listener_waits_for_a_kernel_of_this_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another listener is called and stays."""
    ours, heard = SimpleNamespace(fn=offsets_kernel), []
    foreign = SimpleNamespace(fn=SimpleNamespace(fn=os.getcwd))
    facts: dict[str, Any] = {"cache_hit": False, "metadata": {}, "metadata_group": {}, "times": None}

    def others(**facts: Any) -> None:
        heard.append(facts)

    for before in (None, others):
        monkeypatch.setattr(notices, "_said", {})
        monkeypatch.setattr(knobs.compilation, "listener", before)
        compilation.announce_compilation()
        listener: Any = knobs.compilation.listener
        for src, cache_hit in ((ours, True), (foreign, False), (SimpleNamespace(), False)):
            listener(src=src, **facts | {"cache_hit": cache_hit})
            assert (capsys.readouterr().err, knobs.compilation.listener) == ("", listener)
        listener(src=ours, **facts)
        assert capsys.readouterr().err.startswith(LINE)
        assert knobs.compilation.listener is before
    assert len(heard) == 4
    assert heard[-1] == {"src": ours, **facts}
