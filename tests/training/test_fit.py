"""`hg.fit`: a network made by a script, trained, judged and applied by what the command line runs."""

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.errors import UserError
from halograd.training import evaluate, train
from tests.training.runs import EDGE, OPTIONS, unet, write_config, write_data


class Notes(hg.Callback):
    """What was called."""

    def __init__(self):
        self.steps, self.epochs, self.checkpoints = [], [], []

    def on_step(self, step, loss, learning_rate):
        self.steps.append((step, float(loss), learning_rate))

    def on_epoch(self, epoch, scores):
        self.epochs.append((epoch, dict(scores)))

    def on_checkpoint(self, step, path, best):
        self.checkpoints.append((step, path.name, best))


@pytest.fixture
def folder(comm, shared):
    if comm.rank == 0:
        write_data(shared / "data.h5")
    comm.barrier()
    return shared


@pytest.mark.ranks(1, 2, 4)
def test_as_in_one_process(comm, folder):
    notes, cut = Notes(), {"height": 2, "width": comm.size // 2} if comm.size > 1 else {}
    data = {"path": str(folder / "data.h5"), "validation": 0.3}
    run = hg.fit(unet(), data, folder / "out", comm=comm, strategy=cut, callbacks=[notes], **OPTIONS)
    assert [step for step, *_ in notes.steps] == list(range(1, 10))
    assert notes.epochs[-1][1] == run.result["validation"] and [e for e, _ in notes.epochs] == [0, 1, 2]
    assert [(step, name) for step, name, _ in notes.checkpoints] == [(n, f"step-{n:08d}.h5") for n in (3, 6, 9)]
    assert run.history["step"] == [3, 6, 9] and run.history["loss"][-1] == run.result["validation"]["loss"]
    assert run.losses == pytest.approx({step: loss for step, loss, _ in notes.steps})
    assert run.best["value"] == min(run.history["loss"])
    best = next(step for step, _, best in reversed(notes.checkpoints) if best)
    assert run.best["step"] == best and run.checkpoint("best").resolve().name == f"step-{best:08d}.h5"
    assert run.evaluate()["loss"] == pytest.approx(run.history["loss"][-1], rel=1e-12)
    run.apply(str(folder / "data.h5"), folder / "p.h5", which="best")
    comm.barrier()
    if comm.rank == 0:
        alone = hg.fit(unet(), data, folder / "alone", comm=MPI.COMM_SELF, **OPTIONS)
        assert alone.losses == pytest.approx(run.losses, rel=1e-9)
        alone.apply([folder / "data.h5"], folder / "q.h5", which="best")
        with h5py.File(folder / "p.h5") as mine, h5py.File(folder / "q.h5") as theirs:
            np.testing.assert_allclose(mine["prediction"][()], theirs["prediction"][()], rtol=1e-8, atol=1e-10)


@pytest.mark.ranks(1, 2)
def test_goes_on_and_remembers_its_network(comm, folder):
    data = str(folder / "data.h5")
    some = {**OPTIONS, "schedule": {"kind": "constant", "learning_rate": 0.01}, "comm": comm}
    whole = hg.fit(unet(), data, folder / "whole", **some)
    hg.fit(unet(), data, folder / "out", **{**some, "epochs": 1})
    run = hg.fit(unet(), data, folder / "out", resume=True, **some)
    assert run.losses == pytest.approx(whole.losses, rel=1e-12)
    other = hg.fit(unet(6), data, folder / "other", **some)  # of the same name
    assert whole.evaluate()["loss"] == pytest.approx(whole.history["loss"][-1], rel=1e-12)
    assert other.evaluate()["loss"] == pytest.approx(other.history["loss"][-1], rel=1e-12)
    with pytest.raises(UserError, match="of another network"):
        hg.fit(unet(6), data, folder / "out", resume=True, **some)
    with pytest.raises(UserError, match="expected one without checkpoints"):
        hg.fit(unet(), data, folder / "out", **some)


@pytest.mark.ranks(1)
def test_a_model_by_its_name(comm, folder):
    """The same as by a configuration."""
    write_config(folder)
    options = {"resolution": EDGE, "channels": 3, "widths": [4, 6], "convs": 1, "decoder": True, "pos_weight": 2.0}
    schedule = {"kind": "cosine", "learning_rate": 0.01, "warmup_epochs": 1}
    data = {"path": str(folder / "data.h5"), "validation": 0.3}
    some = {**OPTIONS, "schedule": schedule, "strategy": {"bucket_bytes": 512}}
    run = hg.fit("mesh", data, folder / "fit", model=options, comm=comm, **some)
    assert run.result["loss"] == train(folder / "run.toml", comm=comm)["loss"]


@pytest.mark.ranks(1)
def test_refusals(comm, folder, monkeypatch):
    data = str(folder / "data.h5")
    with pytest.raises(UserError, match=r"fit\(\): training\.batch: expected a whole number"):
        hg.fit(unet(), data, folder / "out", epochs=1, batch=0, comm=comm)
    with pytest.raises(UserError, match=r"fit\(\): optimiser: unknown key"):
        hg.fit(unet(), data, folder / "out", epochs=1, batch=2, comm=comm, optimiser={"kind": "sgd"})
    with pytest.raises(UserError, match=r"fit\(\): epoch: unknown key; .*epochs, batch, .*validation, .*mean epochs"):
        hg.fit(unet(), data, folder / "out", epoch=1, batch=2, comm=comm)
    wrong = {"an object of Notes": Notes(), "the class Notes in it": [Notes], "an object of int in it": [Notes(), 3]}
    for found, callbacks in wrong.items():
        with pytest.raises(
            UserError, match=f"callbacks: expected a list of objects of halograd.Callback, got {found}$"
        ):
            hg.fit(unet(), data, folder / "out", comm=comm, callbacks=callbacks, **OPTIONS)
    run = hg.fit(unet(), data, folder / "out", comm=comm, **OPTIONS)
    with pytest.raises(ValueError, match="checkpoint: expected 'latest' or 'best', which there is, got 'newest'"):
        run.checkpoint("newest")
    monkeypatch.setattr("halograd.models.own._MADE", {})  # as in another process
    with pytest.raises(UserError, match=r"model\.file: 'mine' was made by a script, not by a function in a file"):
        evaluate(folder / "out", comm=comm)
