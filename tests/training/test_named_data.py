"""Tests of networks with several inputs, targets and losses from datasets of any names, under every cut."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from halograd.errors import UserError
from halograd.training import evaluate, train
from halograd.training.checkpoint import read_header
from tests.training.cuts import CUTS, check_scores
from tests.training.runs import EDGE, SAMPLES, write_named

NET = """
import halograd as hg

def build(edge=16):
    fields = hg.Input((edge, edge, 3), name="fields")
    settings = hg.Input((2,), name="settings")
    mask = hg.Input((edge, edge, 1), name="mask", dtype="int32")
    speed = hg.Input((edge // 2, edge // 2, 2), name="speed")
    kind = hg.Input((1,), name="kind", dtype="int32")
    y = hg.Conv(4, 3, padding=1, activation="relu")(fields)
    y = y * hg.Sigmoid()(hg.Dense(4)(settings))
    logits, flow = hg.Conv(3, 1, name="logits")(y), hg.Conv(2, 2, stride=2, name="flow")(y)
    whole = hg.Dense(2, name="whole")(hg.GlobalAveragePool()(y))
    loss = hg.SoftmaxCrossEntropy()(logits, mask) + 0.1 * hg.Huber()(flow, speed)
    loss = loss + 0.5 * hg.SoftmaxCrossEntropy()(whole, kind)
    return hg.Network({"classes": logits, "flow": flow, "kind of": whole, "loss": loss}, name="several")

def itself(edge=16):
    x = hg.Input((edge, edge, 3), name="x")
    y = hg.Conv(3, 3, padding=1)(hg.Conv(2, 3, padding=1, activation="relu")(x))
    return hg.Network({"prediction": y, "loss": hg.MeanSquaredError()(y, x)})
"""
DATA = """
validation = 0.3
normalize = ["fields"]
inputs = {fields = "u", settings = "run/settings"}
targets = {mask = "label", speed = "v", kind = "kind"}
"""


def write(folder: Path) -> None:
    rng = np.random.default_rng(5)
    arrays = {
        "u": 5 + 3 * rng.standard_normal((SAMPLES, EDGE, EDGE, 3)),
        "run/settings": rng.random((SAMPLES, 2)),
        "label": rng.integers(0, 3, (SAMPLES, EDGE, EDGE)),
        "v": rng.random((SAMPLES, 2, EDGE // 2, EDGE // 2)),
        "kind": rng.integers(0, 2, SAMPLES),
    }
    write_named(folder, NET, DATA, arrays, u="NHWC", v="NCHW")


@pytest.mark.mpi
def test_trains_and_judges_as_one_process_does(comm, config):
    """A network with five arrays and three tasks has the results of one process under every cut."""
    want = check_scores(comm, config)
    if comm.rank == 0:
        assert {"accuracy", "iou", "flow mae", "kind of accuracy"} <= set(want)
        for number in range(len(CUTS[comm.size])):
            with h5py.File(f"{number}.h5") as mine, h5py.File("alone.h5") as theirs:
                names = {"prediction", "target", "sample", "source_file", "source_sample", "flow", "kind of"}
                assert set(mine) == names == set(theirs)
                for name in ("prediction", "target", "flow/prediction", "flow/target", "kind of/prediction"):
                    np.testing.assert_allclose(mine[name][()], theirs[name][()], rtol=1e-8, atol=1e-10)
        progress, _ = read_header(Path("alone/checkpoints/latest.h5"))
        assert set(progress.normalization) == {"fields"}


@pytest.mark.ranks(1, 2)
def test_a_network_may_compare_with_what_it_reads(comm, config):
    sets = ['model.file="net.py:itself"', 'data={path="data.h5", inputs="u"}', "training.epochs=2"]
    train(config, sets, comm=comm)
    found = evaluate(config, sets, comm=comm)
    assert found["rmse"] is not None and "mae" in found


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ['data.inputs="u"'],
            "data.inputs: expected a table with fields, settings, as the network reads them, got one",
        ),
        (
            ['data.targets={mask="label"}'],
            "data.targets: expected a dataset for 'speed', which network 'several' reads",
        ),
        (['data.inputs.other="u"'], "data.inputs.other: expected inputs of network 'several' .fields, "),
        (['data.inputs.kind="kind"'], "data.targets: expected 'kind' in one table, got it also in data.inputs"),
        (['data.normalize=["mask"]'], r"data.normalize: expected names of inputs \(fields, settings\), got 'mask'"),
        (['data.inputs.settings="none"'], "data.h5: expected a dataset 'none', got kind "),
        (['data.inputs.settings="v"'], r"expected samples of shape \(2,\) for 'settings' of model 'several', got \(8"),
        (
            ['data.targets.mask="run/settings"'],
            r"data.targets: expected targets of shape \(16, 16, 1\) .*'run/settings'",
        ),
        (['data.targets.kind="label"'], r"data.targets: expected targets of shape \(1,\) "),
        (
            ['model.file="net.py:itself"', 'data={path="data.h5", inputs="u", targets="v"}'],
            "data.targets: expected nothing, got one dataset, 'v'",
        ),
    ],
)
def test_what_does_not_fit_is_named(comm, config, sets, message):
    with pytest.raises((UserError, ValueError), match=message):
        train(config, sets, comm=comm)


@pytest.mark.ranks(1, 2)
def test_a_run_says_which_channels_it_transforms(comm, config, capfd):
    """A run prints the channels that are transformed because of their names, and the rules."""
    if comm.rank == 0:
        with h5py.File("data.h5", "a") as file:
            file["u"].attrs["channel_names"] = ["Density", "speed", "Pressure"]
    comm.barrier()
    for number, (sets, rules) in enumerate(
        (
            ([], 'Density, Pressure by "log"'),
            (['data.transforms={Pressure="none", speed="asinh"}'], 'Density by "log"; speed by "asinh"'),
            (['data.transforms={fields="none"}'], None),
        )
    ):
        more = ["training.epochs=1", "output.progress=true", f"output.directory=run-{number}"]
        train(config, [*sets, *more], comm=comm)
        if comm.rank == 0:
            said = " ".join(capfd.readouterr().err.split())
            line = f"fields: transformed before they are normalized (data.transforms): {rules}"
            assert (line in said) == (rules is not None)
            assert ("(data.transforms)" in said) == (rules is not None)
