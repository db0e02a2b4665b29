"""Markers and fixtures of the suite.

``@pytest.mark.mpi``              run under 1, 2, 3 and 4 ranks
``@pytest.mark.many_ranks``       run under 1, 2, 3, 4, 6 and 8 ranks
``@pytest.mark.ranks(2, 6)``      run under exactly these numbers of ranks
``@pytest.mark.nightly``          leave out of ``make test``; ``make nightly`` and direct calls of pytest run it
``@pytest.mark.timeout(seconds)`` a limit longer than the default; on a slow or busy machine all of them are longer

A test with one of the first three markers does not run serially. A test for several numbers of ranks counts as nightly
under all but one of them (`tests.harness.sizes.daily`). Under MPI a failure on one rank fails the test on all.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.harness.jobs import TEST_ENVIRONMENT
from tests.harness.limits import TEST_LIMIT, scaled
from tests.harness.plugin import RankPlugin, limit_of, quiet
from tests.harness.record import Record
from tests.harness.sizes import daily, sizes_in, sizes_of
from tests.harness.watchdog import Watchdog

SIZE, NIGHTLY = pytest.StashKey[int](), pytest.StashKey[int]()

for _name, _value in TEST_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

# The same examples on every rank and in every run, without deadlines, which have no meaning on shared machines.
settings.register_profile("suite", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("suite")


@pytest.hookimpl(trylast=True)  # the reporter that is silenced must exist
def pytest_configure(config: pytest.Config) -> None:
    gc.disable()
    rank, size = 0, 0
    if config.getoption("--with-mpi"):
        from mpi4py import MPI

        rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    record = Record(rank)
    record.write(pid=os.getpid())
    watchdog = Watchdog(record)
    config.stash[SIZE] = size
    if rank == 0:
        config.pluginmanager.register(Recorder(record), "halograd-recorder")
    if size:
        quiet(config, rank)
        config.pluginmanager.register(RankPlugin(config, MPI.COMM_WORLD, record, watchdog), "halograd-rank")
    else:
        config.pluginmanager.register(SerialLimit(watchdog), "halograd-limit")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Make ``-m mpi`` select tests of the other two markers too; set the time limit of every test for this machine."""
    if sizes_of(item) and item.get_closest_marker("mpi") is None:
        item.add_marker("mpi")
    own, common = item.get_closest_marker("timeout"), item.config.getoption("timeout")
    limit = max(own.args[0] if own else 0, TEST_LIMIT if common is None else common)
    item.add_marker(pytest.mark.timeout(scaled(limit)), append=False)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests for this number of ranks; without MPI, keep the tests without a marker for ranks."""
    size = config.stash[SIZE]
    _check_marks(items)
    for item, sizes in daily(items):
        if size and size not in sizes:
            item.add_marker("nightly")
    wanted = [size in sizes_of(item) if size else not sizes_of(item) for item in items]
    if not all(wanted):
        config.hook.pytest_deselected(items=[item for item, keep in zip(items, wanted) if not keep])
        items[:] = [item for item, keep in zip(items, wanted) if keep]
    config.stash[NIGHTLY] = sum(item.get_closest_marker("nightly") is not None for item in items)


def pytest_collection_finish() -> None:
    """Exclude imported and collected objects from garbage collection, which would take a tenth of a run."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


def _check_marks(items: list[pytest.Item]) -> None:
    """Check that the file of each marked test contains its marks as text, by which the runner chooses files."""
    named: dict[Path, set[int]] = {}
    for item in items:
        if item.path not in named:
            named[item.path] = sizes_in(item.path.read_text(encoding="utf-8"))
        if not named[item.path].issuperset(sizes_of(item)):
            raise pytest.UsageError(f"{item.nodeid}: expected its marks for MPI in the text of its file, got none")


class SerialLimit:
    """Second limit of serial tests, which ends the process if pytest-timeout's signal has no effect."""

    def __init__(self, watchdog: Watchdog) -> None:
        self.watchdog = watchdog

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.watchdog.start(limit_of(item), None)
        try:
            return (yield)
        finally:
            self.watchdog.stop()


class Recorder:
    """Recorder that writes the outcome of each test at once."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.outcome: dict[str, tuple[str, str]] = {}
        self.seconds = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.record.write(collected=len(session.items), nightly=session.config.stash.get(NIGHTLY, 0))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.record.write(end=report.nodeid or "collection", outcome="failed", text=report.longreprtext)
        elif report.skipped:
            self.record.write(end=report.nodeid, outcome="skipped", text=_reason(report))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.seconds = 0.0
        self.record.write(begin=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration
        if report.failed:
            self.outcome[report.nodeid] = ("failed", report.longreprtext)
        elif report.skipped:
            self.outcome.setdefault(report.nodeid, ("skipped", _reason(report)))
        elif report.when == "call":
            self.outcome.setdefault(report.nodeid, ("passed", ""))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcome, text = self.outcome.pop(nodeid, ("failed", "no outcome was reported"))
        self.record.write(end=nodeid, outcome=outcome, text=text, seconds=round(self.seconds, 4))


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)


@pytest.fixture
def comm() -> Any:
    """Return `MPI.COMM_WORLD`, all ranks of the test. Tests of data movement clone it."""
    from mpi4py import MPI  # not at the top, because it initializes MPI

    return MPI.COMM_WORLD


@pytest.fixture
def turn(request: pytest.FixtureRequest) -> int:
    """Return the sum of the places of a test's parameters in their lists: what a case takes of what is taken in turn.

    So the cases that share the other parameters take all of it.
    """
    parameters = getattr(request.node, "callspec", None)
    return sum(parameters.indices.values()) if parameters else 0


@pytest.fixture
def shared(comm: Any, tmp_path: Path) -> Path:
    """Return an empty folder, the same on all ranks."""
    return Path(comm.bcast(str(tmp_path)))


@pytest.fixture
def working(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder `shared`, made the working directory; restore the module search path afterwards."""
    monkeypatch.chdir(shared)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield shared
