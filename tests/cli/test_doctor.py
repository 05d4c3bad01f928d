import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args
from unittest import SkipTest

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console

from tests.cli.command import run
from tritonpack.backends import has_matrix_products
from tritonpack.cli import doctor
from tritonpack.cli.doctor import Finding
from tritonpack.parallel.dimensions import Exchange

WELL = {"python": "3.11.7", "torch": "2.13.0+cpu", "triton": "3.9.0", "transformers": "5.24.0", "numpy": "2.4.6"}
WELL |= {"numba": "0.68.1"}


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.slow
def test_every_check_that_runs_on_a_cpu_is_right(capsys, monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    assert run("doctor", "--json", str(tmp_path / "report.json")) == 0
    output = capsys.readouterr().out
    assert re.search(r"attention: triton +│ not here │ .*needs tensors on a GPU.*TRITON_INTERPRET=1", output)
    for what in ("attention: blocked", "attention: reference", "flash_attn functions", "patched models", "packing"):
        assert re.search(rf"│ {what} +│ right +│", output)
    assert re.search(r"sequence parallelism +│ right .*all_gather, group_cast, ring, ulysses: .*by gloo", output)
    assert re.search(rf"python +{re.escape(sys.version.split()[0])}", output)
    assert "backend='auto' uses blocked here, and blocked for float64" in output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] is True
    assert [finding["what"] for finding in report["findings"]][-len(doctor.CHECKS) :] == list(doctor.CHECKS)
    assert report["facts"]["torch"] in output


def test_failing_check_exits_with_1(capsys, monkeypatch):
    def broken():
        raise RuntimeError("no [such] symbol")

    def absent():
        raise SkipTest("there is none")

    monkeypatch.setattr(doctor, "CHECKS", {"one": broken, "two": absent, "three": lambda: "as it should be"})
    assert run("doctor") == 1
    output = capsys.readouterr().out
    assert re.search(r"│ one +│ wrong .*RuntimeError: no \[such\] symbol", output)
    assert re.search(r"│ three +│ right .*as it should be", output)
    assert "Something should work here and doesn't: one." in output


def test_wrong_backend_is_found(monkeypatch):
    from tritonpack.backends import blocked

    forward = blocked.forward
    monkeypatch.setattr(blocked, "forward", lambda *a, **k: tuple(x * 1.01 for x in forward(*a, **k)))
    found = doctor.run_check("attention", lambda: doctor.attention("blocked"))
    assert found.outcome == "wrong"
    assert "beyond twice plain attention's error" in found.detail


@pytest.mark.parametrize("wrong", get_args(Exchange))
def test_wrong_exchange_is_found(monkeypatch, wrong):
    from tritonpack import parallel

    attend = parallel.attend

    def wrong_in_one(*args, exchange, **options):
        return attend(*args, exchange=exchange, **options) * (1.01 if exchange == wrong else 1.0)

    monkeypatch.setattr(parallel, "attend", wrong_in_one)
    found = doctor.run_check("exchanges", doctor.sequence_parallelism)
    assert found.outcome == "wrong"
    assert f"exchange='{wrong}': Tensor-likes are not close" in found.detail


def test_leak_of_a_patched_model_is_found(monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("tritonpack.patches.patch", lambda model: model.train())
    monkeypatch.setattr(transformers.LlamaForCausalLM, "__enter__", lambda model: model, raising=False)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "__exit__", lambda *_: None, raising=False)
    found = doctor.run_check("models", doctor.models)
    assert found.outcome == "wrong"
    assert "see each other" in found.detail


@pytest.mark.parametrize(
    ("package", "check"), [("transformers", doctor.models), ("numba", doctor.packing)], ids=["transformers", "numba"]
)
def test_missing_package_makes_a_check_not_here(package, check, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = doctor.run_check("it", check)
    assert found.outcome == "not here"
    assert f"pip install {package}" in found.detail


class TestVersions:
    def of(self, **changed):
        return list(doctor.examine_versions(WELL | changed))

    def test_known_versions_have_no_finding(self):
        assert self.of() == []
        assert self.of(transformers=None, triton=None, numba=None) == []

    @pytest.mark.parametrize(
        ("package", "version"),
        [("python", "3.9.18"), ("torch", "2.7.1+cu126"), ("triton", "3.5.1"), ("transformers", "4.57.0")],
    )
    def test_old_versions_are_wrong(self, package, version):
        (found,) = self.of(**{package: version})
        assert (found.what, found.outcome) == (package, "wrong")
        assert version in found.detail

    def test_untested_transformers_is_a_warning(self):
        (found,) = self.of(transformers="5.30.0.dev0")
        assert found.outcome == "warning"
        assert "tritonpack check MODEL" in found.detail
        assert self.of(torch="2.20.0") == []

    def test_triton_and_numpy_that_fail_together_are_a_warning(self):
        (found,) = self.of(triton="3.6.0", numpy="2.4.0")
        assert (found.what, found.outcome) == ("triton and numpy", "warning")
        assert self.of(triton="3.6.0", numpy="2.3.5") == self.of(triton="3.7.1") == []

    def test_gpu_that_torch_cannot_see_is_a_warning(self, monkeypatch):
        monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr("torch.version.cuda", None)
        (found,) = doctor.examine_gpu()
        assert (found.what, found.outcome) == ("GPU", "warning")
        assert "built without CUDA" in found.detail
        monkeypatch.setattr("shutil.which", lambda name: None)
        assert not list(doctor.examine_gpu())

    @pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
    def test_gpu_without_matrix_instructions_is_a_warning(self, capability, monkeypatch):
        monkeypatch.setattr("tritonpack.cli.doctor.has_matrix_products", has_matrix_products.__wrapped__)
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Tesla T4")
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
        found = list(doctor.examine_gpu())
        assert len(found) == (capability < (8, 0))
        assert all(f.detail.startswith("Tesla T4 (compute capability 7.5): ") for f in found)

    def test_oldest_versions_agree_with_pyproject(self):
        tomllib = pytest.importorskip("tomllib")
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
        declared = [f"python{project['requires-python']}", *(x.split(";")[0] for x in project["dependencies"])]
        for package, oldest in doctor.OLDEST.items():
            assert package + (f">={oldest}" if oldest else "") in declared


def test_progress_is_shown_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", {"some check": lambda: "right"})
    run("doctor")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(doctor, "Console", lambda **options: Console(force_terminal=True, **options))
    run("doctor")
    assert "some check" in capsys.readouterr().err


def test_verdict_names_checks_by_outcome():
    right, wrong = Finding("a", "right", ""), Finding("b", "wrong", "")
    absent, noted = Finding("c", "not here", ""), Finding("d", "warning", "")
    assert doctor.verdict([right]) == "Everything that can run here is right."
    assert doctor.verdict([right, absent, noted]).endswith("Not on this machine: c. Mind the warnings: d.")
    assert doctor.verdict([right, wrong, noted]) == "Something should work here and doesn't: b."


BARE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"numba", "transformers", "triton"}:
            raise ModuleNotFoundError(f"no module named {name!r} here", name=name)

import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ("numba", "transformers") else find_spec(name, *rest)
sys.meta_path.insert(0, Absent())
from tritonpack.cli import main
main(["doctor"])
"""


@pytest.mark.slow
def test_doctor_runs_with_torch_alone():
    environment = os.environ | {"COLUMNS": "300"}
    result = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, env=environment, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    for what, reason in (("triton", "needs Triton 3.6"), ("patched models", "pip install transformers")):
        assert re.search(rf"{what} +│ not here │ .*{reason}", result.stdout)
    assert re.search("packing +│ not here .*pip install numba", result.stdout)
    assert re.search("attention: blocked +│ right", result.stdout)


def test_parts_that_cannot_be_imported_are_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "tritonpack.testing", None)
    found = doctor.run_check("attention", lambda: doctor.attention("blocked"))
    assert (found.outcome, found.detail.partition(":")[0]) == ("wrong", "ModuleNotFoundError")


def test_unwritable_report_exits_with_2(capsys):
    assert run("doctor", "--json", "/proc/nowhere/x") == 2
    assert "/proc/nowhere" in capsys.readouterr().err
