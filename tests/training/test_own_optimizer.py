"""Tests of an optimizer in a user's file: cuts and schemes, resumption, memory and plans as for the library's."""

from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.planning import training_of
from halograd.training import Executor, load_config, train
from halograd.training.build import make_network, make_optimizer, state_slots
from halograd.training.directory import checkpoint_of
from halograd.training.log import read_log
from tests.docs.pages import write_files
from tests.training import own_optimizer
from tests.training.cuts import CUTS, overrides_of
from tests.training.runs import check_refused, write_config

EPOCH = 3  # steps
OWN = 'optimizer={kind="rms.py:RMSprop", decay=0.9, weight_decay=0.01}'
SETS = [OWN, "training.epochs=2", 'schedule.kind="constant"']


def write(folder):
    write_config(folder)
    write_files("extending.md", folder)
    (folder / "own.py").write_text(Path(own_optimizer.__file__).read_text())


def losses(folder, out):
    return {entry["step"]: entry["loss"] for entry in read_log(folder / out / "log.jsonl", "step")}


def state(folder, out):
    with h5py.File(checkpoint_of(folder / out / "checkpoints" / "latest.h5")) as file:
        arrays = {}
        file["optimizer/mean_square"].visititems(
            lambda name, found: arrays.update({name: found[()]}) if isinstance(found, h5py.Dataset) else None
        )
        return arrays


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("scheme", ["bucketed", "sharded"])
def test_under_every_cut_and_resumed(comm, config, scheme):
    folder = config.parent
    if comm.rank == 0:
        train(config, [*SETS, "output.directory=alone"], comm=MPI.COMM_SELF)
    comm.barrier()
    want, arrays = losses(folder, "alone"), state(folder, "alone")
    assert len(set(want.values())) == len(want) == 2 * EPOCH and all(array.any() for array in arrays.values())
    for number, cut in enumerate(CUTS[comm.size]):
        sets = [*SETS, *overrides_of(cut), f'reduction.name="{scheme}"', f"output.directory=cut{number}"]
        train(config, [*sets, "training.epochs=1"], comm=comm)
        comm.barrier()
        if comm.rank == 0:
            assert losses(folder, f"cut{number}") == pytest.approx({k: want[k] for k in range(1, EPOCH + 1)}, rel=1e-9)
        comm.barrier()
        train(config, sets, resume=True, comm=comm)
        comm.barrier()
        if comm.rank == 0:
            assert losses(folder, f"cut{number}") == pytest.approx(want, rel=1e-9)
            found = state(folder, f"cut{number}")
            assert found.keys() == arrays.keys()
            for name, array in found.items():
                np.testing.assert_allclose(array, arrays[name], rtol=1e-8, atol=1e-14, err_msg=name)
        comm.barrier()


@pytest.mark.ranks(1)
def test_its_state_is_in_memory_and_price_of_plans(comm, config):
    """Plans count the state arrays of a user's optimizer in memory and time, as a run allocates them."""
    sets = [OWN, "training.average=0.5"]
    assert state_slots(load_config(config, sets)) == 2
    assert [training_of("float32", name).slots for name in ("rms.py:RMSprop", "sgd", "adam")] == [1, 1, 2]
    with Communicator(comm) as ranks:
        network = make_network(load_config(config))
        with Executor(network, ranks, get_backend("numpy"), 2, hg.Strategy(), "float64") as executor:
            make_optimizer(load_config(config, sets), executor.store)
            used = executor.memory.bytes
            assert used["optimizer state"] == 2 * used["parameter gradient"]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["optimizer.beta=1"], "optimizer.beta: unknown key; expected one of kind, decay, epsilon, weight_decay"),
        (["optimizer.decay=2"], "optimizer.decay: expected a number < 1, got 2"),
        (['optimizer.kind="rms.py:Lion"'], "optimizer.kind: expected a class 'Lion' in rms.py, got RMSprop"),
        (['optimizer.kind="none.py:Lion"'], "optimizer.kind: expected a Python file, got 'none.py'"),
        (['optimizer.kind="json:JSONDecoder"'], "json:JSONDecoder: expected a class derived from Optimizer, got"),
        (["optimizer.kind=3"], "optimizer.kind: expected a text in quotes, got 3"),
        (["optimizer={decay = 0.5}"], "optimizer.kind: expected a value, got nothing; this key is required"),
    ],
)
def test_what_is_refused_in_one_line(tmp_path, monkeypatch, sets, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    check_refused([OWN, *sets], message)


@pytest.mark.ranks(2)
def test_norms_of_whole_parameters_need_whole_parameters(comm, config):
    own = ['optimizer={kind = "own.py:OwnLARS"}', "strategy.height=2"]
    with pytest.raises(UserError, match=r"expected sgd, adam, adamw or lion with .*, got own.py:OwnLARS, which"):
        train(config, [*own, 'reduction.name="sharded"'], comm=comm)
    assert train(config, own, comm=comm)["diverged"] is None
