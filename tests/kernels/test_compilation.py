"""A process whose kernels Triton compiles says so once; a process that finds them in Triton's cache is silent."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from triton import knobs

from tritonpack import notices
from tritonpack.kernels import compilation
from tritonpack.kernels.intervals import offsets_kernel

LINE = "tritonpack: compiling Triton kernels, once per machine for each dtype and head dimension"


def test_listener_waits_for_a_kernel_of_this_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another listener is called and stays."""
    ours, foreign = SimpleNamespace(fn=offsets_kernel), SimpleNamespace(fn=SimpleNamespace(fn=os.getcwd))
    facts: dict[str, Any] = {"cache_hit": False, "metadata": {}, "metadata_group": {}, "times": None}
    heard: list[dict[str, Any]] = []
    for before in (None, lambda **facts: heard.append(facts)):
        monkeypatch.setattr(notices, "said", {})
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
