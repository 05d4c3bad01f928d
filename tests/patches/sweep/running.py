"""Judge a class in every way; run classes in processes, one for each model type.

So a hang or a crash costs one class.
"""

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

from tests.patches.sweep.build import NotBuiltError
from tests.patches.sweep.classes import Case, load, no_text
from tests.patches.sweep.forms import NAMES
from tests.patches.sweep.judging import Trial, message
from tests.patches.sweep.padded import PaddedTrial, takes_options
from tests.patches.sweep.results import ANY, HOWS, OPTIONS, Row
from tritonpack.patches.measuring import quiet


def judge_case(
    case: Case, hows: Iterable[str] = HOWS, chosen: Iterable[str] = NAMES, *, with_gradients: bool = True
) -> list[Row]:
    """Return the rows of one class: one for each of `hows`, or one for all if it takes no text or isn't built."""
    hows, start = hows_of(case, hows), time.perf_counter()
    try:
        if why := no_text(load(case)):
            return [Row(case.key, ANY, "no text", why)]
        trial = Trial(case, chosen, with_gradients=with_gradients) if {*hows} - {*OPTIONS} else None
    except (ImportError, NotBuiltError) as error:
        return [Row(case.key, ANY, "not built", str(error)[:240], seconds=time.perf_counter() - start)]
    rows: list[Row] = []
    for how in hows:
        try:
            one = PaddedTrial(case, how, chosen, with_gradients=with_gradients) if how in OPTIONS else trial
            assert one is not None
            rows.append(one.run(how))
        except NotBuiltError as error:
            rows.append(Row(case.key, how, "not built", str(error)[:240]))
        except Exception as error:  # it was neither patched nor refused
            when = "when built" if how == "name" else "when patched"
            rows.append(Row(case.key, how, "error", f"{when}: {message(error)}"))
    if rows:
        rows[0].seconds += time.perf_counter() - start - sum(row.seconds for row in rows)
    return rows


def hows_of(case: Case, hows: Iterable[str]) -> list[str]:
    """Return those of `hows` that a class is tried in."""
    return [how for how in hows if how not in OPTIONS or takes_options(case)]


def _work(group: list[Case], options: dict[str, Any], pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # compilers and kernels print there
    with quiet():
        for case in group:
            pipe.send([dataclasses.asdict(row) for row in judge_case(case, **options)])
    pipe.close()


def _rows_of(group: list[Case], limit: float, options: dict[str, Any]) -> list[Row]:
    """Return the rows of classes, which run in a process of their own; after a crash or a hang another one goes on."""
    fork = multiprocessing.get_context("fork")  # so that nothing is imported twice
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_work, args=(group, options, theirs), daemon=True)
    process.start()
    theirs.close()
    rows: list[Row] = []
    for number, case in enumerate(group):
        try:
            if ours.poll(limit):
                rows += [Row(**row) for row in ours.recv()]
                continue
            process.kill()
            why = f"it took more than {limit:.0f} seconds"
        except EOFError:
            process.join()
            why = f"its process ended with {process.exitcode}"
        rest = group[number + 1 :]
        return [*rows, Row(case.key, ANY, "error", why), *(_rows_of(rest, limit, options) if rest else ())]
    process.join()
    return rows


def run(todo: Iterable[Case], *, jobs: int = 1, limit: float = 60.0, **options: Any) -> Iterator[Row]:
    """Yield rows of classes when those of their model type are done.

    Args:
        todo: those of one model type are run one after the other.
        jobs: processes at a time.
        limit: seconds that one class may take.
        options: the options of `judge_case`.
    """
    groups: dict[str, list[Case]] = {}
    for case in todo:
        groups.setdefault(case.model_type, []).append(case)
    with ThreadPool(jobs) as pool:
        for rows in pool.imap_unordered(partial(_rows_of, limit=limit, options=options), groups.values()):
            yield from rows
