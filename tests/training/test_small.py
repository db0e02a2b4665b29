"""Runs whose small layers have cuts of their own: the results of one process, the log, and the plan."""

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.cli.explaining import Explainer, _plan_request
from halograd.comm import Communicator
from halograd.layers import Strategy
from halograd.perfmodel.plans import Plan
from halograd.perfmodel.small import suit_small_layers
from halograd.training import train
from halograd.training.log import read_log
from tests.perfmodel.test_small import classifier
from tests.training.runs import write_own
from tests.training.steps import BATCH, descend

NETWORK = """
from halograd.layers import BatchNorm, Conv, Dense, GlobalAveragePool, Input, Network, SoftmaxCrossEntropy

def build():
    y = Input((16, 16, 3), name="x")
    for i, width in enumerate((8, 64, 256, 256)):
        y = Conv(width, 3, 1 if i > 1 else 2, padding=1, bias=False, name=f"conv{i}")(y)
        y = BatchNorm(activation="relu", name=f"bn{i}")(y)
    y = Dense(10, name="dense")(GlobalAveragePool(name="pool")(y))
    loss = SoftmaxCrossEntropy(name="ce")(y, Input((1,), name="target", dtype="int32"))
    return Network({"prediction": y, "loss": loss})
"""
DATA = """[data]
path = "data.h5"
inputs = "x"
targets = "label"
"""


def write(folder):
    draw = np.random.default_rng(3)
    with h5py.File(folder / "data.h5", "w") as file:
        file.create_dataset("x", data=draw.standard_normal((6, 16, 16, 3), np.float32)).attrs["layout"] = "NHWC"
        file["label"] = draw.integers(0, 10, 6).astype(np.int32)
    write_own(folder, NETWORK, DATA)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("turn", [0, 1])
def test_results_are_those_of_one_process(turn):
    with Communicator(MPI.COMM_WORLD) as comm, Communicator(MPI.COMM_SELF) as alone:
        network, ranks = classifier(), comm.size
        cuts = [{"height": ranks}, {"sample": 2, "height": 2} if ranks == 4 else {"width": ranks}]
        found = suit_small_layers(network, Strategy(cuts[turn]), BATCH, ranks)
        losses, want, _ = descend(classifier(), alone, Strategy(), steps=2)
        ours, params, places = descend(network, comm, found.strategy, steps=2)
        with comm.agreement():
            assert found.layers
            np.testing.assert_allclose(ours, losses, rtol=1e-9)
            for key, array in params.items():
                np.testing.assert_allclose(array, want[key][places[key]], rtol=0, atol=1e-9, err_msg=key)


@pytest.mark.ranks(2)
def test_a_run(config, shared):
    found = {}
    for small in ("auto", "keep"):
        changes = ["training.epochs=1", "strategy.height=2", f"strategy.small={small}"]
        found[small] = train(config, [*changes, f"output.directory={shared / small}"], comm=MPI.COMM_WORLD)
    assert found["auto"]["loss"] == pytest.approx(found["keep"]["loss"], rel=1e-9)
    begin = {small: read_log(shared / small / "log.jsonl", "begin")[0] for small in found}
    assert begin["keep"]["small_layers"] == {} and not (shared / "keep" / "small.json").exists()
    layers = begin["auto"]["small_layers"]
    assert layers["conv3"] in ("2 channel", "2 input_channel") and "conv0" not in layers
    plan = Plan.load(shared / "auto" / "small.json")
    assert {name for name, own in plan.strategy.layers.items() if own} == set(layers)
    if MPI.COMM_WORLD.rank == 0:
        explainer = Explainer(plan, _plan_request(plan, shared / "auto" / "small.json", None))
        assert explainer.chosen.step_seconds == pytest.approx(plan.step_seconds, rel=0.02)
        assert any(line.startswith("conv3") for line in explainer.text(["conv3"], False))
