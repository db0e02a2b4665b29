"""pytest plugin of a rank: every test has the same outcome on all ranks, and only rank 0 prints.

A test body may communicate; a fault on one rank fails the test on all of them, with that rank's traceback. A rank
that fails while the others wait for it, and a test that exceeds its limit, end the whole job.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest
from _pytest._io import TerminalWriter

from tests.harness.agreement import FAILED, SKIPPED, Agreement
from tests.harness.jobs import segments
from tests.harness.limits import grace
from tests.harness.record import Record
from tests.harness.watchdog import Watchdog

if TYPE_CHECKING:
    from mpi4py import MPI


class RankPlugin:
    """Hooks for one rank of ``mpiexec -n P python -m pytest --with-mpi``."""

    def __init__(self, config: pytest.Config, comm: MPI.Intracomm, record: Record, watchdog: Watchdog) -> None:
        self.config = config
        self.comm = comm
        self.watchdog = watchdog
        self.record = record
        self.agreement = Agreement(comm, record, grace(), os.dup(2))
        self.errors: list[str] = []
        self._note_segments()

    # Collection: an import error on one rank, or ranks that would run different tests.

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(f"{report.nodeid}\n{report.longreprtext}")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        mine = [self.errors, [item.nodeid for item in session.items]]
        everyone = self.agreement.gather_objects(mine)
        if any(other != everyone[0] for other in everyone):
            where = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
            errors = "\n".join(f"[rank {r}] {text}" for r in where for text in everyone[r][0])
            if self.comm.rank == 0:
                self.agreement.give_up("collection", f"ranks {where} collect other tests than rank 0\n{errors}")
            self.comm.Barrier()  # until rank 0 has spoken and ended the job

    # Each phase of a test.

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        key = f"{item.nodeid} ({report.when})"
        codes = self.agreement.outcomes(key, report.outcome, _text(report), limit_of(item) + grace())
        if FAILED in codes or len(set(codes)) > 1:
            texts = self.agreement.gather_objects(_text(report))
            report.outcome = "failed"
            report.longrepr = _joint_text(codes, texts)
        return report

    def pytest_sessionfinish(self) -> None:
        self._note_segments()

    def _note_segments(self) -> None:
        """Record the shared memory that this rank has mapped; the runner checks that it does not outlive the run."""
        self.record.write(segments=sorted(segments([os.getpid()])))

    # Limits: pytest-timeout asks whoever wants to do it.

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool:
        def expired(limit: float) -> None:
            self.agreement.give_up(item.nodeid, f"test exceeded its limit of {limit:g} s")

        self.watchdog.start(settings.timeout, expired)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> bool:
        self.watchdog.stop()
        return True


def limit_of(item: pytest.Item) -> float:
    """Return the limit of a test [s], which the suite has set on every test."""
    marker = item.get_closest_marker("timeout")
    assert marker is not None
    return float(marker.args[0])


def quiet(config: pytest.Config, rank: int) -> None:
    """Let only rank 0 print, and remove the long description of the MPI library that pytest-mpi adds."""
    reporter: Any = config.pluginmanager.getplugin("terminalreporter")
    if rank and reporter is not None:
        reporter._tw = TerminalWriter(io.StringIO())
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "MPIPlugin":
            plugin._is_testing_mpi = False


def _text(report: pytest.TestReport) -> str:
    if report.skipped:
        return str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
    if not report.failed:
        return ""
    captured = "".join(f"\n--- {name}\n{text}" for name, text in report.sections)
    return report.longreprtext + captured


def _joint_text(codes: list[int], texts: list[str]) -> str:
    size = len(codes)
    failed = [rank for rank in range(size) if codes[rank] == FAILED]
    if failed:
        return "\n".join(f"[rank {rank} of {size}]\n{texts[rank]}" for rank in failed)
    skipped = [rank for rank in range(size) if codes[rank] == SKIPPED]
    return f"expected a test to be skipped on all ranks or none, got ranks {skipped} of {size}: {texts[skipped[0]]}"
