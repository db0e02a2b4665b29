"""Tests of runs on data with NaN: rejected, skipped or filled, under every cut as in one process."""

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd import Callback
from halograd.data import DataError, split
from halograd.errors import UserError
from halograd.training import apply, evaluate, train
from halograd.training.log import read_log
from tests.training.cuts import CUTS, overrides_of
from tests.training.runs import SAMPLES, write_config

#: Samples, and where; one is the first, which is read before the run.
HOLES = {0: (0, 0, 1), 8: (15, 2, 0), 11: (7, 7, 2)}


def write(folder):
    write_config(folder)
    with h5py.File(folder / "data.h5", "a") as file:
        for number, (sample, at) in enumerate(HOLES.items()):
            file["inputs"][(sample, *at)] = (np.nan, np.inf, -np.inf)[number]


@pytest.mark.mpi
@pytest.mark.parametrize("invalid", ["skip", "fill"])
def test_as_in_one_process(comm, config, invalid, caplog):
    sets = [f'data.invalid="{invalid}"', "training.epochs=2"]

    def run(out, cut, comm):
        more = [*overrides_of(cut), f"output.directory={config.parent / out}"]
        train(config, [*sets, "training.epochs=1", *more], comm=comm)
        train(config, [*sets, *more], resume=True, comm=comm)
        return evaluate(config, [*sets, *more], "all", config.parent / f"{out}.h5", comm)

    found = [run(f"cut{number}", cut, comm) for number, cut in enumerate(CUTS[comm.size])]
    if comm.rank:
        return
    want = run("alone", {}, MPI.COMM_SELF)
    for one in found:
        assert one["loss"] == pytest.approx(want["loss"], rel=1e-9)
    (begin, _) = read_log(config.parent / "alone/log.jsonl", "begin")
    kept = SAMPLES - (len(HOLES) if invalid == "skip" else 0)
    assert begin["invalid"] == len(HOLES) and begin["samples"] + begin["held_out"] == kept
    with h5py.File(config.parent / "alone.h5") as file:
        assert set(file["sample"]) == set(range(SAMPLES)) - (set(HOLES) if invalid == "skip" else set())
        assert np.isfinite(file["prediction"][()]).all()
    said = [record.getMessage() for record in caplog.records if "data.invalid" in record.getMessage()]
    assert said and "data.h5, sample 0: nan in channel 1" in said[0] and f"{len(HOLES)} of {SAMPLES} samples" in said[0]


@pytest.mark.ranks(1)
def test_others(comm, config):
    """NaN is an error by default; predictions for data with gaps work; targets are never filled."""
    with pytest.raises(DataError, match="expected finite numbers: repair"):
        train(config, comm=comm)
    sets, skip = ['data.invalid="fill"', "training.epochs=1"], ['data.invalid="skip"', "training.epochs=1"]
    train(config, [*sets, f"output.directory={config.parent / 'filled'}"], comm=comm)
    data, target = [str(config.parent / "data.h5")], config.parent / "filled"
    apply(target, data, config.parent / "p.h5", sets, comm=comm)
    with h5py.File(config.parent / "p.h5") as file:
        assert np.isfinite(file["prediction"][()]).all()
    with pytest.raises(DataError, match="expected finite numbers"):
        apply(target, data, config.parent / "q.h5", skip, comm=comm)
    with h5py.File(config.parent / "data.h5", "a") as file:
        file["mask"][0, 3, 3] = 7
    with pytest.raises(DataError, match="target 7 in sample 0"):
        train(config, sets, comm=comm)
    found = train(config, skip, comm=comm)
    assert np.isfinite(found["loss"])
    with h5py.File(config.parent / "data.h5", "a") as file:
        for sample in split(SAMPLES, 0.3, seed=7)[0]:
            file["inputs"][sample] = np.nan
    assert np.isfinite(evaluate(target, ['data.invalid="skip"'], comm=comm)["loss"]), "no training sample is left"
    with pytest.raises(UserError, match=r"data\.invalid: .*'skip', 'fill' or 'mask'"):
        train(config, ['data.invalid="mend"'], comm=comm)


@pytest.mark.ranks(1, 2)
def test_callbacks_get_no_samples_that_are_left_out(comm, config):
    shown = Callback()
    shown.samples = (1, 8)
    with pytest.raises(UserError, match=r'callbacks: .*"skip".* 8'):
        train(config, ['data.invalid="skip"'], comm=comm, callbacks=[shown])
