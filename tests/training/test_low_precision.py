"""Tests of training with 16-bit activations on the double of a device, against float32."""

from contextlib import contextmanager

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.device import LOW, as_dtype
from halograd.errors import UserError
from halograd.kernels.numpy import NumpyBackend
from halograd.layers import Add, Conv, Input, MeanSquaredError, Network
from halograd.layers.strategy import Strategy
from halograd.models import mesh
from halograd.training import gradient_scaling
from halograd.training.executor import Executor
from halograd.training.optimizers import SGD
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer
from tests.support.fake_device import FakeBackend
from tests.support.onednn import opened
from tests.training.device_steps import NETWORKS, check_rounded, train
from tests.training.steps import fill

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
