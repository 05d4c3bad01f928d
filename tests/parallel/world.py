"""Several processes with a gloo group run lists of cases; they are started once for all lists, as that is what costs.

A module of cases has a dictionary CASES of functions; each process calls all of them in order. A case is red where it
raises on any rank. What gets stuck ends after STUCK seconds, and all of it after `timeout`.
"""

import datetime
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
STUCK = 20  # seconds after which a collective gives up


def run(modules: list[str], size: int, folder: Path, timeout: float = 240) -> None:
    """Run the cases of tests.parallel.<module> in `size` processes; AssertionError with all failures of all ranks."""
    command = [sys.executable, "-m", "tests.parallel.world", ",".join(modules), str(size), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # A session of its own, which ends as a whole.
    world = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=environment, start_new_session=True)
    try:
        codes = json.loads(world.communicate(timeout=timeout)[0] or "null") or ["not started"] * size
    except subprocess.TimeoutExpired:
        codes = ["timed out"] * size
    finally:
        if world.poll() is None:
            os.killpg(world.pid, signal.SIGKILL)
            world.wait()
    texts = [f"--- rank {rank} of {size} ({codes[rank]})\n{read(log_of(folder, rank))}" for rank in range(size)]
    assert codes == [0] * size, "\n".join(texts)


def log_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.txt"


def read(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def start(modules: list[str], size: int, folder: Path) -> list[int]:
    """Fork the ranks, when everything has been imported once; their exit statuses."""
    for module in modules:
        import_module(f"tests.parallel.{module}")
    children = [os.fork() or _be(rank, modules, size, folder) for rank in range(size)]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _be(rank: int, modules: list[str], size: int, folder: Path) -> NoReturn:
    log = os.open(log_of(folder, rank), os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    code = 1
    try:
        code = work(modules, size, str(folder / "store"), rank)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def cases_of(module: str, size: int) -> list[tuple[str, Callable[[], None]]]:
    """A module's cases by name; more than two ranks run those of ALSO_ON_FOUR alone, where it has that."""
    home = import_module(f"tests.parallel.{module}")
    chosen = home.CASES if size == 2 else getattr(home, "ALSO_ON_FOUR", home.CASES)
    return [(name, home.CASES[name]) for name in chosen]


def work(modules: list[str], size: int, store: str, rank: int) -> int:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=STUCK)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    failures = 0
    cases = [item for module in modules for item in cases_of(module, size)]
    for name, case in cases:
        torch.manual_seed(0)
        started = time.monotonic()
        failed = True
        try:
            case()
            failed = False
        except (Exception, pytest.fail.Exception):
            print(f"{name} failed:\n{traceback.format_exc()}", flush=True)
        verdicts: list = [None] * size
        dist.all_gather_object(verdicts, failed)  # raises where a rank is stuck in a case that another one left
        failures += any(verdicts)
        print(f"{name}: {time.monotonic() - started:.2f} s", flush=True)
    dist.destroy_process_group()
    return int(failures > 0)


if __name__ == "__main__":
    print(json.dumps(start(sys.argv[1].split(","), int(sys.argv[2]), Path(sys.argv[3]))))
