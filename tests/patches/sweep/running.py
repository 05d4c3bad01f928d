"""Judge a class in every way; run classes in processes of their own, so that a hang or a crash costs one class."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.pool import ThreadPool
from typing import Any

import torch

from tests.patches.sweep.classes import Case, NotBuiltError, load, no_text
from tests.patches.sweep.forms import NAMES
from tests.patches.sweep.judging import Trial, message
from tests.patches.sweep.results import HOWS, NEVER, OPTIONS, Row
from tritonpack.patches.measuring import quiet


def judge_case(
    case: Case, hows: Iterable[str] = HOWS, chosen: Iterable[str] = NAMES, *, with_gradients: bool = True
) -> list[Row]:
    """Return the rows of one class: one for each of `hows`, or one if it takes no text or isn't built."""
    start, trials, rows = time.perf_counter(), dict[str, Trial](), list[Row]()
    try:
        if why := no_text(load(case)):
            return [Row(case.key, HOWS[0], "no text", why)]
    except ImportError as error:
        return [Row(case.key, HOWS[0], "not built", str(error)[:240])]
    for how in hows_of(case, hows):
        option = how if how in OPTIONS else ""
        trial = trials.setdefault(option, Trial(case, option, chosen, with_gradients=with_gradients))
        try:
            rows.append(trial.run(how))
        except NotBuiltError as error:
            rows.append(Row(case.key, how, "not built", str(error)[:240], seconds=time.perf_counter() - start))
        except Exception as error:  # it was neither patched nor refused
            rows.append(Row(case.key, how, "error", f"when patched: {message(error)}"))
        if len(rows) == 1 and rows[0].verdict in NEVER:
            break
    return rows


def takes_options(case: Case) -> bool:
    """Whether a class is tried with the options: causal language models are."""
    return "CAUSAL_LM" in case.mappings


def hows_of(case: Case, hows: Iterable[str]) -> list[str]:
    """Return those of `hows` that a class is tried in."""
    return [how for how in hows if how not in OPTIONS or takes_options(case)]


def _work(case: Case, options: dict[str, Any], pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # compilers and kernels print there
    with quiet():
        pipe.send([dataclasses.asdict(row) for row in judge_case(case, **options)])
    pipe.close()


def _rows_of(case: Case, limit: float, options: dict[str, Any]) -> list[Row]:
    """Return the rows of a class, which runs in a process of its own."""
    fork = multiprocessing.get_context("fork")  # so that nothing is imported twice
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_work, args=(case, options, theirs), daemon=True)
    process.start()
    theirs.close()
    why = f"it took more than {limit:.0f} seconds"
    try:
        if ours.poll(limit):
            return [Row(**row) for row in ours.recv()]
        process.kill()
    except EOFError:
        process.join()
        why = f"its process ended with {process.exitcode}"
    return [Row(case.key, HOWS[0], "error", why)]


def run(todo: Iterable[Case], *, jobs: int = 1, limit: float = 60.0, **options: Any) -> Iterator[Row]:
    """Yield rows of classes when they are done.

    Args:
        todo: the classes.
        jobs: processes at a time.
        limit: seconds that one class may take.
        options: the options of `judge_case`.
    """
    with ThreadPool(jobs) as pool:
        for rows in pool.imap_unordered(partial(_rows_of, limit=limit, options=options), todo):
            yield from rows
