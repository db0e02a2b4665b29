"""Layers bound for the profile on the double of a device."""

import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.layers import BatchNorm, Conv, Dropout, MaxPool, SoftmaxCrossEntropy
from halograd.perfmodel.profile.bound import BoundLayer
from tests.support.fake_device import FakeBackend

LAYERS = {
    "conv": (Conv(4, 3, padding=1), [(2, 8, 8, 3)]),
    "batch norm": (BatchNorm(), [(2, 8, 8, 3)]),
    "max pool": (MaxPool(2), [(2, 8, 8, 3)]),
    "dropout": (Dropout(0.5), [(2, 8, 8, 3)]),
    "loss": (SoftmaxCrossEntropy(), [(2, 5), (2, 1)]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_measured_there_too(name):
    layer, inputs = LAYERS[name]
    kernels = FakeBackend()
    with Communicator(MPI.COMM_SELF) as comm, BoundLayer(layer, inputs, "float32", kernels, comm) as bound:
        before = len(kernels.device.synchronizations)
        bound.forward()
        bound.backward(lambda call: call())
        assert len(kernels.device.synchronizations) == before
    kernels.close()
