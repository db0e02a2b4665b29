"""Tests that rounding residuals of gradients survive a checkpoint, a change of chunks, and another decomposition."""

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy
from halograd.training.checkpoint import Snapshot, read_checkpoint, write_checkpoint
from halograd.training.trainer import Diverged
from tests.training.reductions import BUCKET, build, trainer_of
from tests.training.steps import advance, assert_arrays, copied, fill

pytestmark = pytest.mark.mpi(min_size=2)
ROUNDED = Scheme("bucketed", payload="bfloat16")
HALF, STEPS = 3, 6


@pytest.fixture
def comm_():
    with Communicator(MPI.COMM_WORLD) as comm:
        yield comm


def begin(comm, strategy, path):
    """Train with a checkpoint in the middle; return its whole residuals, later losses, and final parameters."""
    with build("lenet", comm, strategy) as executor:
        trainer = trainer_of(executor)
        advance(trainer, range(HALF))
        trainer.synchronize()
        snapshot = Snapshot.of(executor.store, trainer.optimizer, comm)
        errors = {} if snapshot is None else copied(snapshot.errors)
        if snapshot is not None:
            write_checkpoint(path, snapshot)
        comm.barrier()
        losses = advance(trainer, range(HALF, STEPS))
        trainer.synchronize()
        return comm.bcast(errors), losses, copied(executor.store.params)


def data(size):
    return Strategy({"sample": size}, bucket_bytes=BUCKET, reduction=ROUNDED)


def cut(size):
    layers = {"conv2": {"channel": size}, "dense4": {"channel": 2}, "dense5": {"sample": 1}}
    return Strategy({"height": size}, layers, bucket_bytes=1, reduction=ROUNDED)


@pytest.mark.parametrize("strategy", [data, cut])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(comm_, shared, strategy):
    strategy = strategy(comm_.size)
    errors, losses, params = begin(comm_, strategy, shared / "step.h5")
    assert sum(np.count_nonzero(e) for e in errors.values()) > 1000, "something was rounded away"
    with build("lenet", comm_, strategy) as executor:
        trainer = trainer_of(executor)
        read_checkpoint(shared / "step.h5", executor.store, trainer.optimizer)
        assert advance(trainer, range(HALF, STEPS)) == losses
        trainer.synchronize()
        assert_arrays(params, executor.store.params)


@pytest.mark.parametrize("other", [cut, lambda size: Strategy({"width": size}, bucket_bytes=1, reduction=ROUNDED)])
def test_errors_go_on_under_another_decomposition(comm_, shared, other):
    errors, _, _ = begin(comm_, data(comm_.size), shared / "step.h5")
    with build("lenet", comm_, other(comm_.size)) as executor:
        read_checkpoint(shared / "step.h5", executor.store)
        for key, array in executor.store.errors.items():
            found = np.zeros_like(errors[key])
            found[executor.store.box(key).slices()] = array
            comm_.reduction(found).run()
            np.testing.assert_array_equal(found, errors[key], err_msg=key)


def test_a_block_of_one_rank_gets_what_others_had_rounded_away_once(comm_, shared):
    errors, _, _ = begin(comm_, data(comm_.size), shared / "step.h5")
    grads = []
    for forget in (True, False):
        with Communicator(MPI.COMM_SELF) as alone, build("lenet", alone, data(1)) as executor:
            trainer = trainer_of(executor)
            read_checkpoint(shared / "step.h5", executor.store, trainer.optimizer)
            if forget:
                for array in executor.store.errors.values():
                    array.fill(0)
            advance(trainer, [HALF])
            trainer.synchronize()
            grads.append(copied(executor.store.grads))
            assert not any(array.any() for array in executor.store.errors.values())
    for key, array in grads[0].items():
        np.testing.assert_array_equal(grads[1][key], array + errors[key], err_msg=key)


def test_a_run_that_rounded_nothing_before_begins_with_no_errors(comm_, shared):
    plain = Strategy({"sample": comm_.size})
    errors, _, _ = begin(comm_, plain, shared / "step.h5")
    assert not errors
    with build("lenet", comm_, data(comm_.size)) as executor:
        for array in executor.store.errors.values():
            array.fill(1.0)
        read_checkpoint(shared / "step.h5", executor.store)
        assert not any(array.any() for array in executor.store.errors.values())


def test_errors_survive_a_change_of_chunks(comm_):
    """The sum of all residuals does not change when the chunks change."""

    def everything(executor):
        executor.reducer.synchronize()
        total = copied(executor.store.errors)
        for array in total.values():
            comm_.reduction(array).run()
        return total

    with build("lenet", comm_, data(comm_.size)) as executor:
        advance(trainer_of(executor), range(HALF))
        before = everything(executor)
        executor.reduce_by(Scheme("per_layer", payload="bfloat16"))
        after = everything(executor)
    assert any(array.any() for array in before.values())
    assert_arrays(after, before)


def test_a_batch_that_is_not_finite_leaves_nothing_behind(comm_):
    """After a batch with NaN, which raises Diverged, training has the losses of a training without that batch."""

    def losses(spoiled):
        with build("lenet", comm_, data(comm_.size)) as executor:
            trainer = trainer_of(executor)
            found = advance(trainer, range(HALF))
            if spoiled:
                fill(executor, HALF)
                executor.input("x").array[:1] = np.nan
                with pytest.raises(Diverged):
                    trainer.step()
            found += advance(trainer, range(HALF, STEPS))
            trainer.synchronize()
            assert all(np.isfinite(array).all() for array in executor.store.errors.values())
            return found

    with np.errstate(invalid="ignore"):
        assert losses(True) == pytest.approx(losses(False), rel=2e-3)


def test_arrays_are_made_for_one_payload(comm_):
    with (
        build("lenet", comm_, data(comm_.size)) as executor,
        pytest.raises(ValueError, match=r"payload bfloat16, .* got payload float32"),
    ):
        executor.reduce_by(Scheme("per_layer"))
