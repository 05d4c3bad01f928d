import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

import tritonpack
from tests.cli.command import run
from tritonpack.errors import OutputError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check-backend", "a:b", "--device", "tpu"], "--device"),
        (["check-backend", "--nonsense"], "--nonsense"),
        (["nonsense"], "nonsense"),
        (["bench", "--tokens", "96"], "no command 'bench'; in a clone of the repository run python -m benchmarks.gpu"),
        (["demo"], "run python -m examples.demo, or make demo"),
        (["demo-grpo"], "run python -m examples.demo.grpo, or make demo-grpo"),
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
    assert run("check-backend", "tests.testing.backends:attention", "--device", "cuda") == 2
    assert "torch sees no GPU here; use --device cpu or auto" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "arguments", "message"),
    [
        (
            "matplotlib",
            ["plan", "lengths.json"],
            "the plan needs matplotlib, which isn't installed; pip install matplo",
        ),
        ("transformers", ["plan", "lengths.json", "--model", "config.json"], "--model needs transformers"),
        (
            "datasets",
            ["pack", "a.jsonl", "--out", "rows"],
            "packing to disk needs datasets, which isn't installed; pip",
        ),
    ],
)
def test_missing_package_is_named(missing, arguments, message, capsys, monkeypatch):
    find_spec = "tritonpack.cli.app.importlib.util.find_spec"
    monkeypatch.setattr(find_spec, lambda name: None if name == missing else name)
    assert run(*arguments, "--capacity", "8") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]], ids=str)
def test_help_names_commands_and_shell_completion(arguments, capsys):
    assert run(*arguments) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in ("plan", "check-backend", "doctor", "--install-completion"))


def test_module_entry_point():
    done = subprocess.run([sys.executable, "-m", "tritonpack", "--help"], capture_output=True, text=True, check=True)
    assert "doctor" in done.stdout


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"tritonpack {tritonpack.__version__}\n"


PROGRAM = [sys.executable, "-m", "tritonpack", "check-backend"]


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "/nowhere/x"], "there is no file or folder /nowhere/x"),
        (["pack", "nowhere.jsonl", "--capacity", "8", "--out", "x"], "there is no file or folder nowhere.jsonl"),
        (["pack", "nowhere.jsonl", "--capacity", "8", "--out", "/proc/x"], "there is no file or folder nowhere.jsonl"),
        (["pack", ".", "--capacity", "8", "--out", "/proc/x"], "--out /proc/x can't be made"),
        (["plan", "nowhere.json", "--capacity", "8"], "there is no file nowhere.json"),
        (["plan", ".", "--capacity", "8"], ". is a folder; name the file"),
        (["plan", __file__, "--capacity", "8"], "ends in '.py'; lengths are read from"),
    ],
    ids=str,
)
def test_wrong_path_is_reported_before_slow_imports(arguments, message):
    program = f"import sys; from tritonpack.cli.app import run; code = run({arguments!r}); "
    program += "print(*{name.partition('.')[0] for name in sys.modules}); sys.exit(code)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 2
    assert message in result.stderr
    slow = {"datasets", "matplotlib", "numba", "numpy", "pyarrow", "torch", "transformers", "triton"}
    assert not slow & set(result.stdout.split())


def test_only_errors_of_writing_speak_of_output(capsys, monkeypatch):
    for error, expected in (
        (OSError("Corrupt data"), (1, "error: Corrupt data\n")),
        (OutputError(28, "Full", "a.json"), (1, "error: output can't be written: [Errno 28] Full: 'a.json'\n")),
        (OSError(13, "Permission denied", "a.json"), (2, "error: [Errno 13] Permission denied: 'a.json'\n")),
    ):

        def failing(*_, error=error):
            raise error

        monkeypatch.setattr("tritonpack.cli.check_backend.examine", failing)
        assert (run("check-backend", "a:b"), capsys.readouterr().err) == expected


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
