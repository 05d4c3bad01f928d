import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

import tritonpack
from tests.cli.command import run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--steps", "1"], "--steps"),
        (["demo", "--steps", "many"], "--steps"),
        (["demo", "--device", "tpu"], "--device"),
        (["demo", "--nonsense"], "--nonsense"),
        (["nonsense"], "nonsense"),
        (["demo", "--out", "/proc/nowhere"], "/proc/nowhere"),
    ],
)
def test_wrong_command_line_prints_one_line_and_exits_with_2(arguments, message, capsys):
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"error: [^\n]*\n", captured.err)
    assert message in captured.err


def test_cuda_without_gpu_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run("demo", "--device", "cuda") == 2
    assert "torch sees no GPU here; use --device cpu or auto" in capsys.readouterr().err


def test_missing_package_is_named(capsys, monkeypatch):
    find_spec = "tritonpack.cli.app.importlib.util.find_spec"
    monkeypatch.setattr(find_spec, lambda name: None if name == "matplotlib" else name)
    assert run("demo") == 2
    assert "the demo needs matplotlib, which isn't installed; pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]], ids=str)
def test_help_names_commands_and_shell_completion(arguments, capsys):
    assert run(*arguments) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in ("demo", "check-backend", "doctor", "--install-completion"))


def test_module_entry_point():
    done = subprocess.run([sys.executable, "-m", "tritonpack", "--help"], capture_output=True, text=True, check=True)
    assert "doctor" in done.stdout


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"tritonpack {tritonpack.__version__}\n"


PROGRAM = [sys.executable, "-m", "tritonpack", "check-backend"]


@pytest.mark.heavy
def test_closed_pipe_exits_silently_with_141():
    with subprocess.Popen([*PROGRAM, "--list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


def test_interrupt_exits_silently_with_130(capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tritonpack.cli.check_backend.examine", interrupted)
    assert run("check-backend", "a:b") == 130
    assert capsys.readouterr() == ("", "")


def test_missing_path_is_reported_before_transformers_is_imported():
    program = "import sys; from tritonpack.cli.app import run; code = run(['check', '/nowhere/x']); "
    program += "sys.exit(code if 'transformers' not in sys.modules else 9)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 2
    assert "there is no file or folder /nowhere/x" in result.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["check-backend", "tests.testing.backends:attention", "--device", "cpu", "--only", "empty/all"]],
    ids=["help", "check-backend"],
)
@pytest.mark.slow
def test_full_device_prints_one_line_and_exits_with_1(arguments):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "tritonpack", *arguments]
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert found.returncode == 1
    assert re.fullmatch(r"error: output can't be written: [^\n]*\n", found.stderr)
