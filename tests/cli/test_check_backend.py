import json
import re
import sys

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from tests.cli.command import run

RIGHT, WRONG = "tests.testing.backends:attention", "tests.testing.backends:softcap_ignored"


@pytest.fixture(autouse=True)
def _wide_terminal_without_gpu(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def forward_only(q, k, v, cu_seqlens_q, cu_seqlens_k):
    from tests.testing.backends import attention

    return attention(q, k, v, cu_seqlens_q, cu_seqlens_k, 0, 0).detach()


@pytest.mark.parametrize(
    ("function", "options", "code", "rows", "end"),
    [
        (RIGHT, "--only slack/* --only forward/softcap", 0,
         [rf"{check} +│ {dtype} +│ pass +│ \S" for check in ("slack/causal", "forward/softcap")
          for dtype in ("float32", "bfloat16")], "attention on cpu: 4 pass"),
        (WRONG, "--dtype float32 --only */softcap* --only */scale --skip backward/*", 1,
         [r"forward/softcap +│ float32 │ fail +│ out beyond twice plain attention's error: out: \d",
          r"forward/scale +│ float32 │ pass +│"], "softcap_ignored on cpu: 1 pass, 2 fail"),
        ("tests.cli.test_check_backend:forward_only", "--dtype float16 --dtype bfloat16 --only *ward/bidirectional", 0,
         [r"backward/bidirectional │ float16 +│ not offered │ not differentiable"],
         "forward_only on cpu: 2 pass, 2 not offered"),
    ],
)  # fmt: skip
def test_results(function, options, code, rows, end, capsys, tmp_path):
    path = tmp_path / "report.json"
    assert run("check-backend", function, "--device", "cpu", *options.split(), "--json", path) == code
    output = capsys.readouterr().out
    assert all(re.search(f"│ {row}", output) for row in rows), output
    assert output.endswith(f"{end}\n")
    report = json.loads(path.read_text())
    assert (report["function"], report["device"], report["passed"]) == (end.split()[0], "cpu", code == 0)
    assert {result["check"] for result in report["results"]} == set(re.findall(r"│ (\w+/[\w-]+) ", output))
    assert "backward" not in output or "backward" not in options.partition("--skip")[2]


def test_modules_of_the_working_directory_are_found(tmp_path, monkeypatch):
    (tmp_path / "my_backend.py").write_text("from tests.testing.backends import attention\nclass Ours: f = attention\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    assert run("check-backend", "my_backend:Ours.f", "--device", "cpu", "--only", "empty/all") == 0
