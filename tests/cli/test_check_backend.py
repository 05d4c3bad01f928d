import json
import re
import sys

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from tests.cli.command import run
from tritonpack.testing import conformance

RIGHT, WRONG = "tests.testing.backends:attention", "tests.testing.backends:softcap_ignored"


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def test_right_backend_prints_a_table_and_exits_with_0(capsys):
    assert run("check-backend", RIGHT, "--device", "cpu", "--only", "slack/*", "--only", "forward/softcap") == 0
    output = capsys.readouterr().out
    for check in ("slack/zeros", "slack/inert", "forward/softcap"):
        for dtype in ("float32", "bfloat16"):
            assert re.search(rf"│ {check} +│ {dtype} +│ pass +│ \S", output)
    assert output.endswith("attention on cpu: 6 pass\n")


def test_wrong_backend_exits_with_1(capsys):
    arguments = ("--device", "cpu", "--dtype", "float32", "--only", "*/softcap*", "--only", "*/scale")
    assert run("check-backend", WRONG, *arguments, "--skip", "backward/*") == 1
    output = capsys.readouterr().out
    assert re.search(
        r"│ forward/softcap +│ float32 │ fail +│ out beyond twice plain attention's error: out: \d", output
    )
    assert re.search(r"│ forward/scale +│ float32 │ pass +│", output)
    assert output.endswith("softcap_ignored on cpu: 1 pass, 2 fail\n")
    assert "backward" not in output


def test_not_offered_is_not_a_failure(capsys):
    arguments = ("--device", "cpu", "--dtype", "float16", "--dtype", "bfloat16", "--only", "*/head-dim-16")
    assert run("check-backend", "tests.cli.test_check_backend:forward_only", *arguments) == 0
    output = capsys.readouterr().out
    assert re.search(r"│ backward/head-dim-16 │ float16 +│ not offered │ not differentiable", output)
    assert output.endswith("forward_only on cpu: 2 pass, 2 not offered\n")


def forward_only(q, k, v, cu_seqlens_q, cu_seqlens_k):
    from tests.testing.backends import attention

    return attention(q, k, v, cu_seqlens_q, cu_seqlens_k, 0, 0).detach()


def test_json(tmp_path):
    path = tmp_path / "report.json"
    arguments = ("--device", "cpu", "--dtype", "float32", "--only", "forward/s[oc]*")
    assert run("check-backend", WRONG, *arguments, "--json", path) == 1
    report = json.loads(path.read_text())
    assert (report["function"], report["device"], report["passed"]) == ("softcap_ignored", "cpu", False)
    outcomes = {result["check"]: result["outcome"] for result in report["results"]}
    assert outcomes == {"forward/softcap": "fail", "forward/softcap-window": "fail", "forward/scale": "pass"}


def test_list(capsys):
    assert run("check-backend", "--list") == 0
    assert capsys.readouterr().out.split() == [check.name for check in conformance.checks()]
    assert run("check-backend", "--list", "--only", "slack/*") == 0
    assert capsys.readouterr().out.split() == ["slack/zeros", "slack/inert"]


def test_modules_of_the_working_directory_are_found(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_backend.py").write_text("from tests.testing.backends import attention\nclass Ours: f = attention\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    assert run("check-backend", "my_backend:Ours.f", "--device", "cpu", "--only", "empty/all") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"name the function as module:function, .*; got ''"),
        (["flash_attn"], "got 'flash_attn'"),
        (["no_such_module:f"], "no_such_module:f can't be imported: ModuleNotFoundError"),
        (["tritonpack.errors:f"], "errors:f can't be imported: AttributeError: .* no attribute 'f'; name"),
        (["tritonpack.packing.bins:__doc__"], r"tritonpack\.packing\.bins:__doc__ is not a function but str"),
        (["os.path:isfile"], "isfile has no parameter for q, k, v, cu_seqlens_q, cu_seqlens_k; it has path"),
        ([RIGHT, "--only", "nothing"], "no check matches"),
        ([RIGHT, "--dtype", "int8"], "--dtype"),
        ([RIGHT, "--device", "cuda"], "torch sees no GPU here; use --device cpu or auto"),
        ([RIGHT, "--device", "cpu", "--only", "empty/all", "--json", "/proc/nowhere/x"],
         "--json /proc/nowhere/x can't be written: "),
    ],
)  # fmt: skip
def test_wrong_usage_exits_with_2(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run("check-backend", *arguments) == 2
    assert re.search(message, capsys.readouterr().err)
