import json
import re
import sys
from pathlib import Path
from unittest import SkipTest
from unittest.mock import Mock

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from tests.cli.command import run
from tritonpack.backends import blocked, has_matrix_products
from tritonpack.cli import doctor

WELL = {"torch": "2.13.0+cpu", "triton": "3.9.0", "transformers": "5.24.0", "numpy": "2.4.6"}
WELL |= {"numba": "0.68.1"}


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_outcomes_of_checks_and_exit_codes(capsys, monkeypatch):
    checks = {"two": Mock(side_effect=SkipTest("there is none")), "three": lambda: "as it should be"}
    monkeypatch.setattr(doctor, "CHECKS", {"one": Mock(side_effect=RuntimeError("no [such] symbol")), **checks})
    assert run("doctor") == 1
    output, error = capsys.readouterr()
    assert re.search(r"│ one +│ wrong .*RuntimeError: no \[such\] symbol", output)
    assert re.search(r"│ two +│ not here .*there is none", output)
    assert re.search(r"│ three +│ right .*as it should be", output)
    assert ("Something should work here and doesn't: one." in output, error) == (True, "")

    monkeypatch.setattr(doctor, "CHECKS", {"GPU": Mock(side_effect=UserWarning("old")), **checks})
    assert run("doctor", "--json", "-") == 0
    output, error = capsys.readouterr()
    assert error.endswith("Everything that can run here is right.\n")
    found = json.loads(output)
    assert (found["passed"], found["facts"]["device"].startswith("CPU, ")) == (True, True)
    assert [one["outcome"] for one in found["findings"]] == ["warning", "not here", "right"]


def wrong_backend(patch):
    forward = blocked.forward
    patch.setattr(blocked, "forward", lambda *a, **k: tuple(x * 1.01 for x in forward(*a, **k)))


def leak(patch):
    transformers = pytest.importorskip("transformers")
    patch.setattr("tritonpack.patches.patch", lambda model: model.train())
    patch.setattr(transformers.LlamaForCausalLM, "__enter__", lambda model: model, raising=False)
    patch.setattr(transformers.LlamaForCausalLM, "__exit__", lambda *_: None, raising=False)


def no_packages(patch):
    patch.setattr("tritonpack.cli.doctor.find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("what", "broken", "outcome", "message"),
    [
        *((what, lambda patch: None, "right", "") for what in sorted({*doctor.CHECKS} - {"GPU", "attention: triton"})),
        ("attention: blocked", wrong_backend, "wrong", "beyond twice plain attention's error"),
        ("patched models", leak, "wrong", "see each other"),
        ("patched models", no_packages, "not here", "pip install transformers"),
        ("packing", no_packages, "not here", "pip install numba"),
        ("packing", lambda patch: patch.setattr("tritonpack.packing.pack", lambda *_, **__: [[0]]), "wrong",
         "in bins of 10 make [[0]]"),
        ("attention: blocked", lambda patch: patch.setitem(sys.modules, "tritonpack.testing", None), "wrong",
         "ModuleNotFoundError: "),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found(what, broken, outcome, message, monkeypatch):
    broken(monkeypatch)
    found, detail = doctor.run_check(doctor.CHECKS[what])
    assert found == outcome
    assert message in detail


@pytest.mark.parametrize(
    ("changed", "outcome", "message"),
    [
        ({}, "right", "new enough"),
        ({"transformers": None, "triton": None, "numba": None}, "right", "new enough"),
        ({"torch": "2.7.1"}, "wrong", "torch 2.7.1: too old; pip install -U 'torch>=2.8'"),
        ({"triton": "3.5.1", "transformers": "4.57.0"}, "wrong", "triton 3.5.1, transformers 4.57.0: too old; pip "),
        ({"transformers": "5.30.0.dev0"}, "warning", "tritonpack check MODEL --weights"),
    ],
)
def test_versions(changed, outcome, message, monkeypatch):
    monkeypatch.setattr(doctor.machine, "installed_version", (WELL | changed).get)
    found, detail = doctor.run_check(doctor.versions)
    assert found == outcome
    assert message in detail


def test_oldest_versions_agree_with_pyproject():
    project = pytest.importorskip("tomllib").loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    declared = [requirement.split(";")[0] for requirement in project["project"]["dependencies"]]
    assert {f"{package}>={oldest}" for package, oldest in doctor.OLDEST.items()} <= {*declared}


def test_gpu_that_torch_cannot_use_is_a_warning(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    for cuda, message in ((None, "built without CUDA"), ("12.6", "new enough for CUDA 12.6?")):
        monkeypatch.setattr("torch.version.cuda", cuda)
        outcome, detail = doctor.run_check(doctor.gpu)
        assert outcome == "warning"
        assert message in detail
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert doctor.run_check(doctor.gpu)[0] == "not here"
    monkeypatch.setattr("tritonpack.cli.doctor.has_matrix_products", has_matrix_products.__wrapped__)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for capability, expected in (((7, 5), "torch sees it, for float32 in Triton"), ((8, 0), "torch sees it")):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None, of=capability: of)
        assert doctor.gpu() == expected
