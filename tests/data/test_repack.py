"""Copies of files with other chunks: numbers, filters, attributes, scales and links are kept."""

import h5py
import numpy as np
import pytest

from halograd.cli.run import run
from halograd.data import DataError
from halograd.data import repack as module
from halograd.data.repack import repack

X = np.random.default_rng(1).integers(0, 9, (7, 6, 5, 2)).astype(">i2")


def write(path):
    with h5py.File(path, "w") as file:
        file.attrs["title"] = "t"
        x = file.create_dataset("run/x", data=X, chunks=(4, 6, 5, 1), compression=3, shuffle=True, fillvalue=3)
        x.attrs.update(layout="NHWC", units="K")
        file.create_dataset("run/plain", data=X)
        file["mask"] = X[..., 0]
        file["link"] = h5py.SoftLink("/run/x")
        for axis, (name, n) in enumerate((("time", 7), ("lat", 6))):
            file[name] = np.arange(float(n))
            file[name].make_scale(name)
            for dataset in ("run/x", "mask"):
                file[dataset].dims[axis].attach_scale(file[name])
    return path


def test_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SLAB", 200)
    source, path = write(tmp_path / "a.h5"), tmp_path / "b.h5"
    repack(source, path, {"run/x": (1, 3, 5, 2), "run/plain": (7, 2, 2, 2)})
    with h5py.File(source) as old, h5py.File(path) as new:
        for name in ("run/x", "run/plain", "mask", "time", "link"):
            assert new[name].dtype == old[name].dtype
            np.testing.assert_array_equal(new[name][()], old[name][()])
        x = new["run/x"]
        assert (x.chunks, x.compression, x.compression_opts, x.shuffle) == ((1, 3, 5, 2), "gzip", 3, True)
        assert new["run/plain"].chunks == (7, 2, 2, 2) and new["mask"].chunks is None and x.fillvalue == 3
        assert dict(new.attrs) == {"title": "t"} and x.attrs["units"] == "K"
        for name in ("run/x", "mask"):
            assert [new[name].dims[k][0] == new[scale] for k, scale in enumerate(("time", "lat"))] == [True, True]
        assert isinstance(new.get("link", getlink=True), h5py.SoftLink)


def test_command(tmp_path, capsys):
    source = write(tmp_path / "a.h5")
    assert run(["data", "repack", str(source), str(tmp_path / "b.h5"), "--chunk", "mask=1x6x5"]) == 0
    assert "with other chunks of mask" in capsys.readouterr().out
    assert run(["data", "repack", str(source), str(tmp_path / "c.h5"), "--chunk", "mask=1x6y5"]) == 2
    assert "expected DATASET=SHAPE, such as inputs=1x128x128x4, got 'mask=1x6y5'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ({"y": (1,)}, "expected a dataset 'y', got none; it has "),
        ({"run": (1,)}, "expected a dataset 'run', got none"),
        ({"mask": (1, 6)}, "expected a chunk within 7x6x5, got 1x6"),
        ({"mask": (1, 7, 5)}, "expected a chunk within 7x6x5, got 1x7x5"),
    ],
)
def test_refused(tmp_path, chunks, message):
    with pytest.raises(DataError, match=message):
        repack(write(tmp_path / "a.h5"), tmp_path / "b.h5", chunks)
    assert not (tmp_path / "b.h5").exists()
    with pytest.raises(DataError, match=r"missing\.h5: no such file"):
        repack(tmp_path / "missing.h5", tmp_path / "b.h5", chunks)
    with pytest.raises(DataError, match="it exists; give another name"):
        repack(tmp_path / "a.h5", tmp_path / "a.h5", {"mask": (1, 6, 5)})


def test_a_virtual_dataset(tmp_path):
    """It becomes a dataset of its own; without its source, which HDF5 would read as zeros, it is refused."""
    write(tmp_path / "a.h5")
    layout = h5py.VirtualLayout(X.shape, X.dtype)
    layout[:] = h5py.VirtualSource("a.h5", "run/x", X.shape)
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    repack(tmp_path / "virtual.h5", tmp_path / "b.h5", {"x": (1, 3, 5, 2)})
    with h5py.File(tmp_path / "b.h5") as new:
        assert not new["x"].is_virtual
        np.testing.assert_array_equal(new["x"][()], X)
    (tmp_path / "a.h5").unlink()
    with pytest.raises(DataError, match=r"a\.h5"):
        repack(tmp_path / "virtual.h5", tmp_path / "c.h5", {"x": (1, 3, 5, 2)})
    assert not (tmp_path / "c.h5").exists()
