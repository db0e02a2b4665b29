"""Gradient reduction by chunks of every kind gives the training of one process."""

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy
from tests.training.reductions import BUCKET, alone, build, check_grids, check_strategy, train
from tests.training.test_exactness import fill

SCHEMES = [
    Scheme("blocking"),
    Scheme("per_layer"),
    Scheme("two_chunks", first_layers=3),
    Scheme("bucketed", deterministic=True),
    Scheme("two_chunks", first_layers=2, deterministic=True),
]


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_ten_steps_are_those_of_one_process(scheme):
    with Communicator(MPI.COMM_WORLD) as comm:
        check_grids("lenet", comm, scheme, "float64")


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(
    "scheme", [Scheme("two_chunks", first_layers=3), Scheme("per_layer", deterministic=True)], ids=str
)
def test_ten_steps_with_norms_are_those_of_one_process(scheme):
    with Communicator(MPI.COMM_WORLD) as comm:
        check_grids("mesh", comm, scheme, "float32")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_messages_of_mpi_give_the_same(scheme):
    with Communicator(MPI.COMM_WORLD, "mpi") as comm:
        check_strategy("lenet", comm, Strategy({"sample": comm.size}, bucket_bytes=BUCKET, reduction=scheme), "float64")


def cut(size, scheme):
    """Blocks of filters and of features, a layer on one rank: some gradients are summed by few ranks, some by none."""
    layers = {
        "conv2": {"channel": size},
        "dense3": {"input_channel": 2},
        "relu3": {"sample": size},
        "dense4": {"channel": size},
        "dense5": {"sample": 1},
    }
    return Strategy({"sample": size}, layers, bucket_bytes=BUCKET, reduction=scheme)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_gradients_of_blocks_are_summed_by_those_who_hold_them(scheme):
    with Communicator(MPI.COMM_WORLD) as comm:
        check_strategy("lenet", comm, cut(comm.size, scheme), "float64")


@pytest.mark.mpi(min_size=2)
def test_deterministic_sums_have_the_same_bits_under_every_transport_and_scheme():
    found = []
    for transport in ("mpi", "shared", "emulated:alpha=1e-5,beta=1e-11"):
        with Communicator(MPI.COMM_WORLD, transport) as comm:
            for name, k in (("blocking", 0), ("per_layer", 0), ("bucketed", 0), ("two_chunks", 3)):
                strategy = Strategy(
                    {"sample": comm.size}, bucket_bytes=BUCKET, reduction=Scheme(name, k, deterministic=True)
                )
                found.append((transport, name, train("lenet", comm, strategy, "float32")[1]))
    for transport, name, params in found[1:]:
        for key, array in params.items():
            np.testing.assert_array_equal(array, found[0][2][key], err_msg=f"{key} with {name} over {transport}")


def off(comm, rate, **settings):
    """How far the parameters are from those of one process after all steps, on any rank."""
    scheme = Scheme("per_layer", payload="bfloat16", **settings)
    _, whole = alone("lenet", "float32", rate)
    strategy = Strategy({"sample": comm.size}, bucket_bytes=BUCKET, reduction=scheme)
    _, params = train("lenet", comm, strategy, "float32", rate)
    worst = max(float(np.abs(params[key] - whole[key]).max()) for key in params)
    return comm.allreduce_scalar(worst, "max")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("transport", ["mpi", "shared"])
def test_bfloat16_with_error_feedback_stays_near_one_process(transport):
    """What is not fed back yet is one rounding of the summands and one of their sum, each by 2^-8 of a gradient; with
    momentum 0.5 it counts twice in the end. Gradients are below 1.5 in the last steps. The rate is one at which the
    training is smooth: at a kink, small differences grow.
    """
    rate, gradient = 0.003, 1.5
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        near = off(comm, rate)
        assert near <= 2 * 2 * 2.0**-8 * gradient * rate
        assert off(comm, rate, error_feedback=False) > 3 * near, "without, every step leaves an error"


@pytest.mark.mpi(min_size=2)
def test_blocking_sums_are_over_when_backward_is():
    with Communicator(MPI.COMM_WORLD) as comm:
        strategy = Strategy({"sample": comm.size}, reduction=Scheme("blocking"))
        with build("lenet", comm, strategy) as executor:
            fill(executor, 0)
            executor.forward()
            executor.backward()
            before = {k: v.copy() for k, v in executor.store.grads.items()}
            executor.reducer.finish()
            for key, array in executor.store.grads.items():
                np.testing.assert_array_equal(array, before[key])


class Spans:
    """A recorder that keeps what it is told."""

    def __init__(self):
        self.found = []

    def span(self, name, category, t0, t1):
        self.found.append((name, category, t0, t1))


@pytest.mark.mpi(min_size=2)
def test_the_first_chunk_starts_when_backward_has_passed_its_layers():
    with Communicator(MPI.COMM_WORLD) as comm:
        comm.recorder = spans = Spans()
        scheme = Scheme("two_chunks", first_layers=3)  # the three dense layers of LeNet-5
        with build("lenet", comm, Strategy({"sample": comm.size}, reduction=scheme)) as executor:
            fill(executor, 0)
            executor.forward()
            spans.found.clear()
            executor.backward()
            executor.reducer.finish()
        passed = {name: (t0, t1) for name, category, t0, t1 in spans.found if category == "backward"}
        sums = sorted(t0 for name, category, t0, _ in spans.found if (name, category) == ("allreduce", "communication"))
        assert len(sums) == 2
        assert passed["dense3"][1] <= sums[0] <= passed["conv2"][0]
        assert passed["conv1"][1] <= sums[1]


@pytest.mark.mpi(min_size=1)
def test_bfloat16_needs_float32():
    with (
        Communicator(MPI.COMM_WORLD) as comm,
        pytest.raises(UserError, match=r'reduction.payload: expected training.dtype = "float32" .*, got "float64"'),
    ):
        strategy = Strategy({"sample": comm.size}, reduction=Scheme(payload="bfloat16"))
        build("lenet", comm, strategy, "float64")
