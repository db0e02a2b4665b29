"""Samples of several files: found by patterns, with all files of each, and read as one."""

import h5py
import numpy as np
import pytest

from halograd.data import DataError, open_dataset
from halograd.data.dataset import named
from halograd.data.files import locate
from halograd.dtensor import Box

RNG = np.random.default_rng(3)


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def found(folder, inputs, targets=None, others=None):
    datasets = {**named(inputs, "x"), **named(targets, "target")}
    return [one.sample for one in locate(folder, None, datasets, named(others, "target"))]


def test_samples_are_found_by_patterns(tmp_path):
    """nnU-Net's names, those of one folder per patient, and an image whose name is the beginning of its mask's."""
    touch(tmp_path / "a", *(f"imagesTr/c{n}_000{k}.nii.gz" for n in (2, 10) for k in (0, 1)))
    touch(tmp_path / "a", "labelsTr/c2.nii.gz", "labelsTr/c10.nii.gz", "dataset.json", "imagesTr/notes.txt")
    inputs = ["imagesTr/{sample}_0000.nii.gz", "imagesTr/{sample}_0001.nii.gz"]
    assert found(tmp_path / "a", inputs, "labelsTr/{sample}.nii.gz") == ["c2", "c10"]
    touch(tmp_path / "b", "p1/p1_t1.nii", "p1/p1_seg.nii", "p2/p2_t1.nii", "p2/p2_seg.nii", "p2/p1_t1.nii")
    assert found(tmp_path / "b", "{sample}/{sample}_t1.nii", "{sample}/{sample}_seg.nii") == ["p1", "p2"]
    touch(tmp_path / "c", "p1.nii", "p1_seg.nii", "p2.nii")
    assert found(tmp_path / "c", "{sample}.nii", None, "{sample}_seg.nii") == ["p1", "p2"]
    touch(tmp_path / "d", "[1]/p1.nii", "[1]/._p1.nii")  # a name that is no pattern, and a hidden file of macOS
    assert found(tmp_path / "d", "[1]/{sample}.nii") == ["p1"]


def test_a_sample_without_all_files_is_named(tmp_path):
    touch(tmp_path, *(f"p{n}_t1.nii" for n in range(12)), *(f"p{n}_t2.nii" for n in range(7)))
    message = r"expected 2 files of each of the 12 samples in .*, got fewer of p7 \(no p7_t2.nii\), p8 .*, and 2 more;"
    with pytest.raises(DataError, match=message):
        found(tmp_path, ["{sample}_t1.nii", "{sample}_t2.nii"])
    with pytest.raises(DataError, match=r"expected files {sample}.tif in .*, got none; correct the pattern"):
        found(tmp_path, "{sample}.tif")
    with pytest.raises(DataError, match=r"expected {sample} in all names of datasets or in none, got 'mask'"):
        found(tmp_path, "{sample}_t1.nii", "mask")
    with pytest.raises(DataError, match=r"expected {sample} in all names of datasets or in none, got '.*\+ b'"):
        found(tmp_path, ["{sample}_t1.nii", "b"])
    with pytest.raises(DataError, match=r"expected a folder with the files of the samples, got .*missing"):
        found(tmp_path / "missing", "{sample}_t1.nii")


def write(path, values, slope=(1.0, 0.0)):
    nibabel = pytest.importorskip("nibabel")
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), path)
    if path.suffix == ".nii":
        data = bytearray(path.read_bytes())
        data[112:120] = np.array(slope, "<f4").tobytes()
        path.write_bytes(data)


def test_modalities_are_channels(tmp_path):
    """Modalities of other types and factors are the channels of one input, for patients of several sizes."""
    shapes, want = [(6, 5, 4), (4, 7, 4)], []
    for n, shape in enumerate(shapes):
        t1, t2 = RNG.integers(0, 99, shape).astype(np.int16), RNG.random(shape).astype(np.float32)
        write(tmp_path / f"p{n}_t1.nii", t1, (0.5, -1.0))
        write(tmp_path / f"p{n}_t2.nii.gz", t2)
        write(tmp_path / f"p{n}_seg.nii.gz", (t1 > 50).astype(np.uint8))
        want.append((np.stack([0.5 * t1 - 1, t2], -1), t1 > 50))
    with open_dataset(
        tmp_path, ["{sample}_t1.nii", "{sample}_t2.nii.gz"], {"seg": "{sample}_seg.nii.gz"}, several_sizes=True
    ) as data:
        assert data.fields["x"].channel_names == ["t1", "t2"] and data.fields["x"].shape == (6, 7, 4, 2)
        assert data.source(1) == (str(tmp_path / "p1_t1.nii"), 0) and data.names == ["p0_t1.nii 1", "p1_t1.nii 1"]
        for n in range(len(shapes)):
            for name, values in (("x", want[n][0]), ("seg", want[n][1][..., None])):
                for box in (Box.of_shape((1, *values.shape)), Box.of_ranges([(0, 1), (2, 4), (1, 5), (0, 4), (0, 1)])):
                    out = np.empty(box.shape, np.float32)
                    data.read(name, [n], box, out)
                    np.testing.assert_allclose(out[0], values[box.slices()[1:]].astype(np.float32))
        out = np.empty((1, 2, 3, 4, 1), np.float32)
        data.read("x", [0], Box.of_ranges([(0, 1), (0, 2), (0, 3), (0, 4), (1, 2)]), out)  # the second modality only
        np.testing.assert_array_equal(out[0], want[0][0][:2, :3, :, 1:].astype(np.float32))


def test_files_with_several_arrays(tmp_path):
    for name in ("a", "b"):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            for dataset in ("u", "v"):
                file.create_dataset(dataset, data=RNG.random((1, 4, 4, 2))).attrs["layout"] = "NHWC"
    with open_dataset(tmp_path, ["{sample}.h5:u", "{sample}.h5:v"], None) as data:
        assert len(data) == 2 and data.fields["x"].shape == (4, 4, 4)
        out = np.empty((2, 4, 4, 4), np.float32)
        data.read("x", [1, 0], Box.of_shape(out.shape), out)
    for k, name in enumerate("ba"):
        with h5py.File(tmp_path / f"{name}.h5") as file:
            np.testing.assert_array_equal(out[k], np.concatenate([file["u"][0], file["v"][0]], -1).astype(np.float32))
    with pytest.raises(DataError, match=r'expected one array, or its name .* "{sample}.h5:u", got u, v'):
        open_dataset(tmp_path, "{sample}.h5", None)
    with pytest.raises(DataError, match=r"data.unpack: expected true with several datasets per input"):
        open_dataset(tmp_path, ["{sample}.h5:u", "{sample}.h5:v"], None, unpack=False)


def test_modalities_on_other_grids_are_refused(tmp_path):
    write(tmp_path / "p_t1.nii", np.zeros((4, 4, 4), np.int16))
    write(tmp_path / "p_t2.nii", np.zeros((4, 4, 5), np.int16))
    with pytest.raises(DataError, match=r"expected arrays on one grid.*\(1, 4, 4, 4, 1\), \(1, 4, 4, 5, 1\)"):
        open_dataset(tmp_path, ["{sample}_t1.nii", "{sample}_t2.nii"], None)
