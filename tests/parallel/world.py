"""Several processes with a gloo group run lists of cases; they are started once for all lists, as that is what costs.

A module of cases has a dictionary CASES of functions; each process calls all of them in order. A case is red where it
raises on any rank. What gets stuck ends after STUCK seconds, and all of it after `timeout`.
"""

import datetime
import os
import subprocess
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
STUCK = 20  # seconds after which a collective gives up


def run(modules: list[str], size: int, folder: Path, timeout: float = 240) -> None:
    """Run the cases of tests.parallel.<module> in `size` processes; AssertionError with all failures of all ranks."""
    command = [sys.executable, "-m", "tests.parallel.world", ",".join(modules), str(size), str(folder / "store")]
    logs = [folder / f"rank{rank}.txt" for rank in range(size)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            processes.append(
                subprocess.Popen([*command, str(rank)], stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
            )
    end = time.monotonic() + timeout
    try:
        codes = [process.wait(max(end - time.monotonic(), 0.1)) for process in processes]
    except subprocess.TimeoutExpired:
        codes = ["timed out"] * size
    finally:
        for process in processes:
            process.kill()
            process.wait()
    texts = [f"--- rank {rank} of {size} ({codes[rank]})\n{log.read_text()}" for rank, log in enumerate(logs)]
    assert codes == [0] * size, "\n".join(texts)


def work(modules: list[str], size: int, store: str, rank: int) -> int:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=STUCK)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    failures = 0
    cases = [item for module in modules for item in import_module(f"tests.parallel.{module}").CASES.items()]
    for name, case in cases:
        torch.manual_seed(0)
        started = time.monotonic()
        failed = True
        try:
            case()
            failed = False
        except Exception:
            print(f"{name} failed:\n{traceback.format_exc()}", flush=True)
        verdicts: list = [None] * size
        dist.all_gather_object(verdicts, failed)  # raises where a rank is stuck in a case that another one left
        failures += any(verdicts)
        print(f"{name}: {time.monotonic() - started:.2f} s", flush=True)
    dist.destroy_process_group()
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(work(sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
