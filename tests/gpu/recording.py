"""pytest plugin of one job of the GPU check, ``-p tests.gpu.recording``. Rank 0 writes; all ranks skip the same checks.

A result is on the disk when the next check begins. After a failure the plugin tests whether the device still works:
an illegal address makes every later call fail, so that the process ends and a new one runs the remaining checks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.results import ABANDONED, JOB, RESULTS, SKIP, append


def pytest_configure(config: pytest.Config) -> None:
    """Start to record if the job names a file for the results."""
    if RESULTS in os.environ:
        config.pluginmanager.register(Recording(config), "halograd-gpu-recording")


class Recording:
    """Hooks that write the outcome of every test."""

    def __init__(self, config: pytest.Config) -> None:
        self._path, self._job = Path(os.environ[RESULTS]), json.loads(os.environ[JOB])
        ranks, rank = self._job.pop("ranks", 0), 0
        if config.getoption("--with-mpi", False):
            from mpi4py import MPI

            rank = MPI.COMM_WORLD.rank
            if MPI.COMM_WORLD.size != ranks:  # every process is then rank 0 of 1, and its tests pass or are not chosen
                self._writes = rank == 0
                text = f"expected {ranks} ranks, got {MPI.COMM_WORLD.size}: mpiexec and mpi4py belong to different MPIs"
                self._write(check="ranks", status="failed", detail=text)
                self._write(done=True)
                pytest.exit(text, returncode=1)
        self._writes = rank == 0
        self._skip = set(json.loads(Path(os.environ[SKIP]).read_text(encoding="utf-8")))
        self._begin, self._broken = 0.0, False
        self._outcome: tuple[str, str] = ("failed", "no outcome was reported")
        self._numbers: dict[str, Any] = {}

    def _write(self, **event: Any) -> None:
        if self._writes:
            append(self._path, **self._job, **event)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        known = [item for item in items if item.nodeid in self._skip]
        if known:
            config.hook.pytest_deselected(items=known)
            items[:] = [item for item in items if item.nodeid not in self._skip]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._broken = True
            self._write(check=report.nodeid or "collection", status="failed", detail=report.longreprtext[-2000:])
        elif report.skipped:
            self._write(check=report.nodeid, status="skipped", detail=_reason(report))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(begin=nodeid)
        self._begin, self._outcome, self._numbers = time.monotonic(), ("ok", ""), {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._outcome = "failed", report.longreprtext[-2000:]
        elif report.skipped and self._outcome[0] == "ok":
            self._outcome = "skipped", _reason(report)
        self._numbers = dict(report.user_properties)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        status, detail = self._outcome
        said = str(self._numbers.pop("detail", ""))
        lost = _lost() if status == "failed" else ""  # on every rank: the device of each is another's, or it is lost
        text = " ".join(filter(None, [said, detail, lost]))
        seconds = round(time.monotonic() - self._begin, 3)
        self._write(check=nodeid, status=status, detail=text, seconds=seconds, numbers=self._numbers)
        if lost:
            os._exit(ABANDONED)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus in (0, 1, 5) or self._broken:  # tests have run, there was none left, or none will ever be
            self._write(done=True)


def _lost() -> str:
    """Return the reason why the device no longer works; empty if it works or CuPy is not loaded."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return ""
    try:
        if cupy.cuda.runtime.getDeviceCount():
            cupy.cuda.runtime.deviceSynchronize()
    except Exception as error:
        text = " ".join(str(error).split())
        return "" if "NoDevice" in text or "InsufficientDriver" in text else f"[the device answers no more: {text}]"
    return ""


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
