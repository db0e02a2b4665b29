"""Tests of a user's network and layer in whole runs: every cut, resumption, evaluation, and changed files."""

import json

import pytest
from mpi4py import MPI

from halograd.errors import UserError
from halograd.training import evaluate, samples, train
from halograd.training.checkpoint import read_header
from tests.training.runs import EDGE, write_own

NET = """
import numpy as np
import halograd as hg

class Doubled(hg.Layer):
    def __init__(self, name):
        super().__init__(name)
        self.calls, self._boxes = 0, set()

    def forward(self, inputs, params, box):
        self.calls += 1
        self._boxes.add(str(box))
        return 2 * inputs[0]

    def backward(self, dy, inputs, params, box):
        return (2 * dy,), {{}}

def build(width=4):
    x = hg.Input(({edge}, {edge}, 3), name="x")
    y = hg.Conv(width, 3, padding=1, activation="relu", name="conv")(x)
    gate = hg.Sigmoid()(hg.Dense(width, name="gate")(hg.GlobalAveragePool()(y)))
    logits = hg.Conv(1, 3, padding=1, name="head")(Doubled(name="own")(y * gate))
    target = hg.Input(logits.shape, name="target")
    loss = hg.BinaryCrossEntropyWithLogits(name="bce")(logits, target) + {weight} * hg.Dice()(logits, target)
    return hg.Network({{"prediction": logits, "loss": loss}}, name="mine")
"""


def network(weight=0.5, more=""):
    return NET.format(edge=EDGE, weight=weight) + more


def write(folder):
    write_own(folder, network(), settings="width = 6\n")


def trained(config, comm, out):
    """Train, resume and evaluate a run; return the loss. Collective."""
    for epochs in (1, 2):
        train(config, [f"training.epochs={epochs}", f"output.directory={out}"], epochs > 1, comm=comm)
    return evaluate(config, overrides=[f"output.directory={out}"], comm=comm)["loss"]


@pytest.mark.mpi
def test_trains_and_resumes_as_one_process_does(comm, config):
    """A run whose layer stores results in itself, also resumed, has the losses of one process."""
    found = trained(config, comm, "together")
    if comm.rank == 0:
        assert found == pytest.approx(trained(config, MPI.COMM_SELF, "alone"), rel=1e-10)
        progress, text = read_header(config.parent / "together/checkpoints/latest.h5")
        assert progress.source.startswith("net.py:build ")
        assert json.loads(text)["model"] == {"file": "net.py:build", "width": 6}


@pytest.mark.ranks(1, 2)
def test_a_changed_network_is_refused_by_what_differs(comm, config, caplog):
    train(config, ["training.epochs=1"], comm=comm)
    comm.barrier()
    if comm.rank == 0:
        (config.parent / "net.py").write_text(network(weight=0.25))
    comm.barrier()
    with pytest.raises(UserError, match=r"'bce: terms\[1\].*weight 0\.25', got '.*weight 0\.5'"):
        train(config, resume=True, comm=comm)
    comm.barrier()
    if comm.rank == 0:
        (config.parent / "net.py").write_text(network(more="\n# a remark\n"))
    comm.barrier()
    train(config, resume=True, comm=comm)
    said = [r.getMessage() for r in caplog.records if "model.file" in r.getMessage()]
    assert len(said) == (comm.rank == 0), said


@pytest.mark.parametrize("through", ["", "hg.Pad(-1)"])
def test_targets_of_no_known_range_are_looked_at_in_several_samples(working, monkeypatch, through):
    """The scale of targets with unknown range is found in several samples, also if a layer reads the targets first."""
    net = f"""
import halograd as hg

def build():
    x, t = hg.Input(({EDGE}, {EDGE}, 3), "x"), hg.Input(({EDGE}, {EDGE}, 1), "target")
    y = hg.Conv(1, 3, padding={0 if through else 1})(x)
    return hg.Network({{"prediction": y, "loss": hg.Dice()(y, {through}(t))}})
"""
    looks = []
    monkeypatch.setattr(samples, "look_at_data", lambda *given: looks.append(given[3]) or 1.0)
    train(write_own(working, net), ["training.epochs=1"], comm=MPI.COMM_SELF)
    assert looks == [samples.LOOKS if through else 1]


@pytest.mark.ranks(2)
def test_a_fault_of_one_rank_is_raised_on_all(comm, config):
    """An error that only some ranks have in a user's file, such as a missing file, is raised on all ranks."""
    if comm.rank == 0:
        (config.parent / "net.py").write_text(
            network(more="\nfrom mpi4py import MPI\nif MPI.COMM_WORLD.rank:\n    open('not-here')\n")
        )
    comm.barrier()
    with pytest.raises(UserError, match=r"net.py .*FileNotFoundError: .*not-here"):
        train(config, comm=comm)
