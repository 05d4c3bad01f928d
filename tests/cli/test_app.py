"""What all commands have in common: exit codes, messages, help, outputs that are checked before the work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

import tritonpack
from tests.cli.command import refused, run
from tritonpack.cli.machine import require_writable
from tritonpack.errors import OutputError

WRONG = [
    ("check-backend a:b --device tpu", "--device"),
    ("check-backend --nonsense", "--nonsense"),
    ("nonsense", "No such command 'nonsense'"),
    ("check", "Missing argument 'MODEL'"),
    ("check /nowhere/x", "there is no file or folder /nowhere/x"),
    ("plan x.json", "x.json"),
    ("plan . --capacity 8", "is a directory"),
    ("plan a.json", "--capacity"),
    ("plan a.py --capacity 8", "ends in '.py'; lengths are read from"),
    ("plan a.json --capacity abc", "Invalid value for '--capacity'"),
    *(
        (f"plan a.json --capacity {bad}", f"'--capacity': must be an integer from 1 to 1073741824; got {bad}.")
        for bad in (-5, 0, 2**30 + 1)
    ),
    ("plan a.json --capacity 8 --ranks 0", "Invalid value for '--ranks': must be an integer from 1 to 65536; got 0."),
    ("plan a.json --capacity 8 --seed -1", "Invalid value for '--seed'"),
    ("plan a.json --capacity 8 --tail wag", "Invalid value for '--tail'"),
    ("plan a.json --capacity 8 --objective x", "Invalid value for '--objective'"),
    ("plan a.json --capacity 8 --overlong x", "Invalid value for '--overlong'"),
    (
        "plan a.json --capacity 8 --lookahead 1",
        "tritonpack plan --lookahead was removed: a step is offered 1% more",
    ),
    ("pack a.jsonl --out b --capacity 0", "Invalid value for '--capacity'"),
    ("pack a.jsonl --out b --capacity 8 --algorithm magic", "Invalid value for '--algorithm'"),
    ("pack a.jsonl --out b --capacity 8 --jobs 0", "Invalid value for '--jobs'"),
    ("pack nowhere.jsonl --capacity 8 --out x", "there is no file or folder nowhere.jsonl"),
    *((f"{name} --any", f"tritonpack {name} was removed: in a clone of the") for name in ("bench", "demo-grpo")),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_command_line(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    for name in ("a.json", "a.py"):
        Path(name).write_text("[1]")
    assert message in refused(capsys, *arguments.split())
    assert sorted(os.listdir()) == ["a.json", "a.py"] or arguments.startswith("plan")


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--version"]], ids=str)
def test_help_and_version(arguments, capsys):
    assert run(*arguments) == 0
    output = capsys.readouterr().out
    if "--version" in arguments:
        assert output == f"tritonpack {tritonpack.__version__}\n"
    else:
        assert all(name in output for name in ("plan", "check-backend", "doctor", "--install-completion"))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyboardInterrupt(), (130, "")),
        (ValueError("out='x' is wrong; tail='keep' or 'drop'"), (2, "error: --out x is wrong; --tail keep or drop\n")),
        (ModuleNotFoundError(name="datasets"), (2, "error: this needs datasets, which isn't installed; pip install ")),
        (OutputError(28, "Full", "a.json"), (1, "error: [Errno 28] Full: 'a.json'\n")),
        (BrokenPipeError(32, "Broken pipe"), (1, "")),
    ],
    ids=repr,
)  # fmt: skip
def test_exit_code_of_an_error(error, expected, capsys, monkeypatch):
    def failing(*_):
        raise error

    monkeypatch.setattr("tritonpack.cli.check_backend.examine", failing)
    monkeypatch.setattr("os.dup2", lambda *_: None)
    code, message = run("check-backend", "a:b"), capsys.readouterr().err
    assert (code, message[: len(expected[1])] or message) == expected


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.slow
def test_full_device_prints_one_line_and_exits_with_1():
    with open("/dev/full", "w") as full:
        found = subprocess.run([sys.executable, "-m", "tritonpack", "--help"], stdout=full, stderr=-1, text=True)
    assert (found.returncode, found.stderr) == (1, "error: [Errno 28] No space left on device\n")


def test_outputs_are_checked_before_the_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = Path("a.json")
    source.write_text("[1]")
    Path("link").symlink_to(source)
    for path, message in (
        *(
            (path, r"can.t be written: the command reads a\.json, which would be lost; name another file")
            for path in (source, "link")
        ),
        ("a.json/b", r"--json a\.json/b can't be written: (File exists|Not a directory); name another file"),
    ):
        with pytest.raises(ValueError, match=message):
            require_writable(Path(path), inputs=[source])
    os.mkfifo("pipe")
    for path in ("a.json", "new", "deep/in/folder", "pipe", "/dev/null", "-"):
        require_writable(Path(path))
    assert sorted(map(str, Path().rglob("*"))) == ["a.json", "deep", "deep/in", "link", "pipe"]
    assert source.read_text() == "[1]"
