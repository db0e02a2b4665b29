"""Tests that training under every sample x height x width cut gives the losses of one process."""

import functools

import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.layers.strategy import Strategy
from tests.support.grids import grids_in_turn
from tests.training.steps import NETWORKS, bound, check_outcome, descend, learned


@functools.cache
def alone(name, dtype, backend):
    """Return the outcome of one process."""
    with Communicator(MPI.COMM_SELF) as comm:
        return learned(descend(NETWORKS[name](), comm, Strategy(bucket_bytes=4096), dtype, backend))


def check(turn, name, dtype, backend="numpy", **options):
    """Compare training under the cuts of samples, height and width of this turn with one process."""
    network, want = NETWORKS[name](), alone(name, dtype, backend)
    with Communicator(MPI.COMM_WORLD) as comm:
        for parts in grids_in_turn(comm.size, ("sample", "height", "width"), turn):
            found = descend(network, comm, Strategy(parts, options=options, bucket_bytes=4096), dtype, backend)
            check_outcome(comm, found, want, bound(network, dtype), f"{name} under {parts}")


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", NETWORKS)
def test_losses_of_ten_steps_are_those_of_one_process(turn, name, dtype):
    check(turn, name, dtype)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["mesh", "unet"])
def test_overlapped_halos_give_the_same_losses(turn, name):
    check(turn, name, "float64", halo="overlap")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["mesh", "resnet"])
def test_onednn_gives_the_losses_of_one_process(turn, name):
    check(turn, name, "float32", backend="onednn")


@pytest.mark.ranks(6)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ["mesh", "resnet", "unet"])
def test_losses_on_grids_of_six_ranks(turn, name, dtype):
    check(turn, name, dtype)
