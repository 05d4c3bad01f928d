"""What all commands have in common: exit codes, messages, help, outputs that are checked before the work."""

import json
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

RIGHT = "tests.testing.backends:attention"
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
# Command lines, in a folder with documents and a configuration, and words of the message.
WRONG = [
    ("nonsense", "No such command 'nonsense'"),
    ("check-backend a:b --device tpu", "Invalid value for '--device'"),
    ("check-backend --nonsense", "--nonsense"),
    (f"check-backend {RIGHT} --dtype int8", "--dtype must be one of 'float32', 'float16', 'bfloat16'; got 'int8'"),
    ("check-backend", "name the function as module:function, such as flash_attn:flash_attn_func; got ''"),
    ("check-backend no_such_module:f", "no_such_module:f can't be imported: ModuleNotFoundError"),
    ("check-backend tritonpack.packing.bins:__doc__", "tritonpack.packing.bins:__doc__ is not a function but str"),
    ("check-backend os.path:isfile", "isfile has no parameter for q, k, v, cu_seqlens_q, cu_seqlens_k; it has path"),
    (f"check-backend {RIGHT} --only nothing", "no check matches"),
    (f"check-backend {RIGHT} --device cuda", "torch sees no GPU here; use --device cpu or auto"),
    ("check /nowhere/x", "there is no file or folder /nowhere/x"),
    ("check config.json --device cuda", "--device is for --weights"),
    ("check config.json --json config.json", "can't be written: the command reads config.json, which would be lost"),
    ("check config.json --weights", "config.json has no weights; name its folder, or leave out --weights"),
    ("check . --weights", "can't be loaded: OSError: Error no file named model.safetensors"),
    ("doctor --json /proc/nowhere/x", "--json /proc/nowhere/x can't be written: "),
    ("plan . --capacity 8", "is a directory"),
    ("plan a.py --capacity 8", "ends in '.py'; lengths are read from"),
    *((f"plan a.json --capacity {bad}", "Invalid value for '--capacity'")
      for bad in (-5, 0, 2**30 + 1, "abc", 2.5)),
    ("plan a.json --capacity 8 --ranks 0", "Invalid value for '--ranks': 0 is no whole number from 1 to 65536."),
    ("plan a.json --capacity x", "Invalid value for '--capacity': x is no whole number from 1 to 1073741824."),
    ("plan a.json --capacity 8 --seed -1", "Invalid value for '--seed'"),
    ("plan a.json --capacity 8 --tail wag", "Invalid value for '--tail'"),
    ("plan a.json --capacity 20000", "and --tail drop leaves out what doesn't. Use --tail keep or spread, fewer ranks"),
    ("plan a.json --capacity 5 --overlong drop", "--overlong drop leaves nothing"),
    ("plan a.json --capacity 5", "60 of 60 documents are longer than the --capacity of 5 tokens"),
    ("plan a.json --capacity 20 --column n", "a.json has no columns, but --column n was asked for"),
    ("plan a.json --capacity 20 --json /proc/nowhere.json", "--json /proc/nowhere.json can't be written"),
    ("plan a.json --capacity 20 --json link.json", "--json link.json can't be written: the command reads a.json"),
    ("plan a.json --capacity 8 --lookahead 1", "tritonpack plan --lookahead was removed: a step is offered 1% more"),
    ("pack lines.jsonl --out b --capacity 8 --jobs 0", "Invalid value for '--jobs'"),
    ("pack lines.jsonl --capacity 8 --out a.json", "Invalid value for '--out'"),
    ("pack lines.jsonl --capacity 8 --out a.json/b", "--out a.json/b/.packing/rows.arrow can't be written: "),
    ("pack someone/documents --capacity 8 --out x", "the Hub first: datasets.load_dataset(name, split=...).save_"),
    ("pack nowhere.jsonl --capacity 8 --out x", "there is no file or folder nowhere.jsonl"),
    ("pack lines.jsonl --capacity 1 --out x", "(the first: document 0, 3 tokens)"),
    ("pack lines.jsonl --capacity 12 --out x --columns input_ids,b", "columns are 'input_ids', 'b'; name "),
    ("pack lines.jsonl --capacity 12 --out x --split train", "has no splits; leave out --split train"),
    ("pack lines.jsonl --capacity 12 --out .", "isn't empty; name another folder, or remove it"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_command_line(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    Path("a.json").write_text(json.dumps([10] * 60))
    Path("link.json").symlink_to("a.json")
    Path("a.py").touch()
    Path("lines.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
    if arguments.startswith(("check ", "pack ")) or "--model" in arguments:
        pytest.importorskip("datasets")
        pytest.importorskip("transformers").LlamaConfig(**SMALL).save_pretrained(".")
    before = {path: path.read_text() for path in Path().iterdir()}
    assert message in refused(capsys, *arguments.split())
    assert {path: path.read_text() for path in Path().iterdir()} == before


def test_help_version_and_list(capsys):
    for arguments in ([], ["-h"]):
        assert run(*arguments) == 0
        output = capsys.readouterr().out
        assert all(name in output for name in ("plan", "check-backend", "doctor", "--install-completion"))
    for arguments, expected in (
        ("--version", f"tritonpack {tritonpack.__version__}"),
        ("check-backend --list --only lse/* --skip */gradient", "lse/values\nlse/empty-rows"),
    ):
        assert run(*arguments.split()) == 0
        assert capsys.readouterr().out == f"{expected}\n"


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


def test_outputs_that_can_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text("[1]")
    os.mkfifo("pipe")
    for path in ("a.json", "new", "deep/in/folder", "pipe", "/dev/null", "-"):
        require_writable(Path(path))
    assert sorted(map(str, Path().rglob("*"))) == ["a.json", "deep", "deep/in", "pipe"]
    assert Path("a.json").read_text() == "[1]"
    with pytest.raises(ValueError, match=r"--json a\.json/b can't be written: (File exists|Not a directory); name ano"):
        require_writable(Path("a.json/b"))
