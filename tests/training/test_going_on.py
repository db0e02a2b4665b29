"""Tests of runs that go on: after another run, in other batches, between validations; as one that never stopped."""

import pytest
from mpi4py import MPI

from halograd.errors import UserError
from halograd.training import train
from halograd.training.log import read_log
from tests.training.cuts import CUTS, Stop, logged_losses, logged_rates, overrides_of
from tests.training.runs import write_config

FROM = ["optimizer={kind='adam'}", "schedule={kind='constant', learning_rate=0.01}", "data.shuffle=false"]


def steps(folder):
    return [(entry["epoch"], entry["step"]) for entry in read_log(folder / "log.jsonl", "step")]


@pytest.mark.ranks(1, 2, 4)
def test_a_run_goes_on_as_the_other_one_would(comm, config):
    """The order of samples is the same in every epoch, so the first epoch of the new run is the next one of the old."""
    cuts = [overrides_of(cut) for cut in CUTS[comm.size]]
    train("run.toml", [*FROM, *cuts[0], "training.epochs=2", "output.directory=old"], comm=comm)
    for number, cut in enumerate(cuts):
        new = [*FROM, *cut, "training.init_from=old", "training.epochs=1", f"output.directory=new{number}"]
        assert train("run.toml", new, comm=comm, callbacks=[Stop(8)])["stopped"]
        comm.barrier()
        train("run.toml", new, True, comm=comm)
        comm.barrier()
    train("run.toml", [*FROM, *cuts[-1], "training.epochs=3", "output.directory=old"], True, comm=comm)
    comm.barrier()
    old = config.parent / "old"
    for new in (config.parent / f"new{number}" for number in range(len(cuts))):
        assert [step for _, step in steps(new)] == [step for _, step in steps(old)[6:]]
        assert logged_losses(new) == pytest.approx(logged_losses(old)[6:], rel=1e-9)


@pytest.mark.ranks(1, 2)
def test_other_runs_to_begin_from_are_refused(comm, config):
    with pytest.raises(UserError, match=r"init_from: .*a run.*, got no"):
        train("run.toml", ["training.init_from=nothing", "output.directory=out"], comm=comm)
    train("run.toml", ["training.epochs=1", "output.directory=old"], comm=comm)
    comm.barrier()
    with pytest.raises(UserError, match=r"expected the optimizer SGD .*, got AdamW"):
        train("run.toml", ["optimizer={kind='sgd'}", "training.init_from=old", "output.directory=out2"], comm=comm)
    with pytest.raises(UserError, match=r"init_from: .*one source .*, got init"):
        train("run.toml", ["training.init_from=old", "training.init=a.safetensors"], comm=comm)


@pytest.mark.ranks(1)
def test_the_first_and_the_last_step_are_logged(comm, config):
    train(config, ["training.epochs=1", "output.directory=old"], comm=comm)
    train(config, ["training.init_from=old", "training.epochs=2", "output.log_steps=50"], comm=comm)
    assert [step for _, step in steps(config.parent / "out")] == [4, 9]


def in_smaller_batches(out, sets, comm):
    """Train in batches of 4, in the second epoch after a signal in batches of 2. Collective over `comm`."""
    sets = ["training.epochs=2", "schedule={kind='linear', learning_rate=0.01}", *sets, f"output.directory={out}"]
    assert train("run.toml", sets, comm=comm, callbacks=[Stop(4)])["stopped"]
    comm.barrier()
    return train("run.toml", [*sets, "training.batch=2"], True, comm=comm)


@pytest.mark.ranks(1, 2, 4)
def test_with_smaller_batches(comm, config):
    """13 samples: an epoch of 3 steps of 4, then 1 or 2 of 4 and the rest of 2; the rate is that of the samples."""
    for number, cut in enumerate(CUTS[comm.size]):
        result = in_smaller_batches(f"cut{number}", overrides_of(cut), comm)
        comm.barrier()
        folder = config.parent / f"cut{number}"
        epochs, rates = [epoch for epoch, _ in steps(folder)], logged_rates(folder)
        stopped = max(n for n in (4, 5) if n <= result["steps"] and (len(epochs) - n) * 2 + (n - 3) * 4 == 12)
        assert epochs.count(0) == 3 and result["steps"] == len(epochs) and result["validation"]
        assert rates[:stopped] == pytest.approx([0.01 * (1 - s / 6) for s in range(stopped)])
        begin = 6 + 2 * (stopped - 3)  # in steps of 2 samples
        assert rates[stopped:] == pytest.approx([0.01 * (1 - s / 12) for s in range(begin, 12)])
        comm.barrier()
    if comm.rank == 0 and comm.size > 1:
        in_smaller_batches("alone", [], MPI.COMM_SELF)
        assert logged_losses(folder)[:4] == pytest.approx(logged_losses(config.parent / "alone")[:4], rel=1e-9)


#: Six steps per epoch.
EVERY = [
    *("training.validate_every=4", "training.batch=2", "training.epochs=4", "training.patience=3"),
    *("schedule={kind='plateau', learning_rate=0.3, factor=0.5, patience=1}", "output.checkpoint_epochs=0"),
]


def entries(folder):
    kinds = ("step", "validation", "early_stop", "checkpoint")
    fields = ("event", "step", "epoch", "loss", "learning_rate", "best")
    found = [entry for entry in read_log(folder / "log.jsonl") if entry["event"] in kinds]
    return [{key: entry.get(key) for key in fields} for entry in found]


@pytest.mark.ranks(2)
def test_between_epochs_and_resumed(comm, config):
    """Interrupted before, during or long after a validation, a run goes on the same, to the same best and last one."""
    cut = [f"strategy.height={comm.size}"]
    whole = train(config, [*EVERY, *cut, "output.directory=whole"], comm=comm)
    for signalled, stopped in ((3, 4), (8, 8), (9, 10)):
        callbacks = [Stop(signalled, here=comm.rank == comm.size - 1)]
        result = train(config, [*EVERY, *cut], signalled > 3, comm=comm, callbacks=callbacks)
        assert result["stopped"] is not None and result["steps"] == stopped
    again = train(config, [*EVERY, *cut], True, comm=comm)
    assert again["best"] == whole["best"] and again["steps"] == whole["steps"] and again["validation"]
    if comm.rank == 0:
        want, got = (entries(config.parent / name) for name in ("whole", "out"))
        validated = [one for one in want if one["event"] == "validation"]
        steps = [one["step"] for one in validated]
        assert steps == [4, 8, 12, 16, 20, 24][: len(steps)] and [one["epoch"] for one in validated[:3]] == [0, 1, 1]
        assert [one for one in got if one["event"] != "checkpoint"] == [x for x in want if x["event"] != "checkpoint"]
        assert len({one["learning_rate"] for one in want if one["event"] == "step"}) > 1
        losses = {one["step"]: one["loss"] for one in validated}
        assert whole["best"]["step"] == min(losses, key=losses.get)
        better = [one["step"] for one in want if one["event"] == "checkpoint" and one["best"]]
        assert better[-1] == whole["best"]["step"] and better[0] == 4


def test_the_last_update_is_validated(working):
    config = write_config(working)
    train(config, ["training.validate_every=4", "training.epochs=2", "output.checkpoint_epochs=0"])
    assert [one["step"] for one in read_log(working / "out/log.jsonl", "validation")] == [4, 6]
    assert [one["step"] for one in read_log(working / "out/log.jsonl", "checkpoint")] == [6]
