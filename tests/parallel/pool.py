"""A pool of processes in a gloo group, which runs test cases. It is reused, because starting processes takes seconds.

A module of cases has a dictionary CASES of functions without arguments. Every rank calls the same case. A case fails if
any rank raises; its pool is then closed and not used again.
"""

import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
STUCK = 20  # seconds after which a collective gives up
PATIENCE = 240  # seconds for a case


class Pool:
    """Processes, one for each of `size` ranks."""

    def __init__(self, size: int) -> None:
        self.size, self.ended = size, False
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, theirs = zip(*(Pipe() for _ in range(size)), strict=True)
        descriptors = [one.fileno() for one in theirs]
        # In a session of its own, so that `close` can end all of its processes.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.pool", self._folder.name, *map(str, descriptors)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            pass_fds=descriptors,
            start_new_session=True,
        )
        for one in theirs:
            one.close()

    def run(self, module: str, name: str, patience: float = PATIENCE) -> str:
        """Run a case of tests.parallel.<module> on every rank and return what the first rank printed.

        Raises:
            AssertionError: with the reports of all ranks, if one raised, died or got stuck.
        """
        deadline = time.monotonic() + patience
        for pipe in self._pipes:
            pipe.send((module, name))
        reports = [self._answer(rank, deadline) for rank in range(self.size)]
        if any(error for _, error in reports):
            self.close()
            raise AssertionError(
                "\n".join(f"--- rank {i} of {self.size}\n{text}{error}" for i, (text, error) in enumerate(reports))
            )
        return reports[0][0]

    def _answer(self, rank: int, deadline: float) -> tuple[str, str]:
        """What a rank printed, and its error or an empty string."""
        try:
            if self._pipes[rank].poll(max(0.0, deadline - time.monotonic())):
                return self._pipes[rank].recv()
            error = "stuck"
        except (EOFError, OSError):
            error = "died"
        log = log_of(Path(self._folder.name), rank)
        return "", f"{error}\n{log.read_text() if log.exists() else ''}"

    def close(self) -> None:
        """End all processes of the pool."""
        if not self.ended:
            self.ended = True
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for pipe in self._pipes:
                pipe.close()
            self._folder.cleanup()


def log_of(folder: Path, rank: int) -> Path:
    """The file with the standard error of a rank."""
    return folder / f"rank{rank}.txt"


def cases_of(module: str, size: int) -> dict[str, Callable[[], None]]:
    """A module's cases by name. More than two ranks run only those in ALSO_ON_FOUR, if the module has it, and those
    whose names begin with "mesh", which need four."""
    home = import_module(f"tests.parallel.{module}")
    chosen = home.CASES if size == 2 else getattr(home, "ALSO_ON_FOUR", home.CASES)
    return {name: case for name, case in home.CASES.items() if (size == 4 if name[:4] == "mesh" else name in chosen)}


def start(folder: Path, pipes: list[Connection]) -> None:
    """Import what nearly all cases need, which takes seconds, then fork the ranks."""
    import_module("tests.parallel.agreement_cases")
    children = [os.fork() or _run_rank(rank, folder, pipes) for rank in range(len(pipes))]
    for pipe in pipes:
        pipe.close()  # so that the pipe of a rank closes when that rank dies
    for child in children:
        os.waitpid(child, 0)


def _run_rank(rank: int, folder: Path, pipes: list[Connection]) -> NoReturn:
    for other in range(len(pipes)):
        if other != rank:
            pipes[other].close()
    os.dup2(os.open(log_of(folder, rank), os.O_WRONLY | os.O_CREAT), 2)
    try:
        _serve(rank, len(pipes), folder, pipes[rank])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def _serve(rank: int, size: int, folder: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=STUCK)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timeout)
    while True:
        module, name = pipe.recv()
        torch.manual_seed(0)
        error, printed = "", StringIO()
        try:
            with redirect_stdout(printed):
                import_module(f"tests.parallel.{module}").CASES[name]()
        except (Exception, pytest.fail.Exception):
            error = f"{name} failed:\n{traceback.format_exc()}"
        pipe.send((printed.getvalue(), error))
        dist.barrier()  # raises if another rank is stuck in the case


if __name__ == "__main__":
    start(Path(sys.argv[1]), [Connection(int(descriptor)) for descriptor in sys.argv[2:]])
