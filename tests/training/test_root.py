"""Tests that only rank 0 opens shared files, and that all ranks get its results and errors."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.comm.errors import is_agreed
from halograd.data import formats
from halograd.data.disk import DataError
from halograd.errors import UserError
from halograd.layers.strategy import Strategy
from halograd.training.root import on_root, read_config
from halograd.training.run import train
from halograd.training.session import Session

_opened: list[str] | None = None


def _listen(event: str, arguments: tuple) -> None:
    if _opened is not None and event == "open" and isinstance(arguments[0], (str, bytes, Path)):
        _opened.append(Path(str(arguments[0])).name)


@pytest.fixture(scope="module")
def hook():
    sys.addaudithook(_listen)  # stays, and does nothing when nobody listens


@pytest.fixture
def opened(hook):
    """Return the list to which the names of files that Python opens on this rank are added."""
    global _opened
    _opened = []
    yield _opened
    _opened = None


@pytest.mark.mpi
def test_all_ranks_have_what_rank_0_has_found(comm):
    calls: list[int] = []

    def call():
        calls.append(1)
        return {"answer": 42}

    assert on_root(comm, call) == {"answer": 42}
    assert len(calls) == (comm.rank == 0)


@pytest.mark.mpi
@pytest.mark.parametrize("kind", [UserError, DataError])
def test_mistakes_are_raised_on_all_ranks_alike(comm, kind):
    def call():
        raise kind("expected a moon, got none")

    with pytest.raises(kind, match=r"^expected a moon, got none$") as caught:
        on_root(comm, call)
    assert comm.size == 1 or (caught.value.agreed and caught.value.arose_here == (comm.rank == 0))


@pytest.mark.mpi(min_size=2)
def test_a_fault_is_raised_on_all_ranks(comm):
    with pytest.raises(ZeroDivisionError, match=r"^division by zero$") as caught:
        on_root(comm, lambda: 1 / 0)
    assert is_agreed(caught.value, comm.size) and caught.value.arose_here == (comm.rank == 0)


class Local:
    """Object that can be unpickled on rank 0 only."""

    def __reduce__(self):
        return _made, ()


def _made():
    if MPI.COMM_WORLD.rank:
        raise UserError("expected a moon, got none")
    return Local()


@pytest.mark.mpi(min_size=2)
def test_a_result_that_a_rank_cannot_take(comm):
    with pytest.raises(UserError, match=r"^rank 1( \(and \d+ more\))?: .*got none$") as caught:
        on_root(comm, Local)
    assert is_agreed(caught.value, comm.size)


OWN = {
    "optimizer": ["optimizer={kind = 'own.py:Own'}", "from tests.training.own_optimizer import RMSprop as Own"],
    "model": ["model={file = 'own.py:build'}", "def build(): pass"],
    "data": ["data.file='own.py:read'", "def read(): pass"],
    "transport": ["backend.transport='own.py:Own'", "from halograd.comm.transport import Mpi as Own"],
    "metric": ["output.metrics=['own.py:Own']", "Own = None"],
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("there", ["none", "another one"])
@pytest.mark.parametrize("own", OWN)
def test_a_file_of_the_user_that_differs_on_one_rank(comm, config, tmp_path, monkeypatch, own, there):
    """A user's file that is missing or different on one rank is one error on all ranks, before the run begins."""
    setting, text = OWN[own]
    if comm.rank == 1:  # as on the local disk of another node
        monkeypatch.chdir(tmp_path)
    if comm.rank == 0 or (comm.rank == 1 and there != "none"):
        Path("own.py").write_text(f"{text}\n" if comm.rank == 0 else f"{text}  # older\n")
    comm.Barrier()
    message = rf"^rank 1: own\.py: expected the same file on all ranks, got {there} in .*file system that all nodes"
    with pytest.raises(UserError, match=message) as caught:
        train(config, [setting], comm=comm)
    assert is_agreed(caught.value, comm.size)
    comm.Barrier()
    assert not (config.parent / "out").exists()


@pytest.mark.mpi
def test_configuration_plan_and_structure_are_read_once(comm, config, opened, monkeypatch):
    folder = config.parent
    if comm.rank == 0:
        Strategy({"height": comm.size}).save(folder / "cut.json")
    comm.Barrier()
    opened.clear()
    files: list[Path] = []
    open_stored = formats.open_stored
    monkeypatch.setattr("halograd.data.dataset.open_stored", lambda *some: files.append(some[0]) or open_stored(*some))
    sets = [f"strategy={{file = '{folder / 'cut.json'}'}}", "data.normalize=false"]
    config = read_config(comm, folder / "run.toml", sets)
    with Communicator(comm) as ranks, ExitStack() as stack:
        session = Session.open(config, ranks, stack)
        assert session.executor.strategy.parts == {"height": comm.size}
        assert len(session.samples.dataset) == 19
        assert len(files) == (comm.rank == 0)
        list(session.feed(session.in_order(session.samples.training[:4])))
        assert len(files) == 1  # now everyone reads a block
    assert {"run.toml", "cut.json"} & set(opened) == ({"run.toml", "cut.json"} if comm.rank == 0 else set())
