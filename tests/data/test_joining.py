"""Tests of files of predictions in one piece: numbers, attributes and dimension scales of virtual datasets."""

import h5py
import numpy as np
import pytest

from halograd.data import DataError, repack
from halograd.data.writers import join


def write(folder):
    """Write a file of two parts with a dimension scale; return its path and numbers."""
    out, x = folder / "p.h5", np.arange(2 * 6 * 4 * 1, dtype=np.float32).reshape(2, 6, 4, 1)
    (folder / "p.h5.parts/0").mkdir(parents=True)
    layout = h5py.VirtualLayout(x.shape, x.dtype)
    for k in range(2):
        with h5py.File(folder / f"p.h5.parts/0/{k}.h5", "w") as file:
            file["y"] = x[:, 3 * k : 3 * k + 3]
        layout[:, 3 * k : 3 * k + 3] = h5py.VirtualSource(f"p.h5.parts/0/{k}.h5", "y", (2, 3, 4, 1))
    with h5py.File(out, "w") as file:
        y = file.create_virtual_dataset("y", layout, np.nan)
        y.attrs["units"] = "K"
        file["lat"] = np.arange(6.0)
        file["lat"].make_scale("lat")
        y.dims[1].attach_scale(file["lat"])
        y.dims[1].label = "lat"
        file.attrs["needs"] = "p.h5.parts/0/0.h5\np.h5.parts/0/1.h5"
    return out, x


def test_joined(tmp_path, monkeypatch):
    monkeypatch.setattr(repack, "SLAB", 40)
    out, x = write(tmp_path)
    assert join(out) and not join(out)
    assert [path.name for path in tmp_path.iterdir()] == ["p.h5"]
    with h5py.File(out) as file:
        y = file["y"]
        np.testing.assert_array_equal(y[()], x)
        assert not y.is_virtual and y.attrs["units"] == "K" and "needs" not in file.attrs
        assert y.dims[1].label == "lat" and y.dims[1][0] == file["lat"] and sorted(file) == ["lat", "y"]


def test_missing_part(tmp_path):
    out, _ = write(tmp_path)
    (tmp_path / "p.h5.parts/0/1.h5").unlink()
    with pytest.raises(DataError, match=r"1.h5, a part of .*p.h5: no such file; apply again"):
        join(out)
    assert (tmp_path / "p.h5.parts/0/0.h5").exists()
