"""Tests of a schedule in a user's file: a function of step and group, under cuts, and resumed."""

import os
import signal

import h5py
import pytest
from mpi4py import MPI

from halograd import Callback
from halograd.training import load_config, train
from halograd.training.build import make_network
from halograd.training.directory import checkpoint_of
from halograd.training.log import read_log
from halograd.training.schedules import make_schedule
from tests.docs.pages import write_files
from tests.training.cuts import CUTS, overrides_of
from tests.training.runs import check_refused, write_config

EPOCH = 3  # steps
OWN = 'schedule={kind="one_cycle.py:OneCycle", learning_rate=0.02, alone_epochs=1.0, factors={"conv1*" = 0.5}}'


def write(folder):
    write_config(folder)
    write_files("extending.md", folder)


class Stop(Callback):
    """Callback that stops a run in the middle of an epoch, with a checkpoint."""

    step = 4

    def on_step(self, step, loss, learning_rate):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGUSR1)


def logged(folder, out):
    entries = read_log(folder / out / "log.jsonl", "step")
    return [entry["loss"] for entry in entries], [entry["learning_rate"] for entry in entries]


@pytest.mark.ranks(1, 2, 4)
def test_under_every_cut_and_resumed(comm, config):
    sets = [OWN, "training.epochs=3"]
    if comm.rank == 0:
        train(config, [*sets, "output.directory=alone"], comm=MPI.COMM_SELF)
    comm.barrier()
    losses, rates = logged(config.parent, "alone")
    schedule = make_schedule(load_config(config, sets).schedule, 3, EPOCH)
    assert rates == [schedule(step) for step in range(3 * EPOCH)] and len({*rates}) == len(rates)
    for number, cut in enumerate(CUTS[comm.size]):
        more = [*sets, *overrides_of(cut), f"output.directory=cut{number}"]
        assert train(config, more, comm=comm, callbacks=[Stop()])["stopped"]
        comm.barrier()
        assert Stop.step <= len(logged(config.parent, f"cut{number}")[0]) <= Stop.step + 1  # ranks agree a step later
        comm.barrier()
        train(config, more, resume=True, comm=comm)
        comm.barrier()
        found = logged(config.parent, f"cut{number}")
        assert found[0] == pytest.approx(losses, rel=1e-9) and found[1] == rates
        comm.barrier()


@pytest.mark.ranks(1)
def test_a_group_has_a_rate_of_its_own(comm, config):
    """Layers of a group whose rate is 0 in the first epoch keep their parameters in it; later all layers change."""
    network, seen = make_network(load_config(config)), []
    group = network.matching("conv1*")
    first = {name: spec.initial(name, 7) for name, spec in network.parameters().items()}
    for epochs in (1, 2):
        train(config, [OWN, f"training.epochs={epochs}"], epochs > 1, comm=comm)
        with h5py.File(checkpoint_of(config.parent / "out/checkpoints/latest.h5")) as file:
            seen.append({name: file[f"params/{name}"][()] for name in first})
    frozen = [name for name in first if name.rpartition("/")[0] in group]
    assert frozen and len(frozen) < len(first)
    for name, initial in first.items():
        assert (seen[0][name] == initial).all() == (name in frozen)
        assert (seen[1][name] != seen[0][name]).any()


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["schedule.rise=2"], "schedule.rise: expected a number < 1, got 2"),
        (["schedule.final=0.1"], "schedule.final: unknown key; expected one of kind, learning_rate, warmup_epochs, "),
        (
            ["schedule.kind=steps"],
            "schedule.kind: expected constant, step, cosine, polynomial, linear, one_cycle, plateau, or "
            '"FILE.py:CLASS", got \'steps\'',
        ),
        (['schedule.kind="one_cycle.py:Cycle"'], "schedule.kind: expected a class 'Cycle' in one_cycle.py, got OneC"),
        (['schedule.kind="none.py:Cycle"'], "schedule.kind: expected a Python file, got 'none.py'"),
    ],
)
def test_what_is_refused_in_one_line(tmp_path, monkeypatch, sets, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    check_refused([OWN, *sets], message)
