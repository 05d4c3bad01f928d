"""docs/upstream.md: its programs run, and its table has what the conformance kit says."""

import re
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tritonpack.testing import conformance

PAGE = (Path(__file__).parents[2] / "docs" / "upstream.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| [^|]+ \| `([\w.]+):(\w+)` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", PAGE, re.MULTILINE)


def test_programs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    check, load = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(check, "upstream.md", "exec"), {})
    summary = capsys.readouterr().out.splitlines()[-1]
    assert summary == "sdpa on cpu: 12 pass, 2 fail"
    assert f"`{summary}`" in " ".join(PAGE.split())

    given: dict[str, Any] = {}
    exec(compile(load, "upstream.md", "exec"), given)
    out = capsys.readouterr().out
    assert out.startswith("Attention over documents laid end to end: q (total_q, nheads, headdim)")
    assert Path(given["kernel"].__file__) == tmp_path / "OUT" / "build" / "torch-cpu" / "__init__.py"


def test_table_has_three_others_and_ours() -> None:
    assert [name for _, name, *_ in ROWS] == ["varlen_attn", "flex_attention", "sdpa", "flash_attn_varlen_func"]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=[name for _, name, *_ in ROWS])
def test_table(row: tuple[str, ...]) -> None:
    module, name, *counts = row
    found = Counter(result.outcome for result in conformance.run(getattr(import_module(module), name)).results)
    assert [found[outcome] for outcome in ("pass", "fail", "error", "not offered")] == [*map(int, counts)]
