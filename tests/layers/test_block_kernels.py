"""Tests that every convolution works under every cut, whichever kernels oneDNN has for the blocks.

oneDNN has no fast kernel for some blocks of few channels with wide padding, although it has one for the whole sample,
or for the blocks of other ranks.
"""

import doctest
import itertools
import logging
import math
import os

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.kernels.onednn import OnednnBackend
from halograd.kernels.onednn.conv import ConvChoice
from halograd.kernels.onednn.program import ReferenceOnly
from halograd.layers import Conv, ConvTranspose, Input, MeanSquaredError, Network
from halograd.layers.strategy import Strategy
from halograd.testing import random_array, run_layer
from halograd.training import kernels as kernels_module
from halograd.training.executor import Executor
from tests.layers.blocks import computed_in_blocks

#: Of all geometries so many are tried in the suite; "all" for a campaign.
COUNT = os.environ.get("HALOGRAD_TEST_GEOMETRIES", "12")
CUTS = {"rows": {"height": 4}, "grid": {"height": 2, "width": 2}}
EPS = np.finfo(np.float32).eps


def _geometries():
    """Return geometries and cuts: kernels of 3 to 11, dilation 1 to 4, every padding up to the window's extent."""
    found = []
    for kernel, dilation, cut in itertools.product(range(3, 12), range(1, 5), CUTS):
        extent = dilation * (kernel - 1) + 1
        for padding, edge in itertools.product(range(extent + 1), (12, 33)):
            if edge + 2 * padding >= extent:
                found.append((kernel, dilation, padding, edge, cut))
    return found


GEOMETRIES = _geometries()


def _some():
    if COUNT == "all":
        return GEOMETRIES
    chosen = np.random.default_rng(11).choice(len(GEOMETRIES), int(COUNT), replace=False)
    return [(9, 2, 17, 12, "grid"), (11, 4, 40, 33, "rows"), *(GEOMETRIES[i] for i in sorted(chosen))]


def draw(layer, shape):
    """Draw the arrays of a layer on one sample."""
    sizes = {k: p.shape for k, p in layer.parameters(shape).items()}
    sizes |= {"x": (1, *shape), "dy": (1, *layer.output_shape(shape))}
    return {name: random_array(size, name) for name, size in sizes.items()}


def check(layer, shape, parts, size, onednn, halo, substitutes=None):
    """Compare the blocks of all ranks by oneDNN with one process in float64, within 8 roundings per summand."""
    arrays = draw(layer, shape)
    with get_backend("numpy") as numpy:
        want = computed_in_blocks(layer, numpy, arrays, {}, 1, dtype="float64")
    got = computed_in_blocks(layer, onednn, arrays, parts, size, halo, substitutes=substitutes)
    terms = {"y": arrays["w"][0].size, "dx": arrays["w"][..., 0].size, "dw": arrays["dy"].size, "db": arrays["dy"].size}
    for name, array in want.items():
        bound = 8 * EPS * math.sqrt(terms[name]) * max(1.0, float(np.abs(array).max(initial=0)))
        error = np.abs(got[name] - array).max(initial=0)
        assert error <= bound, f"{layer} {shape} {parts} {name}: {error:.2e} > {bound:.2e}"


def padded(kernel, dilation, padding, filters=2):
    return Conv(filters, kernel, padding=padding, dilation=dilation, name="conv")


@pytest.mark.timeout(300 if COUNT != "all" else 3600)
def test_dilated_blocks(onednn):
    """Dilated convolutions by oneDNN are right on all blocks: forward, both gradients, boundary strips."""
    substituted: list = []
    for kernel, dilation, padding, edge, cut in _some():
        for halo in ("pad", "overlap"):
            check(padded(kernel, dilation, padding), (edge, edge, 2), CUTS[cut], 4, onednn, halo, substituted)
    if onednn.version == "3.2.0":
        assert substituted, "geometries that oneDNN 3.2 has no kernels for were to be tried"


OTHERS = {
    "wide padding": (Conv(2, (10, 11), (2, 1), ((34, 35), (15, 15)), (4, 3), name="c"), (15, 26, 4), {"width": 3}),
    "whole sample": (padded(9, 2, 17), (12, 12, 2), {"height": 2, "width": 2}),
    "stride 2": (Conv(5, 10, 2, 36, 4, name="c"), (32, 32, 4), {"width": 3}),
    "stride 3": (Conv(2, 7, 3, 18, 3, name="c"), (13, 13, 2), {"height": 2}),
    "groups": (Conv(4, 9, 1, 32, 4, groups=2, name="c"), (13, 13, 4), {"width": 3}),
    "3-D": (Conv(2, 5, 1, 8, 3, name="c"), (7, 7, 9, 2), {"height": 2, "width": 2}),
    "1-D": (Conv(2, 11, 1, 30, 4, name="c"), (33, 2), {"width": 4}),
    "transposed": (ConvTranspose(2, 7, 3, 6, 0, 3, name="t"), (7, 9, 2), {"height": 2, "width": 2}),
    "transposed, dilation 4": (ConvTranspose(3, 9, 1, 16, 0, 4, name="t"), (33, 16, 2), {"height": 4}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_blocks(onednn, name):
    layer, shape, parts = OTHERS[name]
    for halo in ("pad", "overlap"):
        check(layer, shape, parts, math.prod(parts.values()), onednn, halo)
    check(layer, shape, {}, 1, onednn, "pad")


@pytest.mark.mpi
@pytest.mark.parametrize("halo", ["pad", "overlap"])
@pytest.mark.parametrize("name", ["wide padding", "whole sample", "transposed"])
def test_cut_layers_that_some_ranks_have_no_kernel_for(comm, name, halo):
    """Under MPI a convolution for which some ranks have no oneDNN kernel equals that of one process."""
    layer, shape, _ = OTHERS[name]
    with Communicator(comm) as ranks, OnednnBackend() as kernels:
        got = run_layer(lambda: layer, [shape], ranks, {"width": ranks.size}, dtype="float32", backend=kernels,
                        options={"halo": halo})  # fmt: skip
        if got is None:
            return
        with Communicator(MPI.COMM_SELF) as alone:
            want = run_layer(lambda: layer, [shape], alone, {}, dtype="float64", backend="numpy")
    for key, array in want.items():
        bound = 8 * EPS * math.sqrt(got["y"].size) * max(1.0, float(np.abs(array).max()))
        assert np.abs(got[key] - array).max() <= bound, key


@pytest.mark.mpi
def test_ranks_without_a_kernel_are_named_once(comm, monkeypatch, caplog):
    """One warning names the ranks and the layer for which a fast kernel is missing."""
    if comm.rank == comm.size - 1:
        has = ConvChoice.kernel

        def refuse(self, key, candidates):
            return has(self, key, {"packed": none} if key[2][0] == 3 else candidates)  # filters

        def none():
            raise ReferenceOnly("there is none")

        monkeypatch.setattr(ConvChoice, "kernel", refuse)
    x = Input((8, 8, 2), "x")
    y = Conv(3, 3, padding=1, name="second")(Conv(2, 3, padding=1, name="first")(x))
    network = Network({"loss": MeanSquaredError(name="loss")(y, Input((8, 8, 3), "target"))})
    with (
        caplog.at_level(logging.WARNING, "halograd.kernels"),
        Communicator(comm) as ranks,
        OnednnBackend() as kernels,
        Executor(network, ranks, kernels, 1, Strategy({"height": comm.size}), "float32"),
    ):
        texts = [record.getMessage() for record in caplog.records]
    where = f"rank {comm.size - 1} of {comm.size}" if comm.size > 1 else "the only rank"
    assert len(texts) == (comm.rank == 0)
    for text in texts:
        for what in ("conv_forward", "conv_backward_data", "conv_backward_filter"):
            assert f"{what} of layer 'second' by numpy on {where} (there is none)" in text
        assert "first" not in text


def test_examples():
    assert doctest.testmod(kernels_module).failed == 0
