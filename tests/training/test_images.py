"""Tests of mirror images and sliding windows in `apply`: equal to sums by hand under every cut, refusals."""

import itertools
from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.cli.run import run
from halograd.data.windows import SMALLEST, starts_along, weights_along
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


@pytest.mark.ranks(1, 2, 4)
def test_mean_of_images(comm, config):
    if comm.rank == 0:
        train(config, ["training.epochs=1"], comm=MPI.COMM_SELF)
        with h5py.File("data.h5") as file:
            x = file["inputs"][:6]
        want = 0
        for axes in ((), (1,), (2,), (1, 2)):
            write_samples("image.h5", np.flip(x, axes))
            apply("out", ["image.h5"], "p.h5", comm=MPI.COMM_SELF)
            want = want + np.flip(read("p.h5"), axes) / 4
        write_samples("new.h5", x)
        np.save("want.npy", want)
    comm.barrier()
    for number, cut in enumerate(CUTS[comm.size]):
        apply("out", ["new.h5"], f"mean{number}.h5", overrides_of(cut), comm=comm, flips=["width", "height"])
        np.testing.assert_allclose(read(f"mean{number}.h5"), np.load("want.npy"), rtol=1e-9, atol=1e-12)
    if comm.rank == 0:
        with pytest.raises(UserError, match=r"--flips: .*height, width, got depth"):
            apply("out", ["new.h5"], "x.h5", ["strategy={sample = 1}"], comm=MPI.COMM_SELF, flips=["depth"])


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


def by_hand(x, window, overlap, pad=0, flips=((),), factor=1):
    """Return the weighted mean of the predictions of all windows of samples, a mean over mirror images.

    Samples are padded along the width by `pad` elements before, and to the width of the window after. Predictions are
    coarser by `factor`.
    """
    (known,) = read_header(Path("out/checkpoints/latest.h5").resolve())[0].normalization.values()
    mean = known["mean"]
    wide = np.tile(np.float64(mean), (*x.shape[:2], max(x.shape[2], window[1]), 1))
    inside = slice(pad, pad + x.shape[2])
    wide[:, :, inside] = x
    result, extents = 0, wide.shape[1:3]
    places = [*itertools.product(*(starts_along(n, w, overlap, factor) for n, w in zip(extents, window)))]
    weights = np.multiply.outer(*(weights_along(w // factor) for w in window))[..., None]
    for axes in flips:
        image = np.flip(wide, axes)
        parts = [image[:, top : top + window[0], left : left + window[1]] for top, left in places]
        write_samples("windows.h5", np.concatenate(parts))
        apply("out", ["windows.h5"], "y.h5", comm=MPI.COMM_SELF)
        sums = np.zeros((len(x), *(n // factor for n in extents), 1))
        total = np.zeros(sums.shape[1:])
        for place, y in zip(places, np.split(read("y.h5"), len(places))):
            at = tuple(slice(start // factor, start // factor + n) for start, n in zip(place, weights.shape))
            sums[(slice(None), *at)] += weights * y
            total[at] += weights
        result = result + np.flip(sums / total, axes) / len(flips)
    return result[:, :, slice(inside.start // factor, inside.stop // factor)]


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


WRONG = {
    "16": "--window: expected one extent for each of 2 axes, got '16'",
    "16,a": "--window: expected extents such as 128,128,128, got '16,a'",
    "0,16": "--window: expected one extent per axis, such as 128,128,128, got '0,16'",
    "16,16 --overlap 1": "--overlap: expected a number from 0 to below 1, got 1.0",
    "16,16 --set model.resolution=16": "--window: expected no --set of model.resolution or data.extents with it",
    "18,16": "--window: expected outputs of the window's extents (18, 16) or coarser by whole factors, got (5, 4) of",
}


@pytest.mark.ranks(1)
def test_coarser_predictions(comm, config, capsys):
    """Windows begin at multiples of what a prediction covers; a job goes on after the last complete sample."""
    train(config, ["model.decoder=false", 'data.rule="any"', "training.epochs=1"], comm=comm)
    x = np.random.default_rng(5).standard_normal((3, 2 * EDGE + 4, 2 * EDGE, 3))
    write_samples("new.h5", x)

    def stop(done, _):
        raise RuntimeError(f"after {done}")

    with pytest.raises(RuntimeError, match="after 1"):
        apply("out", ["new.h5"], "x.h5", window=(EDGE, EDGE), overlap=0.3, comm=comm, report=stop)
    found = apply("out", ["new.h5"], "x.h5", window=(EDGE, EDGE), overlap=0.3, comm=comm)
    assert found["computed"] == 2 and found["windows"] == 3 * 3 * 3
    np.testing.assert_allclose(read("x.h5"), by_hand(x, (EDGE, EDGE), 0.3, factor=4), rtol=1e-9, atol=1e-12)
    assert run(["apply", "out", "new.h5", "-o", "y.h5", "--window", "16,16", "--what", "classes"]) == 0
    assert "36 windows of 16,16, overlap 0.5" in capsys.readouterr().out
    assert read("y.h5").dtype == np.uint8 and read("y.h5").shape == (3, 9, 8, 1)
    for text, message in WRONG.items():
        assert run(["apply", "out", "new.h5", "-o", "y.h5", "--window", *text.split()]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(UserError, match="--overlap: expected --window with it"):
        apply("out", ["new.h5"], "y.h5", overlap=0.3, comm=comm)
    write_samples("new.h5", x[:, 1:])
    with pytest.raises(UserError, match=r"multiples of \[4, 4\], .* got \[35, 32\]"):
        apply("out", ["new.h5"], "y.h5", window=(EDGE, EDGE), comm=comm)
