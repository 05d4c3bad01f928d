"""The process that runs the GPU tests: what becomes of tests that fail, hang, end it or lose the device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A GPU that a failing test may lose, and the hooks of this repository without what deselects tests that need a GPU.
CONFTEST = """
from tests import conftest
from tests.conftest import pytest_addoption, pytest_runtest_protocol, pytest_unconfigure
from tests.gpu import worker

def device_is_lost():
    import test_cases
    return test_cases.LOST

worker.device_is_lost = device_is_lost
"""
CASES = """
import os, signal, threading
import pytest

pytestmark = pytest.mark.gpu
PARENT, LOST = os.environ["PARENT"], False

def test_passes():
    assert os.environ["PARENT"] == PARENT
    os.environ["PARENT"] = str(os.getpid())

def test_fails_and_says_why():
    assert [1, 2] == [1, 3]

def test_same_process_after_a_failure():
    assert os.environ["PARENT"] == str(os.getpid())

def test_loses_the_device():
    global LOST
    LOST = True
    raise RuntimeError("an illegal memory access")

def test_new_process_after_a_lost_device():
    assert os.environ["PARENT"] != str(os.getpid())

def test_ends_the_process():
    os.abort()

@pytest.mark.gpu(seconds=2)
def test_hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    threading.Event().wait()

@pytest.mark.parametrize("x", ["a b", "[]"])
def test_skips(x):
    pytest.skip("for a reason")

def test_passes_at_the_end():
    pass
"""


@pytest.mark.slow
def test_each_test_has_its_result(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "PARENT": "x"}
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    found = dict(re.findall(r"^test_cases.py::test_(.*?) (PASSED|FAILED|SKIPPED)", done.stdout, re.M))
    failed = {"fails_and_says_why", "loses_the_device", "ends_the_process", "hangs"}
    assert {name for name, result in found.items() if result == "FAILED"} == failed, done.stdout + done.stderr
    assert len([name for name, result in found.items() if result == "PASSED"]) == 4
    assert {name for name, result in found.items() if result == "SKIPPED"} == {"skips[a b]", "skips[[]]"}
    assert "At index 1 diff: 2 != 3" in done.stdout
    assert "an illegal memory access" in done.stdout
    assert "Fatal Python error: Aborted" in done.stdout
    assert re.search(r"ended after 2 seconds\n(.*\n)*.*in test_hangs", done.stdout)
