"""Tests of training with our CUDA kernels on the CPU, in 16 bits, and with loss scaling."""

import json
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.device import LOW, as_dtype
from halograd.errors import UserError
from halograd.kernels.numpy import NumpyBackend
from halograd.layers import Add, Conv, Input, MeanSquaredError, Network
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy
from halograd.models import mesh
from halograd.testing import grids, random_array, run_layer
from halograd.training import gradient_scaling, session
from halograd.training.checkpoint import read_header
from halograd.training.executor import Executor
from halograd.training.gradient_scaling import INITIAL, LossScale
from halograd.training.memory import Memory
from halograd.training.optimizers import SGD
from halograd.training.run import train as train_run
from halograd.training.schedules import Constant
from halograd.training.trainer import Diverged, Trainer
from tests.kernels.cuda.host import HostBackend, HostLauncher, compiler
from tests.layers.test_device import near
from tests.support.fake_device import FakeBackend
from tests.support.onednn import opened
from tests.training.device_steps import NETWORKS, OPTIMIZERS, assert_near, check_rounded, train
from tests.training.runs import write_config
from tests.training.steps import advance, fill

BFLOAT16 = as_dtype("bfloat16")


def executor(kernels, comm, name="mesh", dtype="bfloat16", parts=None):
    return Executor(NETWORKS[name](), comm, kernels, 4, Strategy(parts or {}, bucket_bytes=4096), dtype, seed=3)


@contextmanager
def cpu(how):
    """Yield oneDNN with 16 bits: by its own kernels where the processor has them, or by those of float32."""
    with opened("onednn") as backend:
        backend.emulate = True
        if how == "emulated":
            backend._engine.emulated.update(LOW)
        yield backend


@pytest.fixture(params=["double", "onednn"])
def each(request, kernels):
    """Return kernels with 16 bits, on the double of a device and on the CPU."""
    if request.param == "double":
        yield kernels
        return
    with cpu(request.param) as backend:
        yield backend


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("name", "optimizer"), [("mesh", "sgd"), ("resnet", "adamw"), ("unet", "lars")])
def test_bfloat16_trains_as_float32_up_to_rounding(name, optimizer, kernels):
    with Communicator(MPI.COMM_WORLD) as comm:
        ours, counts = check_rounded(name, comm, kernels, {"height": comm.size}, optimizer, what=f"{name} {optimizer}")
    assert {a.dtype for a in ours.values()} == {np.dtype(np.float32)}
    assert counts["syncs"] == 0


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("how", ["onednn", "emulated", "float16"])
def test_16_bits_on_the_cpu_train_as_float32_up_to_rounding(how, monkeypatch):
    """Halos travel in 16 bits; the arrays take the predicted memory, and kernels hold what they report."""
    # At the usual scale a gradient that is rounded to float16 overflows here, and a step would be skipped.
    monkeypatch.setattr(gradient_scaling, "INITIAL", 2.0**10)
    name, optimizer, dtype = ("unet", "lars", "float16" if how == "float16" else "bfloat16")
    with Communicator(MPI.COMM_WORLD) as comm, cpu(how) as kernels:
        parts, traffic, memory = {"height": comm.size}, [], []
        check_rounded(name, comm, kernels, parts, optimizer, dtype=dtype, what=how)
        for of in (dtype, "float32"):
            with executor(kernels, comm, name, of, parts) as built:
                fill(built, 0)
                comm.counters.reset()
                built.forward()
                traffic.append(comm.counters["halo"].bytes)
                memory.append(len(built.runner.arena))
                assert memory[-1] == built.program.placement.size and not built.store.rounded
                needs = built._needs(True)
                assert {k: n for k, n in built.memory.bytes.items() if k.startswith("parameter")} == {
                    k: n for k, n in needs.items() if k.startswith("parameter")
                }
    assert 2 * traffic[0] == traffic[1]
    assert memory[0] < 0.75 * memory[1]  # work in float32 remains


@pytest.mark.ranks(1)
def test_what_is_float32_beside_bfloat16(each):
    kernels = each
    with Communicator(MPI.COMM_WORLD) as comm, executor(kernels, comm, "resnet") as built:
        store, to_host = built.store, built.device.to_host
        assert store.dtype == np.float32 and store.low == BFLOAT16
        for arrays in (store.params, store.grads, store.state):
            assert {a.dtype for a in arrays.values()} == {np.dtype(np.float32)}
        assert built.program.values["x"].dtype == BFLOAT16
        for name, array in store.copies.items():
            np.testing.assert_array_equal(to_host(array), to_host(store.params[name]).astype(BFLOAT16), err_msg=name)
        trainer = Trainer(built, SGD(store), Constant(0.01))
        fill(built, 0)
        trainer.step()
        trainer.synchronize()
        for name, array in store.copies.items():
            np.testing.assert_array_equal(to_host(array), to_host(store.params[name]).astype(BFLOAT16), err_msg=name)


@pytest.mark.ranks(1)
def test_updates_too_small_for_bfloat16_are_not_lost(kernels):
    with Communicator(MPI.COMM_WORLD) as comm, executor(kernels, comm) as built:
        trainer, to_host = Trainer(built, SGD(built.store), Constant(1e-6)), built.device.to_host
        before = {k: to_host(v) for k, v in built.store.params.items()}
        rounded = {k: to_host(v) for k, v in built.store.copies.items()}
        for _ in range(2):
            fill(built, 0)
            trainer.step()
        trainer.synchronize()
        weights = [k for k in before if k.endswith("/w")]
        moved = np.concatenate([(to_host(built.store.params[k]) != before[k]).reshape(-1) for k in weights])
        seen = np.concatenate([(to_host(built.store.copies[k]) != rounded[k]).reshape(-1) for k in weights])
    assert np.mean(moved) > 0.5 and np.mean(seen) < 0.25


@pytest.mark.ranks(2)
def test_sharded_updates_reach_the_copies_of_all_ranks(kernels):
    from halograd.layers.reduction_scheme import Scheme

    options = {"reduction": Scheme("sharded")}
    with Communicator(MPI.COMM_WORLD) as comm:
        parts, network = {"sample": 2}, NETWORKS["lenet"]()
        expected, params, _ = train(network, comm, FakeBackend(), parts, dtype="bfloat16")
        found, ours, _ = train(network, comm, kernels, parts, dtype="bfloat16", reduction=options)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for name, array in params.items():
        np.testing.assert_allclose(ours[name], array, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_refused_where_it_is_only_emulated(dtype):
    with Communicator(MPI.COMM_WORLD) as comm, pytest.raises(UserError) as caught:
        executor(NumpyBackend(), comm, dtype=dtype, parts={"sample": comm.size})
    assert str(caught.value) == (
        f'training.dtype: expected a dtype in which kernels = "numpy" compute, got "{dtype}": NumPy has only '
        "arithmetic of 32 and 64 bits, and emulated it is slower than float32; use float32, a processor that has it, "
        'or a GPU (backend.kernels = "cudnn"), or set backend.emulate = true'
    )


@pytest.mark.ranks(1, 2)
def test_channels_of_an_input_lie_padded_where_convolutions_read_it(monkeypatch):
    """Inputs of 18 channels are stored in rows of 24 for convolutions in 16 bits; losses are the same."""
    with Communicator(MPI.COMM_WORLD) as comm:
        network = mesh(resolution=(20, 16), channels=18, widths=(4, 6), convs=1)
        losses, strides = [], []
        for rule in (FakeBackend.padded_channels, lambda kernels, channels, dtype: channels):
            monkeypatch.setattr(FakeBackend, "padded_channels", rule)
            kernels = FakeBackend()
            strategy = Strategy({"height": comm.size}, bucket_bytes=4096)
            with Executor(network, comm, kernels, 2, strategy, dtype="bfloat16", seed=3) as built:
                trainer = Trainer(built, SGD(built.store, momentum=0.9), Constant(0.01))
                for step in range(3):
                    fill(built, step)
                    losses.append(float(trainer.step()))
                array = built.input("x").array
                strides.append(array.strides[-2] // array.itemsize)
                stem = next(o for segment in built.program.forward for o in segment.operations if "x" in o.kernel.views)
                x = built.runner.view(stem.kernel.views["x"])
                assert x.data.ptr == array.data.ptr and x.strides == array.strides
                whole = built.runner.view(built.program.values["x"].region.view.buffer.view)
                assert whole.shape[-1] == strides[-1] and not whole.memory[..., 18:].any()
            kernels.close()
        assert strides == [24, 18]
        assert losses[:3] == losses[3:]


@pytest.mark.ranks(1)
def test_channels_stay_packed_where_another_layer_reads_the_input(kernels):
    x, target = Input((6, 6, 18), "x"), Input((6, 6, 18), "target")
    y = Add(name="sum")(Conv(18, 3, padding=1, name="conv")(x), x)
    network = Network({"loss": MeanSquaredError("loss")(y, target)})
    with Communicator(MPI.COMM_WORLD) as comm, Executor(network, comm, kernels, 2, dtype="bfloat16") as built:
        assert built.input("x").array.flags.c_contiguous


def dropping():
    """Return a network whose only difference between ranks are its dropout masks."""
    x, target = hg.Input((6, 5, 3), "x"), hg.Input((1,), "target", "int64")
    y = hg.Dense(4, name="last")(hg.Dropout(0.4, "drop")(hg.Dense(12, name="first")(hg.Flatten("flat")(x))))
    return hg.Network({"prediction": y, "loss": hg.SoftmaxCrossEntropy(label_smoothing=0.1, name="loss")(y, target)})


def regression():
    x, target = hg.Input((6, 5, 3), "x"), hg.Input((4,), "target")
    y = hg.Dense(4, name="last")(hg.Flatten("flat")(x))
    return hg.Network({"prediction": y, "loss": hg.MeanSquaredError("loss")(y, target)})


CASES = {"dropping": dropping, "regression": regression, "mesh": NETWORKS["mesh"]}


@pytest.fixture(scope="module")
def cuda():
    """Return the CUDA kernels, compiled for the CPU, each once."""
    if compiler() is None:
        pytest.skip("needs g++ to run CUDA kernels on the CPU")
    return HostBackend(HostLauncher())


def compare(name, parts, cuda, optimizer="sgd", clip=None, bound=1e-11):
    network = CASES[name]()
    with Communicator(MPI.COMM_WORLD) as comm:
        expected, params, _ = train(network, comm, NumpyBackend(), parts, optimizer, clip)
        kernels = FakeBackend(cuda)
        found, ours, counts = train(network, comm, kernels, parts, optimizer, clip)
        kernels.close()
    assert_near(found, ours, expected, params, bound)
    assert counts["syncs"] == 0


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", CASES)
def test_losses_dropout_and_messages(name, cuda):
    size = MPI.COMM_WORLD.size
    compare(name, {"height": size} if name == "mesh" else {"sample": size}, cuda)
    launched = set(cuda.launcher.launched)
    assert {"dropping": {"softmax_cross_entropy"}, "regression": {"mean_squared_error"}}.get(name, set()) <= launched


@pytest.mark.ranks(1)
@pytest.mark.parametrize("clip", [None, 1e-3], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer, clip, cuda):
    compare("regression", {}, cuda, optimizer, clip)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("scheme", ["bucketed", "sharded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_prepares_nothing(dtype, scheme, cuda, monkeypatch):
    """After two steps, a step creates no tables of pieces, programs or scratch, also with clipping."""
    network, kernels = NETWORKS["unet"](), FakeBackend(cuda)
    with Communicator(MPI.COMM_WORLD) as comm:
        strategy = Strategy({"height": comm.size}, bucket_bytes=4096, reduction=Scheme(scheme))
        with Executor(network, comm, kernels, 4, strategy, dtype, seed=3) as executor:
            trainer = Trainer(executor, OPTIMIZERS["sgd"](executor.store), Constant(0.01), clip_norm=1.0)
            for step in range(3):
                fill(executor, step)
                if step == 2:
                    for name in ("upload", "empty", "function", "bind"):
                        monkeypatch.setattr(cuda.launcher, name, None)
                trainer.step()
            trainer.synchronize()
    kernels.close()


def agree_on(comm, found, expected, atol, what):
    """Fail on all ranks if the results of any rank differ from the expected ones."""
    wrong = [k for k in expected or () if not np.allclose(found[k], expected[k], rtol=0, atol=atol)]
    comm.agree(AssertionError(f"{what}: {wrong} differ") if wrong else None)


LAYERS = {
    "resize": lambda: hg.Resize(2, mode="bilinear", name="l"),
    "resize down": lambda: hg.Resize(size=[4, 9], mode="linear", name="l"),
    "nearest": lambda: hg.Resize(3, name="l"),
    "layer norm": lambda: hg.LayerNorm("channels", activation="relu", name="l"),
    "layer norm, plain": lambda: hg.LayerNorm("channels", affine=False, name="l"),
    "dropout": lambda: hg.Dropout(0.4, name="l"),
}


NORMS = {
    "group norm": lambda: hg.GroupNorm(2, activation="relu", name="l"),
    "group norm, plain": lambda: hg.GroupNorm(2, affine=False, name="l"),
    "instance norm": lambda: hg.InstanceNorm(name="l"),
    "layer norm of samples": lambda: hg.LayerNorm(activation="relu", name="l"),
}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_all_samples_at_once(name, cuda):
    """Norms in float32 equal NumPy's, also with ranks without samples and blocks that do not divide."""
    kernels = FakeBackend(cuda)
    cuda.launcher.launched.clear()
    with Communicator(MPI.COMM_WORLD) as comm:
        for parts in grids(comm.size, ("sample", "height", "width")):
            expected = run_layer(NORMS[name], [(7, 6, 4)], comm, parts, steps=2)
            found = run_layer(NORMS[name], [(7, 6, 4)], comm, parts, steps=2, backend=kernels, dtype="float32")
            agree_on(comm, found, expected, 2e-5, parts)
            single = run_layer(NORMS[name], [(7, 6, 4)], comm, parts, backend=kernels, dtype="bfloat16")
            wrong = [k for k in expected or () if k != "loss" and not near(single[k], expected[k])]
            comm.agree(AssertionError(f"{parts}: {wrong} differ in bfloat16") if wrong else None)
    assert {"group_totals", "group_moments", "group_spread"} <= set(cuda.launcher.launched)
    kernels.close()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("options", [{"activation": "relu"}, {"affine": False}, {"statistics": "sample"}], ids=str)
def test_batch_norm_in_training(options, residual, cuda):
    """Batch norm kernels compute means, running statistics and gradients in float32, also for odd channels."""
    kernels, shapes = FakeBackend(cuda), [(7, 6, 5)] * (1 + residual)

    def make():
        return hg.BatchNorm(name="l", **options)

    with Communicator(MPI.COMM_WORLD) as comm:
        for parts in grids(comm.size, ("sample", "height", "width")):
            expected = run_layer(make, shapes, comm, parts, steps=2, batch=3)
            found = run_layer(make, shapes, comm, parts, steps=2, batch=3, backend=kernels, dtype="float32")
            agree_on(comm, found, expected, 3e-5, parts)
            state = [running(backend, make, shapes, comm, parts) for backend in (NumpyBackend(), kernels)]
            for ours, theirs in zip(*state):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    kernels.close()


def running(backend, make, shapes, comm, parts):
    """Return the running statistics of a layer after two steps."""
    nodes = [hg.Input(s, name=f"x{i}") for i, s in enumerate(shapes)]
    target = hg.Input(shapes[0], name="target")
    network = hg.Network({"loss": hg.MeanSquaredError("loss")(make()(*nodes), target)})
    with Executor(network, comm, backend, 3, Strategy(parts), "float32") as executor:
        for _ in range(2):
            for name in network.inputs:
                executor.set_input(name, random_array((3, *shapes[0]), name))
            executor.forward(training=True)
            executor.backward()
        executor.reducer.finish()
        return [executor.device.to_host(array).copy() for array in executor.store.state.values()]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, cuda):
    kernels = FakeBackend(cuda)
    with Communicator(MPI.COMM_WORLD) as comm:
        for parts in grids(comm.size, ("height", "width")):
            expected = run_layer(LAYERS[name], [(7, 6, 4)], comm, parts, steps=2)
            found = run_layer(LAYERS[name], [(7, 6, 4)], comm, parts, steps=2, backend=kernels)
            agree_on(comm, found, expected, 1e-12, parts)
    kernels.close()


@pytest.fixture(scope="module")
def scaling_kernels():
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
def test_training_as_float32_up_to_rounding(scaling_kernels, dtype, clip, monkeypatch):
    # At the usual scale a gradient that is rounded to float16 overflows here, and a step would be skipped.
    monkeypatch.setattr(gradient_scaling, "INITIAL", 2.0**10)
    with Communicator(MPI.COMM_WORLD) as comm:
        _, counts = check_rounded("lenet", comm, scaling_kernels, {"sample": comm.size}, "sgd", clip, dtype)
    assert counts["syncs"] == 0


@pytest.mark.ranks(1, 2)
def test_a_step_that_overflows_is_skipped_and_the_scale_halved(scaling_kernels):
    with Communicator(MPI.COMM_WORLD) as comm:
        built, trainer = build(scaling_kernels, comm, clip=1.0)
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


def test_the_largest_scale_does_not_grow_and_no_step_is_skipped_then():
    """After 2000 good steps at the largest scale, the number of good steps restarts; this is not a skipped step."""
    scaling = LossScale(Memory(NumpyBackend()))
    scaling.load_state_dict({"scale": 2.0**24, "good": gradient_scaling.INTERVAL - 1.0})
    scaling.adapt()
    scaling.observe()
    assert (scaling.state_dict(), scaling.skipped) == ({"scale": 2.0**24, "good": 0.0}, 0)
    scaling.flag[...] = 1
    scaling.adapt()
    scaling.observe()
    assert (scaling.known, scaling.skipped) == (2.0**23, 1)
    scaling.close()


@pytest.mark.ranks(2)
def test_an_overflow_passes_where_gradients_are_rounded_without_error_feedback(scaling_kernels):
    """Rounded gradients with loss scaling need `error_feedback=False`, because NaN would remain in the residuals."""
    with Communicator(MPI.COMM_WORLD) as comm:
        with pytest.raises(UserError, match=r'error_feedback: .*false .*"float16"'):
            build(scaling_kernels, comm, reduction=Scheme(payload="bfloat16"))
        built, trainer = build(scaling_kernels, comm, reduction=Scheme(payload="bfloat16", error_feedback=False))
        with built, np.errstate(all="ignore"):
            scaling = built.store.loss_scale
            scaling.load_state_dict({"scale": 2.0**24, "good": 7.0})
            advance(trainer, range(20))
            trainer.synchronize()
            assert 1 <= scaling.skipped < 15


@pytest.mark.ranks(2)
def test_an_overflow_in_a_block_of_one_rank_is_that_of_all(scaling_kernels):
    with Communicator(MPI.COMM_WORLD) as comm:
        built, _ = build(scaling_kernels, comm, reduction=Scheme("sharded"))
        with built:
            scaling = built.store.loss_scale
            for flat in built.store.flats:
                flat.grads.fill(np.inf if comm.rank else 0)
            built.checks["loss scale"].measure()
            assert built.device.to_host(scaling.skip).tolist() == [1]


@pytest.mark.ranks(1)
def test_gradients_that_are_never_finite_end_the_run(scaling_kernels):
    with Communicator(MPI.COMM_WORLD) as comm:
        built, trainer = build(scaling_kernels, comm)
        with built, np.errstate(all="ignore"):
            scaling = built.store.loss_scale
            scaling.load_state_dict({"scale": 1.0, "good": 0.0})
            infinite = [built.device.array([np.inf], np.float32)]
            built.checks["loss scale"]._find = scaling_kernels.find_nonfinite(infinite, scaling.flag)
            with pytest.raises(Diverged, match=r"gradients .*loss scale; lower sched"):
                advance(trainer, range(40))


@pytest.mark.ranks(1)
def test_the_scale_grows_after_many_good_steps_and_starts_where_a_checkpoint_says(scaling_kernels):
    with Communicator(MPI.COMM_WORLD) as comm:
        built, trainer = build(scaling_kernels, comm)
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
def test_a_run_logs_the_scale_and_keeps_it_in_its_checkpoints(scaling_kernels, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "open_kernels", lambda config, comm: nullcontext(scaling_kernels))
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
