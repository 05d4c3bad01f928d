"""A clock for tests of programs that have time limits."""

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the first day's steps stands still, but for one that prints "hangs": it takes all of its time."""
    from benchmarks.first_day import runner

    now = [0.0]

    class Process(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, stdout: Any, **keywords: Any) -> None:
            self.log = Path(stdout.name)
            super().__init__(*arguments, stdout=stdout, **keywords)

        def wait(self, timeout: float | None = None) -> int:
            while timeout is not None and self.poll() is None:
                if self.log.read_bytes().endswith(b"hangs\n"):
                    now[0] += timeout
                    raise subprocess.TimeoutExpired(self.args, timeout)
                time.sleep(0.01)
            return super().wait()

    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Process}))
