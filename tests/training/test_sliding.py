"""Tests of sliding windows in `apply`: equal to sums by hand under every cut, flips, several sizes, refusals."""

import itertools
from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.cli.run import run
from halograd.data.sliding import SMALLEST, starts_along, weights_along
from halograd.errors import UserError
from halograd.training import apply, train
from halograd.training.checkpoint import read_header
from tests.training.cuts import CUTS, overrides_of
from tests.training.runs import EDGE

HEIGHT, WIDTH = 2 * EDGE + 3, EDGE + 5


def read(path):
    with h5py.File(path) as file:
        return file["prediction"][()]


def write_samples(path, x):
    with h5py.File(path, "w") as file:
        file["inputs"] = x
        file["inputs"].attrs["layout"] = "NHWC"


def test_starts_and_weights():
    assert starts_along(26, 8, 0.5) == [0, 4, 8, 12, 16, 18]
    assert starts_along(8, 8, 0.5) == [0] and starts_along(5, 8, 0.5) == [-2]
    assert starts_along(16, 4, 0.0) == [0, 4, 8, 12] and starts_along(6, 4, 0.9) == [0, 1, 2]
    assert starts_along(26, 8, 0.6, 2) == [0, 4, 8, 12, 16, 18]  # 3.2 is nearer to 4 than to 2
    for n in (1, 2, 5, 16):
        middle = (n - 1) / 2
        want = np.exp(-0.5 * ((np.arange(n) - middle) / (n / 8)) ** 2)
        np.testing.assert_allclose(weights_along(n), np.maximum(want / want.max(), SMALLEST), rtol=1e-12)
    assert weights_along(64).min() == SMALLEST


def by_hand(x, window, overlap, pad=0, flips=((),)):
    """Return the weighted mean of the predictions of all windows of samples, a mean over mirror images.

    Samples are padded along the width by `pad` elements before, and to the width of the window after.
    """
    (known,) = read_header(Path("out/checkpoints/latest.h5").resolve())[0].normalization.values()
    mean = known["mean"]
    wide = np.tile(np.float64(mean), (*x.shape[:2], max(x.shape[2], window[1]), 1))
    inside = slice(pad, pad + x.shape[2])
    wide[:, :, inside] = x
    weights, result = np.multiply.outer(*map(weights_along, window))[..., None], 0
    for axes in flips:
        image = np.flip(wide, axes)
        places = [
            (slice(top, top + window[0]), slice(left, left + window[1]))
            for top, left in itertools.product(*(starts_along(n, w, overlap) for n, w in zip(wide.shape[1:], window)))
        ]
        write_samples("windows.h5", np.concatenate([image[:, at, along] for at, along in places]))
        apply("out", ["windows.h5"], "y.h5", comm=MPI.COMM_SELF)
        found = np.split(read("y.h5"), len(places))
        sums, total = np.zeros((*wide.shape[:3], found[0].shape[-1])), np.zeros((*wide.shape[1:3], 1))
        for at, y in zip(places, found):
            sums[(slice(None), *at)] += weights * y
            total[at] += weights
        result = result + np.flip(sums / total, axes) / len(flips)
    return result[:, :, inside]


@pytest.mark.ranks(1, 2, 4)
def test_sums_of_windows(comm, config):
    """Samples of two sizes, one narrower than the window, alone and together, also with flips."""
    window = (EDGE, EDGE)
    if comm.rank == 0:
        train(config, ["training.epochs=1"], comm=MPI.COMM_SELF)
        rng = np.random.default_rng(5)
        x, narrow = rng.standard_normal((3, HEIGHT, WIDTH, 3)), rng.standard_normal((2, HEIGHT, EDGE - 5, 3))
        write_samples("wide.h5", x)
        write_samples("narrow.h5", narrow)
        np.save("wide.npy", by_hand(x, window, 0.5))
        np.save("narrow.npy", by_hand(narrow, window, 0.5, 3))
        np.save("flipped.npy", by_hand(x, window, 0.25, flips=((), (1,))))
    comm.barrier()
    for number, cut in enumerate(CUTS[comm.size]):
        sets, both = [*overrides_of(cut), "training.batch=4"], f"both{number}"
        found = apply("out", ["wide.h5", "narrow.h5"], both, sets, window=window, comm=comm)
        assert found["windows"] == 3 * 4 * 2 + 2 * 4 and found["computed"] == 5
        for name in ("wide", "narrow"):
            np.testing.assert_allclose(read(f"{both}/{name}.h5"), np.load(f"{name}.npy"), rtol=1e-9, atol=1e-12)
        apply("out", ["wide.h5"], "x.h5", sets, window=window, overlap=0.25, flips=["height"], comm=comm)
        np.testing.assert_allclose(read("x.h5"), np.load("flipped.npy"), rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(1)
def test_classes_coarser_than_the_samples_and_refusals(comm, config, capsys):
    coarse = ["model.decoder=false", 'data.rule="any"', "training.epochs=1"]
    train(config, coarse, comm=comm)
    factor = EDGE // load_shape()
    write_samples("new.h5", np.random.default_rng(5).standard_normal((1, 2 * EDGE + factor, 2 * EDGE, 3)))
    assert run(["apply", "out", "new.h5", "-o", "y.h5", "--window", "16,16", "--what", "classes"]) == 0
    assert "15 windows of 16,16, overlap 0.5" in capsys.readouterr().out
    assert read("y.h5").dtype == np.uint8
