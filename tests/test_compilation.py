"""A first use compiles the functions that it needs, each once, and says so in a line; the next process is silent."""

import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("numba")

from tests.fresh import FreshInterpreters
from tritonpack import compilation, notices
from tritonpack.packing.planning import optimiser

PROGRAM = """
import json, os
os.environ["NUMBA_CACHE_DIR"] = {folder!r}
from numba.core import event

class Compiled(event.Listener):
    def on_start(self, event):
        function = event.data["dispatcher"].py_func
        if function.__module__.startswith("tritonpack."):
            names.append(function.__module__.split(".")[-1] + "." + function.__name__)
    def on_end(self, event):
        pass

names = []
event.register("numba:compile", Compiled())
import tritonpack
{use}
print(json.dumps(names))
"""
USES = {
    "dataloader": 'len(tritonpack.dataloader([{"input_ids": [*range(1 + i % 50)]} for i in range(200)], tokens=256))',
    "pack": "[tritonpack.packing.pack([5, 3] * 200, 64, algorithm=name) "
    "for name in ('best_fit_decreasing', 'best_fit', 'next_fit')]",
}
LINE = "tritonpack: compiling functions for packing once per machine, at their first use"


def compiled_by(fresh: FreshInterpreters, folder: Path, use: str) -> tuple[list[str], str]:
    """The functions of this package that a new process compiles, and what it prints to standard error."""
    done = fresh.run(PROGRAM.format(folder=str(folder), use=use))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_no_use_compiles_a_function_twice(fresh: FreshInterpreters, tmp_path: Path, use: str) -> None:
    """A dataloader compiles what it uses, and says so in a line."""
    names, printed = compiled_by(fresh, tmp_path, USES[use])
    assert max(Counter(names).values()) == 1
    if use == "dataloader":
        assert {"optimiser.plan_steps", "optimiser._divide"} <= set(names)
        assert not {"heuristics.best_fit", "heuristics.longest_first"} & set(names)
        assert printed == f"{LINE} (about 10 s)\n"
    assert compiled_by(fresh, tmp_path, USES[use]) == ([], "")


def foreign(x: int) -> int:
    return x


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> compilation._Compilations:
    monkeypatch.setattr(notices, "said", {})
    return compilation._Compilations()


def compile_once(listener: compilation._Compilations, *functions: Any) -> None:
    """The events of a function that numba compiles with the functions that it calls."""
    events: list[Any] = [SimpleNamespace(data={"dispatcher": function}) for function in functions]
    for event in events:
        listener.on_start(event)
    for event in reversed(events):
        listener.on_end(event)


FOREIGN = SimpleNamespace(py_func=foreign)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_line_for_all_functions_on_the_first_rank_of_a_machine(
    listener: compilation._Compilations, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    compile_once(listener, FOREIGN)
    assert capsys.readouterr() == ("", "")
    for _ in range(2):
        compile_once(listener, optimiser.plan_steps, optimiser._offer, FOREIGN)
    out, line = capsys.readouterr()
    assert (out, line.count("\n"), line.startswith(LINE)) == ("", int(rank == "0"), rank == "0")


def test_bar_on_a_terminal_counts_the_functions(
    listener: compilation._Compilations, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    compile_once(listener, optimiser._divide, optimiser.sort_by_bytes, FOREIGN)
    printed = capsys.readouterr().err
    assert "compiling: 0 of 3 functions" in printed
    assert printed.endswith("\r")  # the bar is gone


def test_without_a_folder_for_machine_code_functions_are_compiled_in_each_process(
    listener: compilation._Compilations, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr("numba.core.dispatcher.Dispatcher.enable_caching", refuse)
    made = compilation.compiled()(foreign)
    assert made(3) == 3
    monkeypatch.setattr(foreign, "__module__", "tritonpack.packing.example")
    compile_once(listener, made)
    assert "in each process" in (line := capsys.readouterr().err)
    assert "set NUMBA_CACHE_DIR" in line
