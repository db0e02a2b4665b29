"""Tests of float16 with loss scaling, on our CUDA kernels executed by the CPU: overflows are skipped without waits."""

import json
from contextlib import nullcontext

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy
from halograd.training import gradient_scaling, session
from halograd.training.checkpoint import read_header
from halograd.training.executor import Executor
from halograd.training.gradient_scaling import INITIAL, LossScale
from halograd.training.optimizers import SGD
from halograd.training.run import train as train_run
from halograd.training.schedules import Constant
from halograd.training.trainer import Diverged, Trainer
from tests.kernels.cuda.host import HostBackend, HostLauncher, compiler
from tests.support.fake_device import FakeBackend
from tests.training.device_steps import NETWORKS, check_rounded
from tests.training.runs import write_config
from tests.training.steps import advance, fill


@pytest.fixture(scope="module")
def kernels():
    if compiler() is None:
        pytest.skip("needs g++ to run CUDA kernels on the CPU")
    backend = FakeBackend(HostBackend(HostLauncher()))
    yield backend
    backend.close()


def build(kernels, comm, parts=None, rate=0.01, clip=None, reduction=None):
    strategy = Strategy(parts or {"sample": comm.size}, bucket_bytes=4096, reduction=reduction or Scheme())
    built = Executor(NETWORKS["lenet"](), comm, kernels, 4, strategy, "float16", seed=3)
    return built, Trainer(built, SGD(built.store, momentum=0.9), Constant(rate), clip_norm=clip)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("clip", [None, 1e-2], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_training_as_float32_up_to_rounding(kernels, dtype, clip, monkeypatch):
    # At the usual scale a gradient that is rounded to float16 overflows here, and a step would be skipped.
    monkeypatch.setattr(gradient_scaling, "INITIAL", 2.0**10)
    with Communicator(MPI.COMM_WORLD) as comm:
        _, counts = check_rounded("lenet", comm, kernels, {"sample": comm.size}, "sgd", clip, dtype)
    assert counts["syncs"] == 0


@pytest.mark.ranks(1, 2)
def test_a_step_that_overflows_is_skipped_and_the_scale_halved(kernels):
    with Communicator(MPI.COMM_WORLD) as comm:
        built, trainer = build(kernels, comm, clip=1.0)
        with built:
            to_host, scaling = built.device.to_host, built.store.loss_scale
            scaling.load_state_dict({"scale": 2.0**24, "good": 7.0})
            before = {k: to_host(v) for k, v in built.store.params.items()}
            waits = len(built.device.synchronizations)
            with np.errstate(all="ignore"):
                fill(built, 0)
                trainer.step()
                assert len(built.device.synchronizations) == waits
                trainer.synchronize()
            assert to_host(scaling.state).tolist() == [2.0**23, 0.0, 2.0**-23]
            assert (trainer.loss_scale, scaling.skipped) == (2.0**23, 1)
            for name, array in built.store.params.items():
                np.testing.assert_array_equal(to_host(array), before[name], err_msg=name)
            with np.errstate(all="ignore"):
                advance(trainer, range(20))
                trainer.synchronize()
            assert scaling.skipped < 15, "the scale came down until steps were made"
            assert any((to_host(v) != before[k]).any() for k, v in built.store.params.items())


@pytest.mark.ranks(2)
def test_an_overflow_passes_where_gradients_are_rounded_without_error_feedback(kernels):
    """Rounded gradients with loss scaling need `error_feedback=False`, because NaN would remain in the residuals."""
    with Communicator(MPI.COMM_WORLD) as comm:
        with pytest.raises(UserError, match=r'error_feedback: .*false .*"float16"'):
            build(kernels, comm, reduction=Scheme(payload="bfloat16"))
        built, trainer = build(kernels, comm, reduction=Scheme(payload="bfloat16", error_feedback=False))
        with built, np.errstate(all="ignore"):
            scaling = built.store.loss_scale
            scaling.load_state_dict({"scale": 2.0**24, "good": 7.0})
            advance(trainer, range(20))
            trainer.synchronize()
            assert 1 <= scaling.skipped < 15


@pytest.mark.ranks(2)
def test_an_overflow_in_a_block_of_one_rank_is_that_of_all(kernels):
    with Communicator(MPI.COMM_WORLD) as comm:
        built, _ = build(kernels, comm, {"sample": 2})
        with built:
            scaling = built.store.loss_scale
            scaling.watch([flat.grads for flat in built.store.flats], comm)
            for flat in built.store.flats:
                flat.grads.fill(np.inf if comm.rank else 0)
            scaling.measure()
            assert built.device.to_host(scaling.skip).tolist() == [1]


@pytest.mark.ranks(1)
def test_gradients_that_are_never_finite_end_the_run(kernels):
    with Communicator(MPI.COMM_WORLD) as comm:
        built, trainer = build(kernels, comm)
        with built, np.errstate(all="ignore"):
            scaling = built.store.loss_scale
            scaling.load_state_dict({"scale": 1.0, "good": 0.0})
            trainer._scaling.watch([built.device.array([np.inf], np.float32)], None)
            with pytest.raises(Diverged, match=r"gradients .*loss scale; lower sched"):
                advance(trainer, range(40))


@pytest.mark.ranks(1)
def test_the_scale_grows_after_many_good_steps_and_starts_where_a_checkpoint_says(kernels):
    with Communicator(MPI.COMM_WORLD) as comm:
        built, trainer = build(kernels, comm)
        with built:
            scaling = built.store.loss_scale
            assert scaling.state_dict() == {"scale": INITIAL, "good": 0.0}
            scaling.load_state_dict({"scale": 256.0, "good": 1999.0})
            fill(built, 0)
            trainer.step()
            trainer.synchronize()
            assert scaling.state_dict() == {"scale": 512.0, "good": 0.0}
            assert scaling.skipped == 0


@pytest.mark.ranks(1)
def test_a_run_logs_the_scale_and_keeps_it_in_its_checkpoints(kernels, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "open_kernels", lambda config, comm: nullcontext(kernels))
    path, more = write_config(tmp_path), ['training.dtype="float16"', f"output.directory={tmp_path / 'out'}"]
    found = train_run(path, [*more, "training.epochs=1"], comm=MPI.COMM_SELF)
    assert np.isfinite(found["loss"])
    lines = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    scales = [line["loss_scale"] for line in lines if "learning_rate" in line]
    assert scales and all(scale >= 1 for scale in scales)
    checkpoint = sorted((tmp_path / "out" / "checkpoints").glob("step-*.h5"))[-1]
    progress, _ = read_header(checkpoint)
    assert progress.loss_scale is not None
    expected = progress.loss_scale["scale"]
    seen = []
    monkeypatch.setattr(LossScale, "load_state_dict", lambda self, state: seen.append(state["scale"]))
    train_run(path, [*more, "training.epochs=2"], resume=True, comm=MPI.COMM_SELF)
    assert seen == [expected]
