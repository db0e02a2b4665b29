"""Samples of different size in one data set: boxes, statistics, counts and checks read only what lies inside them."""

import h5py
import numpy as np
import pytest

from halograd.data import DataError, channel_statistics, open_dataset
from halograd.data.masked import Masked
from halograd.data.source import sample_shape
from halograd.data.steps import TimeSteps
from halograd.data.survey import count_classes, find_invalid, look_at, look_at_data
from halograd.data.targets import TargetRange, TargetReduction
from halograd.dtensor import Box
from tests.training.runs import write_arrays

SIZES = ((2, 8, 12), (1, 80, 4), (3, 12, 8))  # samples, rows and columns of each file
NAMES = {"inputs": {"x": "inputs", "height": "height"}, "targets": {"coarse": "coarse", "mask": "mask"}}


def write(folder):
    """Write files of samples of different size; return the fields of every sample by name."""
    rng, samples = np.random.default_rng(3), []
    for i, (n, *grid) in enumerate(SIZES):
        half = [extent // 2 for extent in grid]
        arrays = {
            "inputs": rng.standard_normal((n, *grid, 2)).astype(np.float32),
            "mask": rng.integers(0, 3, (n, *grid)).astype(np.uint8),
            "coarse": rng.random((n, *half)).astype(np.float32),
            "height": rng.random(grid).astype(np.float32),
        }
        write_arrays(folder / f"s{i}.h5", arrays, inputs="NHWC", height="HW")
        for k in range(n):
            found = {name: arrays[name][k] for name in ("inputs", "mask", "coarse")} | {"height": arrays["height"]}
            found = {name: values.reshape(*values.shape[:2], -1) for name, values in found.items()}
            samples.append({"x": found.pop("inputs"), **found})
    return samples


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sizes")
    samples = write(folder)
    with open_dataset(folder, several_sizes=True, **NAMES) as dataset:
        yield dataset, samples


def test_boxes_lie_inside_the_samples(written):
    dataset, samples = written
    assert dataset.fields["x"].shape == (80, 12, 2) and dataset.fields["coarse"].shape == (40, 6, 1)
    for name in dataset.fields:
        shapes = [sample[name].shape for sample in samples]
        assert dataset.extents[name].tolist() == [list(shape[:-1]) for shape in shapes]
        assert [sample_shape(dataset, name, k) for k in range(len(samples))] == shapes
    for name, (low, high) in (("x", (3, 30)), ("mask", (0, 80)), ("coarse", (2, 5)), ("height", (7, 9))):
        indices = (3, 0, 2)
        box = Box((0, low, -1, 0), (3, high, 20, dataset.fields[name].shape[-1]))
        out, want = np.full(box.shape, 7.0, np.float32), np.full(box.shape, 7.0, np.float32)
        for k, index in enumerate(indices):
            part = samples[index][name][low:high]
            want[k, : part.shape[0], 1 : 1 + part.shape[1]] = part
        dataset.read(name, indices, box, out)
        np.testing.assert_array_equal(out, want)


def test_statistics_counts_and_checks(written):
    dataset, samples = written
    flat = np.concatenate([sample["x"].reshape(-1, 2) for sample in samples]).astype(np.float64)
    found = channel_statistics(dataset, "x", range(6))
    assert found.count == len(flat)
    np.testing.assert_allclose(found.mean, flat.mean(0), atol=1e-12)
    np.testing.assert_allclose(found.std, flat.std(0), rtol=1e-10)
    labels = np.concatenate([sample["mask"].ravel() for sample in samples]).astype(np.int64)
    assert count_classes(dataset, "mask", 3, range(6)).tolist() == np.bincount(labels).tolist()
    assert count_classes(dataset, "mask", 3, range(6), TargetReduction("center", (2, 2))).sum() == labels.size // 4
    assert look_at(dataset, "x").constant == {}
    assert look_at_data(dataset, {"x": found}, 2, 64) > 0
    limits = {"mask": TargetRange(0, 1, whole=True)}
    wrong = {k for k, sample in enumerate(samples) if sample["mask"].max() > 1}
    assert set(find_invalid(dataset, limits, range(6))) == wrong


def test_views_have_the_sizes_of_their_samples(written):
    dataset, samples = written
    steps = TimeSteps(dataset, 1)
    assert steps.rows.tolist() == [0, 3, 4]
    assert steps.extents["x"].tolist() == [[8, 12], [12, 8], [12, 8]]
    limits = {"mask": TargetRange(0, 1, whole=True)}
    before = dataset.lenient
    masked = Masked(dataset, {"weights": ["mask"]}, {"weights": 1}, limits)
    assert masked.extents["weights"].tolist() == dataset.extents["mask"].tolist()
    out = np.empty((1, *sample_shape(masked, "weights", 2)), np.float32)
    masked.read("weights", [2], Box.of_shape(out.shape), out)
    np.testing.assert_array_equal(out[0], samples[2]["mask"] <= 1)
    beyond = np.full((1, 40, 40, 1), 0.5, np.float32)
    masked.read("weights", [2], Box.of_shape(beyond.shape), beyond)
    largest, (high, wide) = masked.fields["weights"].shape, samples[2]["mask"].shape[:2]
    assert (high, wide) != largest[:2]
    assert not beyond[:, high : largest[0], : largest[1]].any() and not beyond[:, : largest[0], wide : largest[1]].any()
    dataset.lenient = before


def test_what_is_refused(tmp_path):
    write(tmp_path)
    with pytest.raises(DataError, match=r"s1.h5: 'inputs': expected samples of shape \(8, 12, 2\) as in .*s0.h5, got"):
        open_dataset(tmp_path, **NAMES)
    with h5py.File(tmp_path / "s1.h5", "r+") as file:
        del file["coarse"]
        file["coarse"] = np.zeros((1, 80, 4), np.float32)
    message = (
        r"s1.h5: 'coarse': expected shapes \(and those of 'inputs'\) with the factors \(\(4, 6, 1\), \(8, 12, 2\)\) as "
        r"in .*s0.h5, got \(\(80, 4, 1\), \(80, 4, 2\)\); write it so, or leave that file out"
    )
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path, several_sizes=True, **NAMES)
