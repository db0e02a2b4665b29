"""Tests of the comparison of memory with torch: its peak of live tensors, and the same network in all regions."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch, with which memory is compared")

import torch

from benchmarks import memory_peers
from benchmarks.contest import Settings
from benchmarks.problems import PROBLEMS
from benchmarks.recompute import FULL
from benchmarks.subject_torch import TorchNetwork
from benchmarks.torch_checkpoint import LiveBytes, peak_bytes, regions_of
from halograd.models import build

pytestmark = pytest.mark.nightly


def test_live_bytes_end_with_their_tensors():
    x = torch.zeros(100, requires_grad=True)
    with LiveBytes(x) as tally:
        y = x * 2
        assert (tally.live, tally.peak) == (800, 800)
        y.view(10, 10).detach().add_(1)
        z = y * y  # keeps y
        del y
        assert tally.live == 1200
        del z
        assert (tally.live, tally.peak) == (400, 1200)


@pytest.mark.parametrize("problem", ["mesh-tiny", "resnet-tiny", "unet3d-tiny"])
def test_regions_compute_the_same_and_keep_less(problem):
    made, found, peaks = PROBLEMS[problem], [], []
    network = made.make()
    for rule in ("none", "pointwise", "block"):
        regions = regions_of(network, rule, made.batch)
        peer = TorchNetwork(network, made.weights(network), made.data(network), regions=regions)
        loss = peer.loss()
        loss.backward()
        found.append((loss.item(), {name: value.grad.numpy().copy() for name, value in peer.params.items()}))
        peaks.append(peak_bytes(network, regions, made.batch))
        # With data, some kernels also convert arrays.
        assert peaks[-1] <= peak_bytes(network, regions, made.batch, "cpu") <= 1.05 * peaks[-1]
    assert peaks[0] > max(peaks[1:])
    for loss, gradients in found[1:]:
        assert loss == found[0][0]
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient, found[0][1][name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", ["mesh_2k", "unet3d"])
def test_less_memory_than_torch(name):
    found = memory_peers.memory(build(name, resolution=FULL[name]))
    for rule in ("pointwise", "block"):
        ours, theirs = found[rule]
        assert ours < theirs, rule


def test_step_times_are_those_of_the_same_network():
    found = memory_peers.times("unet3d-tiny", "block", Settings(0.05, 2, 2.0))
    assert set(found.times) == {"halograd", "torch"} and all(len(t.seconds) >= 4 for t in found.times.values())
