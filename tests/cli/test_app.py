"""What all commands have in common: exit codes, messages in one line, help, checks before slow imports."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

import tritonpack
from tests.cli.command import refused, run
from tritonpack.cli.files import STANDARD_OUTPUT, make_folder, require_writable, write_json, write_whole
from tritonpack.errors import OutputError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("check-backend a:b --device tpu", "'tpu' is not one of 'auto', 'cpu', 'cuda'"),
        ("check-backend --nonsense", "--nonsense"),
        ("nonsense", "nonsense"),
        ("benches", "No such command 'benches'"),
        ("check", "Missing argument 'MODEL'"),
        ("plan x.json", "ile 'x.json' does not exist"),
        ("plan a.json", "--capacity"),
        ("plan a.json --capacity abc", "--capacity must be an integer from 1 to 1073741824; got abc."),
        ("plan a.json --capacity -5", "--capacity must be an integer from 1 to 1073741824; got -5."),
        ("plan a.json --capacity 99999999999", "--capacity must be an integer from 1 to 1073741824; got 99999999999."),
        ("plan a.json --capacity 8 --ranks 0", "--ranks must be an integer from 1 to 1048576; got 0."),
        ("plan a.json --capacity 8 --epochs 1.5", "--epochs must be an integer from 1 to 2147483647; got 1.5."),
        ("plan a.json --capacity 8 --seed -1", "--seed must be an integer from 0 to 9223372036854775807; got -1."),
        ("plan a.json --capacity 8 --steps-together 0", "--steps-together must be an integer from 1 to 2147483647"),
        ("plan a.json --capacity 8 --lookahead 2", "--lookahead must be a number from 0 to 1; got 2."),
        ("plan a.json --capacity 8 --tail wag", "'wag' is not one of 'drop', 'spread', 'keep'"),
        ("plan a.json --capacity 8 --objective x", "'x' is not one of 'quadratic', 'linear', 'cost'"),
        ("plan a.json --capacity 8 --overlong x", "'x' is not one of 'error', 'truncate', 'split', 'drop'"),
        ("plan a.json --capacity 8 --model /nowhere/config.json", "there is no file or folder /nowhere/config.json"),
        ("pack a.jsonl --out b --capacity 0", "--capacity must be an integer from 1 to 1073741824; got 0."),
        ("pack a.jsonl --out b --capacity 8 --algorithm magic", "is not one of 'best_fit_decreasing', 'first_fit', "),
        ("pack a.jsonl --out b --capacity 8 --jobs 0", "--jobs must be an integer from 1 to 1024; got 0."),
        ("pack a.jsonl --out b --capacity 8 --max-items 0", "--max-items must be an integer from 1 to"),
        ("pack a.jsonl --out b --capacity 8 --shard-mib 0", "--shard-mib must be an integer from 1 to"),
    ],
)  # fmt: skip
def test_wrong_command_line(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text("[1]")
    assert message in refused(capsys, *arguments.split())


@pytest.mark.parametrize(
    ("missing", "arguments", "message"),
    [
        ("matplotlib", "plan", "the plan needs matplotlib, which isn't installed; pip install matplotlib"),
        ("transformers", "plan --model config.json", "--model needs transformers, which isn't installed; pip"),
        ("datasets", "pack --out rows", "packing to disk needs datasets, which isn't installed; pip install"),
    ],
)  # fmt: skip
def test_missing_package_is_named(missing, arguments, message, capsys, monkeypatch, tmp_path):
    (tmp_path / "a.json").write_text("[1]")
    find_spec = "tritonpack.cli.app.importlib.util.find_spec"
    monkeypatch.setattr(find_spec, lambda name: None if name == missing else name)
    command, *options = arguments.split()
    assert message in refused(capsys, command, tmp_path / "a.json", "--capacity", 8, *options)


@pytest.mark.parametrize("command", ["bench", "demo", "demo-grpo"])
def test_removed_command_says_what_to_run(command, capsys):
    assert f"error: the command {command} was removed: in a clone of the" in refused(capsys, command, "--any")


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]], ids=str)
def test_help_names_commands_and_shell_completion(arguments, capsys):
    assert run(*arguments) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in ("plan", "check-backend", "doctor", "--install-completion"))
    assert run("--version") == 0
    assert capsys.readouterr().out == f"tritonpack {tritonpack.__version__}\n"


@pytest.mark.fast("['plan', '.', '--capacity', '8']-ile '.' is a directory")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "/nowhere/x"], "there is no file or folder /nowhere/x"),
        (["pack", "nowhere.jsonl", "--capacity", "8", "--out", "x"], "there is no file or folder nowhere.jsonl"),
        (["pack", "nowhere.jsonl", "--capacity", "8", "--out", "/proc/x"], "there is no file or folder nowhere.jsonl"),
        (["pack", ".", "--capacity", "8", "--out", "/proc/x"], "--out /proc/x can't be made"),
        (["plan", "nowhere.json", "--capacity", "8"], "ile 'nowhere.json' does not exist"),
        (["plan", ".", "--capacity", "8"], "ile '.' is a directory"),
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


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyboardInterrupt(), (130, "")),
        (ValueError("out='x' is wrong; tail='keep' or 'drop'"), (2, "error: --out x is wrong; --tail keep or drop\n")),
        (OSError("Corrupt data"), (1, "error: Corrupt data\n")),
        (OutputError(28, "Full", "a.json"), (1, "error: output can't be written: [Errno 28] Full: 'a.json'\n")),
        (OSError(13, "Permission denied", "a.json"), (2, "error: [Errno 13] Permission denied: 'a.json'\n")),
    ],
    ids=repr,
)  # fmt: skip
def test_exit_code_of_an_error(error, expected, capsys, monkeypatch):
    def failing(*_):
        raise error

    monkeypatch.setattr("tritonpack.cli.check_backend.examine", failing)
    assert (run("check-backend", "a:b"), capsys.readouterr().err) == expected


PROGRAM = [sys.executable, "-m", "tritonpack"]


@pytest.mark.slow
def test_closed_pipe_exits_silently_with_141():
    with subprocess.Popen([*PROGRAM, "check-backend", "--list"], stdout=-1, stderr=-1) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize(
    "arguments",
    ["--help", "check-backend tests.testing.backends:attention --device cpu --only empty/all"],
    ids=["help", "check-backend"],
)
@pytest.mark.slow
def test_full_device_prints_one_line_and_exits_with_1(arguments):
    with open("/dev/full", "w") as full:
        found = subprocess.run([*PROGRAM, *arguments.split()], stdout=full, stderr=-1, text=True)
    assert found.returncode == 1
    assert re.fullmatch(r"error: output can't be written: [^\n]*\n", found.stderr)


def test_files_are_written_whole(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path, link, pipe = Path("a.json"), Path("link"), Path("pipe")
    write_json(path, [1])
    Path("usual").touch()
    assert path.stat().st_mode == Path("usual").stat().st_mode
    path.chmod(0o640)
    link.symlink_to(path)
    write_json(link, {"a": path})
    assert json.loads(path.read_text()) == {"a": "a.json"}
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    require_writable(pipe)
    write_whole(pipe, "text")
    assert os.read(reader, 10) == b"text"
    assert pipe.is_fifo()
    os.close(reader)
    require_writable(STANDARD_OUTPUT)
    write_json(STANDARD_OUTPUT, [1])
    write_json(None, [2])
    assert json.loads(capsys.readouterr().out) == [1]

    def full(source, target):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OutputError, match="no space left"):
        write_whole(path, "new")
    assert json.loads(path.read_text()) == {"a": "a.json"}
    assert sorted(os.listdir()) == ["a.json", "link", "pipe", "usual"]


def test_outputs_are_checked_before_the_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = Path("a.json")
    source.write_text("[1]")
    Path("link").symlink_to(source)
    os.link(source, "hard")
    for output in (source, Path("link"), Path("hard"), tmp_path / "." / "a.json"):
        with pytest.raises(ValueError, match=r"it is the same file as a\.json, which would be lost"):
            require_writable(output, inputs=[source])
    for path, message in (
        ("a.json/b", r"--json a\.json/b can't be written: (File exists|Not a directory); name another file"),
        (".", "it is a folder; name a file"),
    ):
        with pytest.raises(ValueError, match=message):
            require_writable(Path(path))
    for path in ("a.json", "new", "deep/in/folder"):
        require_writable(Path(path))
    make_folder(Path("b/c"), "picture.png")
    assert sorted(map(str, Path().rglob("*"))) == ["a.json", "b", "b/c", "deep", "deep/in", "hard", "link"]
    Path("b/picture.png").mkdir()
    with pytest.raises(ValueError, match=r"--out b/picture\.png can't be written: it is a folder; name a file"):
        make_folder(Path("b"), "picture.png")
    with pytest.raises(ValueError, match=r"--out a\.json can't be made: File exists; name another folder"):
        make_folder(source)
    assert source.read_text() == "[1]"
