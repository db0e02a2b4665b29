"""Tests of the predictions that callbacks get: those of `apply`, whole on rank 0, under every cut."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

import halograd as hg
from halograd.errors import UserError
from tests.training.runs import OPTIONS, unet, write_data

CUTS = {1: {}, 2: {"height": 2}, 4: {"sample": 2, "width": 2}}


class Shown(hg.Callback):
    def __init__(self, samples=(17, 0, 3, 5, 6), every=2):
        self.samples, self.every, self.found = samples, every, {}

    def on_predictions(self, epoch, found):
        assert found.samples == tuple(self.samples)
        self.found[epoch] = found


@pytest.mark.ranks(1, 2, 4)
def test_they_are_those_of_apply_and_change_nothing(comm, shared):
    if comm.rank == 0:
        write_data(shared / "data.h5")
    comm.barrier()
    some = OPTIONS | {"comm": comm, "strategy": CUTS[comm.size], "average": 0.5}
    shown, data = [Shown(), Shown((1,), 3), hg.Callback()], str(shared / "data.h5")
    run = hg.fit(unet(), data, shared / "out", callbacks=shown, **some)
    plain = hg.fit(unet(), data, shared / "plain", **some)
    run.apply(data, shared / "p.h5")
    assert run.losses == plain.losses and run.history["loss"] == plain.history["loss"]
    assert list(shown[0].found) == [1, 2] and list(shown[1].found) == [2], "every second epoch and the last one"
    found = shown[0].found[2]
    comm.barrier()
    if comm.rank:
        assert not found.outputs and not found.inputs
        return
    with h5py.File(shared / "p.h5") as predicted, h5py.File(data) as file:
        at = list(found.samples)
        np.testing.assert_allclose(found.outputs["prediction"], predicted["prediction"][()][at], rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(found.inputs["target"][..., 0], file["mask"][()][at])
        assert set(found.outputs) == {"prediction"} and set(found.inputs) == {"x", "target"}
        known, x = run.normalization()["x"], file["inputs"][()][at].astype(float)
        np.testing.assert_allclose(found.inputs["x"], (x - known.mean) / known.std, rtol=1e-6, atol=1e-6)
    assert not np.allclose(found.outputs["prediction"], shown[0].found[1].outputs["prediction"])


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("samples", "every"), [([0, 19], 1), ([-1], 1), ([1], 0)])
def test_other_samples_are_refused(comm, shared, samples, every):
    if comm.rank == 0:
        write_data(shared / "data.h5")
    comm.barrier()
    with pytest.raises(UserError, match=r"callbacks: .* 0 to 18 and every >= 1"):
        hg.fit(unet(), str(shared / "data.h5"), shared / "out", comm=comm, callbacks=[Shown(samples, every)], **OPTIONS)


@pytest.mark.ranks(2)
def test_ranks_that_differ(comm, shared):
    """Other samples, or samples on some ranks only, are an error on all ranks; a local callback is not."""
    if comm.rank == 0:
        write_data(shared / "data.h5")
    comm.barrier()
    data, some = str(shared / "data.h5"), OPTIONS | {"comm": comm, "epochs": 1}
    for number, callbacks in enumerate(([Shown((comm.rank,))], [Shown((1,))][comm.rank :])):
        with pytest.raises(UserError, match=r"callbacks: .*on all ranks, got .* and"):
            hg.fit(unet(), data, shared / f"out{number}", callbacks=callbacks, **some)
    assert hg.fit(unet(), data, shared / "out", callbacks=[hg.Callback()][comm.rank :], **some).losses
