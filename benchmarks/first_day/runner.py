"""Runs steps in processes of their own, with time limits, and writes each result at once, so that a second call
continues where the first one ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.gpu.ledger import CONTINUE, environment, now

ROOT = Path(__file__).parents[2]
KEPT = 64_000  # characters of a step's output that are kept with its result
FEWEST = 20.0  # seconds that must be left for a step to begin
NOTICE = 10.0  # seconds between the time that a step is given and the time at which it is ended

TELL = partial(print, flush=True)

# Verdicts. BEGUN stays the last one of a step that ended the whole call, with the machine say.
OK, FAILED, TIMEOUT, UNFINISHED, SKIPPED, BEGUN = "ok", "failed", "timeout", "unfinished", "skipped", "begun"


@dataclass(frozen=True)
class Step:
    """A step of the day.

    Attributes:
        name: unique.
        what: what it shows, in a few words.
        command: the program and its arguments; "python3" means this interpreter, {out} in an argument the folder
            of results, {minutes} the minutes that it is given.
        limit: seconds after which it is ended, of all calls together if it continues.
        expected: seconds that it usually takes; it begins only if they are left.
        after: names of the steps before it that must be ok.
        continues: whether the same command continues after exit status CONTINUE.
        serves: names of steps that it prepares the machine for, if it does no more than that. Each call runs it again
            as long as one of them is pending.
        environment: variables of its environment.
    """

    name: str
    what: str
    command: tuple[str, ...]
    limit: float
    expected: float = 60.0
    after: tuple[str, ...] = ()
    continues: bool = False
    serves: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Result:
    """The outcome of a step.

    Attributes:
        step: its name.
        verdict: one of the verdicts above.
        seconds: that it took in this call.
        reason: why it isn't ok; empty if it is.
        output: the end of what it printed.
        commit: of the code that it ran.
        date: when it ended, in UTC.
        platform: the device and the version of Triton.
    """

    step: str
    verdict: str
    seconds: float = 0.0
    reason: str = ""
    output: str = ""
    commit: str = ""
    date: str = ""
    platform: str = ""

    @property
    def last_line(self) -> str:
        """The last line of the output."""
        lines = self.output.strip().splitlines()
        return lines[-1].strip() if lines else ""


class Platform(NamedTuple):
    """The machine and the code that results belong to.

    Attributes:
        device: the name of the GPU.
        triton: the version of Triton.
        capability: the GPU's compute capability, such as "9.0".
    """

    device: str = ""
    triton: str = ""
    capability: str = ""

    def __str__(self) -> str:
        return f"{self.device}, Triton {self.triton}"


NO_PLATFORM = Platform()


class Journal:
    """The results of all calls on one platform. The file, one result a line, may have those of others, too."""

    def __init__(self, path: Path, platform: Platform = NO_PLATFORM) -> None:
        self.path, self.platform = path, str(platform)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # the machine was lost while it wrote a line
            path.write_text(whole, encoding="utf-8")
        results = [Result(**json.loads(line)) for line in whole.splitlines()]
        self.results = [result for result in results if result.platform == self.platform]

    def write(self, result: Result) -> None:
        """Add a result; it is on the disk when this returns."""
        result = replace(result, platform=self.platform)
        self.results.append(result)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def last(self, step: Step) -> Result | None:
        """A step's newest result."""
        return next((result for result in reversed(self.results) if result.step == step.name), None)

    def seconds(self, step: Step | None = None) -> float:
        """The seconds of a step, or of all steps."""
        return sum(result.seconds for result in self.results if step is None or result.step == step.name)


@dataclass(frozen=True)
class Day:
    """Options of a run of steps.

    Attributes:
        steps: in order.
        journal: their results.
        out: the folder of results.
        commit: of the code.
        probe: a command that fails if the device doesn't answer; it is run after a step that wasn't ok.
        platform: the device and the version of Triton that results and figures belong to.
    """

    steps: Sequence[Step]
    journal: Journal
    out: Path
    commit: str
    probe: tuple[str, ...] = ()
    platform: Platform = NO_PLATFORM

    def pending(self, again: Sequence[str] = ()) -> list[Step]:
        """The steps that are still to be run: not those that are ok, that had their time, or that failed with this
        code and aren't named in `again`."""
        pending = {step.name for step in self.steps if not step.serves and not self._settled(step, again)}
        return [step for step in self.steps if step.name in pending or pending.intersection(step.serves)]

    def _settled(self, step: Step, again: Sequence[str]) -> bool:
        last = self.journal.last(step)
        if last is None or last.verdict == SKIPPED or step.name in again:
            return False
        if last.verdict == UNFINISHED:
            return self._left(step) < FEWEST
        if last.verdict == BEGUN:  # it is tried once more
            verdicts = [result.verdict for result in self.journal.results if result.step == step.name]
            return verdicts[-2:] == [BEGUN, BEGUN]
        return last.verdict == OK or last.commit == self.commit

    def _left(self, step: Step) -> float:
        """The seconds of a step that it hasn't used, since it began or is run again.

        A step that can't continue starts over, with all of its time.
        """
        if not step.continues:
            return step.limit
        used = 0.0
        for result in reversed(self.journal.results):
            if result.step == step.name:
                if result.verdict not in (UNFINISHED, BEGUN):
                    break
                used += result.seconds
        return step.limit - used

    def run(self, seconds: float, again: Sequence[str] = (), tell: Callable[[str], None] = TELL) -> bool:
        """Run what is pending, for at most these seconds. Returns whether nothing is left.

        A step that needs more begins if it is the first one, because no later call would give it more.
        """
        end, first = time.monotonic() + seconds, True
        pending = self.pending(again)
        for step in pending:
            if step.name in again:  # also with its time
                self.journal.write(Result(step.name, SKIPPED, reason="to be run again"))
        for step in pending:
            reason = self._obstacle(step)
            if reason:
                self._write(Result(step.name, SKIPPED, reason=reason), tell)
                continue
            while True:
                left = end - time.monotonic()
                if left <= 0 or left < (FEWEST if first or step.continues else min(step.expected, step.limit)):
                    return False
                result = self._run(step, min(left, self._left(step)), whole=first or self._left(step) <= left)
                first = False
                self._write(result, tell)
                if result.verdict != UNFINISHED or self._left(step) < FEWEST:
                    break
            if result.verdict != OK and not self._answers():
                tell("The device doesn't answer, so no further step is run now.")
                return False
        return True

    def _write(self, result: Result, tell: Callable[[str], None]) -> None:
        last = next((r for r in reversed(self.journal.results) if r.step == result.step), None)
        if result.verdict != SKIPPED or last is None or last.reason != result.reason:
            self.journal.write(result)
        self.log.unlink(missing_ok=True)
        why = ": ".join(filter(None, (result.reason, result.last_line)))
        tell(f"{result.step:12} {result.verdict:10} {result.seconds:6.1f} s  {why}")

    def _obstacle(self, step: Step) -> str:
        """Why a step can't be run; empty if it can."""
        for name in step.after:
            before = next(s for s in self.steps if s.name == name)
            last = self.journal.last(before)
            if last is None or last.verdict != OK:
                return f"after {name}, which is {'pending' if last is None else last.verdict}"
        if step.command[0] != "python3" and shutil.which(step.command[0]) is None:
            return f"{step.command[0]} isn't on PATH"
        return ""

    def _run(self, step: Step, limit: float, *, whole: bool) -> Result:
        """Run a step; `whole` says that a later call couldn't give it more time."""
        fill = {"out": str(self.out), "minutes": f"{max(limit - NOTICE, 1) / 60:.2f}"}
        self.journal.write(Result(step.name, BEGUN, commit=self.commit, date=now()))
        began = time.monotonic()
        command = [part.format(**fill) if "{" in part else part for part in step.command]
        status = self._execute(command, step, limit)
        taken = time.monotonic() - began
        output = self.log.read_text(encoding="utf-8", errors="replace")[-KEPT:]
        verdict, reason = _judge(step, status, limit, whole=whole)
        return Result(step.name, verdict, round(taken, 1), reason, output, self.commit, now())

    @property
    def log(self) -> Path:
        """The output of the step that runs."""
        return self.out / "running.log"

    def _execute(self, command: list[str], step: Step, limit: float) -> int | None:
        """The exit status; None if the time was up, and the process and its children were ended."""
        variables = {**os.environ, "PYTHONUNBUFFERED": "1", **dict(step.environment)}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), variables.get("PYTHONPATH", ""))))
        command = [sys.executable if part == "python3" else part for part in command]
        with self.log.open("wb") as log:
            # A group of its own, to end its children, too; not a session, which would outlive a lost connection.
            process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=ROOT, env=variables,
                preexec_fn=os.setpgrp,
            )  # fmt: skip
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:  # children, too, also those of a process that has ended
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _answers(self) -> bool:
        if not self.probe:
            return True
        try:
            return self._execute(list(self.probe), Step("probe", "", self.probe, limit=60), 60) == 0
        finally:
            self.log.unlink(missing_ok=True)


def this_platform(*, dry: bool = False) -> Platform:
    """The platform of this machine. Its GPU is asked by another process, because a context takes the GPU's memory."""
    about = environment(torch.device("cpu"))
    if dry:
        return Platform(about["device"], about["triton"])
    ask = "import torch; print(torch.cuda.get_device_name(), *torch.cuda.get_device_capability(), sep='\\n')"
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=90, check=True)
        name, major, minor = done.stdout.strip().splitlines()[-3:]
        return Platform(name, about["triton"], f"{major}.{minor}")
    return Platform("no GPU", about["triton"])


def _judge(step: Step, status: int | None, limit: float, *, whole: bool) -> tuple[str, str]:
    """The verdict on an exit status, and the reason."""
    if status == 0:
        return OK, ""
    if status is None:
        return (TIMEOUT if whole and not step.continues else UNFINISHED), f"ended after {limit:.0f} s"
    if status == CONTINUE and step.continues:
        return UNFINISHED, "the same command continues"
    return FAILED, f"exit status {status}" if status > 0 else f"signal {signal.Signals(-status).name}"
