"""Runs GPU tests in a process beside pytest. A hanging test, or one that loses the device, costs no other its result.

As a plugin (`-p tests.gpu.worker`) this module is that process: it runs the tests that it is sent.
"""

import os
import resource
import signal
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe
from tempfile import TemporaryFile
from typing import Any

import pytest

SECONDS = 180  # that a test may take; `pytest.mark.gpu(seconds=...)` names others
START = 300  # seconds in which the process must have collected the tests
CHANNEL = "TRITONPACK_GPU_TESTS"


class Worker:
    """A process that runs tests one after the other; a new one takes its place if it ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, item: pytest.Item, seconds: float) -> None:
        """Run a test and report its results as those of this process."""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(item, seconds):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _reports(self, item: pytest.Item, seconds: float) -> list[pytest.TestReport]:
        try:
            if self._process is None:
                self._start(item)
            self._channel.send(item.nodeid)
            reports, lost = self._receive(seconds)
            if lost:
                self.close()
        except (EOFError, OSError, TimeoutError) as error:
            why = f"{error or 'the process of the test ended'}\n{self.close()}"
            return [pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")]
        return [item.config.hook.pytest_report_from_serializable(config=item.config, data=data) for data in reports]

    def _start(self, item: pytest.Item) -> None:
        files = dict.fromkeys(str(one.path) for one in item.session.items if one.get_closest_marker("gpu"))
        self._channel, other = Pipe()
        self._log = TemporaryFile()  # noqa: SIM115
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-p", "tests.gpu.worker", "-p", "no:cacheprovider", "-m", "gpu",
                 *files],
                env=os.environ | {CHANNEL: str(other.fileno())}, pass_fds=[other.fileno()], cwd=item.config.rootpath,
                stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            )  # fmt: skip
        self._receive(START)

    def _receive(self, seconds: float) -> Any:
        if not self._channel.poll(seconds):
            raise TimeoutError(f"ended after {seconds:g} seconds")
        return self._channel.recv()

    def close(self) -> str:
        """End the process; returns the end of what it printed, with Python's stack if it hung."""
        if self._process is None:
            return ""
        self._process.send_signal(signal.SIGABRT)  # pytest's faulthandler prints the stack
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        self._channel.close()
        with self._log as log:
            log.seek(0)
            return log.read().decode(errors="replace")[-4000:]


REPORTS: list[pytest.TestReport] = []  # of the current test, in the process that runs tests


def pytest_runtestloop(session: pytest.Session) -> bool:
    """Run the tests that come through the channel; send their reports, and whether the device is lost."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a process that is aborted writes no gigabytes
    items = {item.nodeid: item for item in session.items}
    with Connection(int(os.environ[CHANNEL])) as channel:
        channel.send("ready")
        while True:
            item = items[channel.recv()]
            REPORTS.clear()
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            lost = any(report.failed for report in REPORTS) and device_is_lost()
            hook = session.config.hook.pytest_report_to_serializable
            channel.send(([hook(config=session.config, report=report) for report in REPORTS], lost))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep a report of the current test."""
    REPORTS.append(report)


def device_is_lost() -> bool:
    """Whether an error ended all work of this process on the GPU."""
    import torch

    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
