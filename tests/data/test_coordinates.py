"""Coordinates of samples in a file of predictions are those of the data or none, and never those of other cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from halograd.data import open_dataset
from halograd.data.coordinates import SOURCES, write_coordinates, write_sources

H, W, C = 6, 4, 3
LAT, LON = np.linspace(10, 5, H), np.linspace(-2, 1, W)
ABSENT = "This is a netCDF dimension but not a netCDF variable."


def write(path: Path, samples: int = 2, first: bool = False, **changes: Any) -> Path:
    """Write a file in netCDF form, channels first or last; `changes` replace datasets, and None removes one."""
    with h5py.File(path, "w") as file:
        order = ("time", "channel", "lat", "lon") if first else ("time", "lat", "lon", "channel")
        sizes = {"time": samples, "lat": H, "lon": W, "channel": C}
        file["inputs"] = np.ones([sizes[name] for name in order], "f4")
        start = changes.pop("start", 0.0)
        given = {"time": start + np.arange(samples) * 0.5, "lat": LAT, "lon": LON, "channel": np.arange(C)}
        for name, array in {**given, **changes}.items():
            if array is not None:
                file[name] = array
                if name in sizes:
                    file[name].make_scale(name)
                    file["inputs"].dims[order.index(name)].attach_scale(file[name])
        file["inputs"].attrs["layout"] = "NCHW" if first else "NHWC"
        if changes.get("lat", 0) is not None:
            file["lat"].attrs.update(units="degrees_north", valid_range=np.array([-90, 90], "f4"))
        if changes.get("time", 0) is not None:
            file["time"].attrs.update(units="days since 2001-01-01", calendar="noleap")
    return path


def add_mapping(path: Path, **attributes: Any) -> None:
    with h5py.File(path, "a") as file:
        file["crs"] = np.int16(7)
        file["crs"].attrs.update({"grid_mapping_name": "transverse_mercator", "epsg_code": "EPSG:32632", **attributes})
        file["inputs"].attrs["grid_mapping"] = "crs"


def predicted(folder: Path, data: Any, outputs: dict[str, tuple[int, ...]] | None = None) -> tuple[Path, list[str]]:
    """Return a file with datasets of these shapes and the data's coordinates, and the list of omitted variables."""
    outputs = {"prediction": (H, W, 1)} if outputs is None else outputs
    with open_dataset(data, targets=None) as dataset, h5py.File(folder / "predicted.h5", "w") as file:
        for name, shape in outputs.items():
            file[name] = np.zeros((len(dataset), *shape), "f4")
        write_sources(file, dataset, range(len(dataset)))
        left_out = write_coordinates(file, dataset, outputs)
    return folder / "predicted.h5", left_out


def names_of(file: h5py.File, name: str) -> list[list[str]]:
    """Return the names of the scales of each axis of a dataset, after a check of their extents."""
    found = [list(dim.values()) for dim in file[name].dims]
    for size, scales in zip(file[name].shape, found):
        assert all(scale.shape == (size,) for scale in scales)
    return [[scale.name.strip("/") for scale in scales] for scales in found]


@pytest.mark.parametrize("first", [False, True])
def test_they_are_those_of_the_samples(tmp_path, first):
    """Coordinates are copied for any storage order, with attributes in their types; input channels are not copied."""
    path = write(tmp_path / "data.h5", first=first)
    add_mapping(path, inverse_flattening=np.float32(298.25), towgs84=np.arange(7.0))
    out, left_out = predicted(tmp_path, path)
    assert left_out == []
    with h5py.File(out) as file, h5py.File(path) as data:
        assert names_of(file, "prediction") == [["time"], ["lat"], ["lon"], ["prediction_channel"]]
        assert all(names_of(file, name) == [["time"]] for name in SOURCES)
        assert "channel" not in file and file["prediction"].attrs["grid_mapping"] == "crs"
        assert "coordinates" not in file["prediction"].attrs
        for name in ("time", "lat", "lon", "crs"):
            np.testing.assert_array_equal(file[name][()], data[name][()])
            assert file[name].dtype == data[name].dtype
            ours = {k: v for k, v in file[name].attrs.items() if k != "REFERENCE_LIST"}
            theirs = {k: v for k, v in data[name].attrs.items() if k != "REFERENCE_LIST"}
            assert ours.keys() == theirs.keys()
            for key, value in ours.items():
                np.testing.assert_array_equal(value, theirs[key])
                assert type(value) is type(theirs[key])
                assert getattr(value, "dtype", None) == getattr(theirs[key], "dtype", None)


def test_of_several_files_samples_are_joined_and_grids_compared(tmp_path):
    """Samples of several files are joined; if grids differ, every sample has its own coordinates."""
    for number, samples in enumerate((2, 1, 3)):
        write(tmp_path / f"s{number + 9}.h5", samples, number == 1, start=100.0 * number, lon=LON + (number == 2))
    out, left_out = predicted(tmp_path, tmp_path)
    assert left_out == []
    with h5py.File(out) as file:
        np.testing.assert_array_equal(file["time"], [0, 0.5, 100, 200, 200.5, 201])
        np.testing.assert_array_equal(file["lat"], LAT)
        np.testing.assert_array_equal(file["lon"], [LON, LON, LON, LON + 1, LON + 1, LON + 1])
        assert names_of(file, "prediction") == [["time"], ["lat"], ["width"], ["prediction_channel"]]
        assert names_of(file, "lon") == [["time"], ["width"]] and file["prediction"].attrs["coordinates"] == "lon"
        assert file["source_sample"][()].tolist() == [0, 1, 0, 0, 1, 2]


@pytest.mark.parametrize(
    "change, name, why",
    [
        (lambda file: file["time"].attrs.update(units="days since 2001-02-01"), "time", "it has another 'units'"),
        (lambda file: file["time"].attrs.__delitem__("calendar"), "time", "it has another 'calendar'"),
        (lambda file: file["lat"].attrs.update(scale_factor=0.1), "lat", "it has another 'scale_factor'"),
        (lambda file: file["lat"].attrs.update(units="m", comment="y"), "lat", "it has another 'units'"),
        (lambda file: file["crs"].attrs.update(epsg_code="EPSG:32633"), "crs", "it has another 'epsg_code'"),
        (lambda file: file["crs"].attrs.update(more=1), "crs", "it has another 'more'"),
        (lambda file: file["crs"].write_direct(np.array(8, "i2")), "crs", "it is 8, not 7"),
        (lambda file: file.__delitem__("crs"), "crs", "it is missing"),
        (lambda file: file["inputs"].dims[2].detach_scale(file["lon"]), "lon", "it is missing"),
    ],
)
def test_what_means_something_else_in_another_file_is_left_out(tmp_path, change, name, why):
    for number in (1, 2):
        add_mapping(write(tmp_path / f"{number}.h5"))
    with h5py.File(tmp_path / "2.h5", "a") as file:
        change(file)
    out, left_out = predicted(tmp_path, [tmp_path / "1.h5", tmp_path / "2.h5"])
    assert left_out == [f"{name} (in {tmp_path / '2.h5'}: {why})"]
    with h5py.File(out) as file:
        assert ("grid_mapping" in file["prediction"].attrs) == (name != "crs")
        assert all(len(scales) == 1 for scales in names_of(file, "prediction"))
        if name in file:  # the dimension alone
            assert file[name].attrs["NAME"].decode().startswith(ABSENT)


def test_of_another_extent_there_are_none(tmp_path):
    """An output axis of another extent has no coordinates, and the grid mapping is kept only for the whole grid."""
    add_mapping(write(tmp_path / "data.h5"))
    shapes = {"rows": (H // 2, W, 2), "whole": (H, W, 1), "label": (5,)}
    out, left_out = predicted(tmp_path, tmp_path / "data.h5", shapes)
    with h5py.File(out) as file:
        assert left_out == []
        assert names_of(file, "rows") == [["time"], ["rows_1"], ["lon"], ["rows_channel"]]
        assert names_of(file, "whole") == [["time"], ["lat"], ["lon"], ["whole_channel"]]
        assert names_of(file, "label") == [["time"], ["label_channel"]]
        assert [name for name in shapes if "grid_mapping" in file[name].attrs] == ["whole"]
    out, left_out = predicted(tmp_path, tmp_path / "data.h5", {"rows": (H // 2, W, 2), "label": (5,)})
    why = f"samples are {(H, W)}, predictions {(H // 2, W)}, ()"
    assert left_out == [f"lat ({why})", f"crs ({why})"]
    with h5py.File(out) as file:
        assert "lat" not in file and "crs" not in file and names_of(file, "label")[0] == ["time"]
    out, left_out = predicted(tmp_path, tmp_path / "data.h5", {"large": (2 * H, 2 * W, 1)})
    with h5py.File(out) as file:
        assert {text.split()[0] for text in left_out} == {"lat", "lon", "crs"}
        assert names_of(file, "large")[:2] == [["time"], ["large_1"]]


def test_of_several_inputs_the_one_on_the_grid_of_predictions_counts(tmp_path):
    """Coordinates come from the input on the grid of the predictions, such as fine topography next to coarse fields."""
    with h5py.File(write(tmp_path / "data.h5"), "a") as file:
        file["fine"], file["y"] = np.ones((2, 2 * H, 2 * W, 1)), np.arange(2.0 * H)
        file["fine"].dims[1].attach_scale(file["y"])
        file["fine"].attrs["layout"] = "NHWC"
    names = {"x": "inputs", "topography": "fine"}
    for shape, want in (((H, W, 1), ["lat"]), ((2 * H, 2 * W, 1), ["y"])):
        with open_dataset(tmp_path / "data.h5", names, None) as dataset, h5py.File(tmp_path / "p.h5", "w") as file:
            file["prediction"] = np.zeros((2, *shape))
            assert write_coordinates(file, dataset, {"prediction": shape}) == []
            assert names_of(file, "prediction")[1] == want


def test_auxiliary_coordinates_and_bounds(tmp_path):
    """Two-dimensional, scalar and text coordinates are copied from the group of the input, or from a group above."""
    with h5py.File(write(tmp_path / "data.h5"), "a") as file:
        file["bounds"] = np.stack([LAT + 0.5, LAT - 0.5], -1)
        file["lat"].attrs["bounds"] = "bounds"
        file["area"], file["level"] = np.arange(H * W).reshape(H, W), 850.0
        file["station"] = np.array(["Ulm", "Köln"], object)
        file["track"] = np.arange(2 * W).reshape(2, W)
        file["track"].dims[0].attach_scale(file["time"])
        file["track"].dims[1].attach_scale(file["lon"])
        file["band"], file["odd"] = np.arange(C), np.arange(17)
        file.move("inputs", "fields/inputs")
        file["fields"]["near"] = 2.0
        file["fields/inputs"].attrs["coordinates"] = "area level station track near band odd gone"
    with open_dataset(tmp_path / "data.h5", "fields/inputs", None) as data, h5py.File(tmp_path / "p.h5", "w") as file:
        file["prediction"] = np.zeros((2, H, W, 2))
        left_out = write_coordinates(file, data, {"prediction": (H, W, 2)})
        assert left_out == [
            "band (it has an axis that predictions lack)",
            "odd (its shape (17,) fits no axes of the samples)",
            "gone (it is missing)",
        ]
        assert file["prediction"].attrs["coordinates"] == "area level station track near"
        assert (
            file["station"].asstr()[()].tolist() == ["Ulm", "Köln"]
            and file["level"][()] == 850
            and file["near"][()] == 2
        )
        assert names_of(file, "area") == [["lat"], ["lon"]] and names_of(file, "station") == [["time"]]
        assert names_of(file, "track") == [["time"], ["lon"]]
        assert names_of(file, "bounds") == [["lat"], ["bounds_channel"]] and file["lat"].attrs["bounds"] == "bounds"
        np.testing.assert_array_equal(file["bounds"], np.stack([LAT + 0.5, LAT - 0.5], -1))


def test_a_scalar_of_each_file_is_one_of_each_sample(tmp_path):
    """A scalar that differs between files is written per sample; bounds follow their coordinate."""
    for number in (1, 2):
        with h5py.File(write(tmp_path / f"{number}.h5", 2, time=None, lat=LAT + number), "a") as file:
            file["when"], file["rows"] = 10.0 * number, np.stack([LAT, LAT], -1) + number
            file["lat"].attrs["bounds"] = "rows"
            file["lat_2"], file["lat_2"].attrs["bounds"] = LAT, "rows_2"
            file["rows_2"] = np.stack([LAT, LAT], -1) + number
            file["inputs"].attrs["coordinates"] = "when lat_2"
            file["lat_2"].make_scale()
            file["lat_2"].attrs["bounds"] = "rows_2"
    out, left_out = predicted(tmp_path, [tmp_path / "1.h5", tmp_path / "2.h5"])
    assert left_out == ["rows_2 (they differ between files, unlike lat_2)"]
    with h5py.File(out) as file:
        assert file["when"][()].tolist() == [10, 10, 20, 20] and file["when"].dims[0].keys()
        np.testing.assert_array_equal(file["lat"], [LAT + 1, LAT + 1, LAT + 2, LAT + 2])
        assert file["rows"].shape == (4, H, 2) and file["lat"].attrs["bounds"] == "rows"
        assert "bounds" not in file["lat_2"].attrs and "rows_2" not in file
        assert set(file["prediction"].attrs["coordinates"].split()) == {"lat", "when", "lat_2"}


def test_without_scales_there_are_no_dimensions(tmp_path):
    """Outputs for files of plain arrays get no scales; axis labels are copied, and name coordinates if these exist."""
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("inputs", data=np.ones((2, H, W, C), "f4")).attrs["layout"] = "NHWC"
        file["lat"] = LAT
    out, left_out = predicted(tmp_path, tmp_path / "data.h5")
    with h5py.File(out) as file:
        assert set(file) == {"prediction", *SOURCES} and left_out == [] and not dict(file["prediction"].attrs)
    with h5py.File(tmp_path / "data.h5", "a") as file:
        file["inputs"].dims[2].label = "x"
    out, _ = predicted(tmp_path, tmp_path / "data.h5")
    with h5py.File(out) as file:
        assert [dim.label for dim in file["prediction"].dims] == ["", "", "x", ""]
    with h5py.File(tmp_path / "data.h5", "a") as file:
        file["inputs"].dims[1].label = "lat"
    out, _ = predicted(tmp_path, tmp_path / "data.h5")
    with h5py.File(out) as file:
        assert names_of(file, "prediction") == [["sample"], ["lat"], ["x"], ["prediction_channel"]]
        assert file["lat"].attrs["NAME"] == b"lat" and file["x"].attrs["NAME"].decode().startswith(ABSENT)


def test_dimensions_without_a_variable_keep_their_names(tmp_path):
    with h5py.File(write(tmp_path / "data.h5", lat=None), "a") as file:
        file.create_dataset("row", (H,), ">f4").make_scale(f"{ABSENT} {H:10d}")
        file["inputs"].dims[1].attach_scale(file["row"])
    out, left_out = predicted(tmp_path, tmp_path / "data.h5", {"a": (H, W, 1), "b": (H, W, 2)})
    assert left_out == []
    with h5py.File(out) as file:
        assert names_of(file, "a")[:3] == names_of(file, "b")[:3] == [["time"], ["row"], ["lon"]]
        assert file["row"].attrs["NAME"].decode() == f"{ABSENT} {H:10d}"


def _damaged(path: Path, values: Any = LAT) -> None:
    """Write a coordinate in chunks with checksums, one of which is wrong."""
    with h5py.File(path, "a") as file:
        file.create_dataset("near", data=values, chunks=(len(values) // 2,), fletcher32=True)
        at = file["near"].id.get_chunk_info(1).byte_offset
    with open(path, "r+b") as raw:
        raw.seek(at)
        raw.write(b"\xff")


def _virtual(path: Path) -> None:
    layout = h5py.VirtualLayout((H,), "f8")
    layout[:] = h5py.VirtualSource("gone.h5", "y", (H,))
    with h5py.File(path, "a") as file:
        file.create_virtual_dataset("near", layout)


def _made(**datasets: Any) -> Any:
    def make(path: Path) -> None:
        with h5py.File(path, "a") as file:
            for name, made in datasets.items():
                file[name] = made

    return make


@pytest.mark.parametrize(
    "make, why",
    [
        (_damaged, "filter returned failure"),
        (lambda path: _damaged(path, np.arange(2.0)), "filter returned failure"),
        (_virtual, "cannot be read"),
        (_made(near=h5py.ExternalLink("gone.h5", "y")), "cannot be read"),
        (_made(near=h5py.ExternalLink("/dev/zero", "y")), "expected a regular file"),
        (_made(near=h5py.SoftLink("/near")), "loop of links"),
        (_made(near=h5py.SoftLink("/inputs/none")), "it is missing"),
        (_made(near=np.zeros(H, [("a", "f4")])), "expected numbers"),
        (lambda path: h5py.File(path, "a").create_group("near"), "it is missing"),
        (lambda path: h5py.File(path, "a").create_dataset("near", (H,), "f4"), "it was never written"),
        (lambda path: h5py.File(path, "a").create_dataset("near", data=h5py.Empty("f4")), "it is empty"),
    ],
)
def test_one_that_cannot_be_read_is_left_out_with_the_reason(tmp_path, make, why):
    """A coordinate that cannot be read is left out with the reason; all other data are written."""
    path = write(tmp_path / "data.h5")
    with h5py.File(path, "a") as file:
        file["inputs"].attrs["coordinates"] = "near"
        file["far"] = np.arange(2.0)
    make(path)
    out, left_out = predicted(tmp_path, path)
    assert len(left_out) == 1 and left_out[0].startswith("near (") and why in left_out[0]
    with h5py.File(out) as file:
        assert names_of(file, "prediction") == [["time"], ["lat"], ["lon"], ["prediction_channel"]]
        assert "near" not in file and "coordinates" not in file["prediction"].attrs


def test_scales_that_were_deleted_are_none(tmp_path):
    """References to deleted scales in a data file are ignored."""
    with h5py.File(write(tmp_path / "data.h5"), "a") as file:
        del file["lat"]
    out, left_out = predicted(tmp_path, tmp_path / "data.h5")
    assert left_out == []
    with h5py.File(out) as file:
        assert names_of(file, "prediction") == [["time"], ["height"], ["lon"], ["prediction_channel"]]


def test_texts_that_are_not_utf8_are_not_copied(tmp_path):
    """Attributes that are not UTF-8 are not copied: h5py can read them, but not write them."""
    wrong = b"\xff\xfe"
    with h5py.File(write(tmp_path / "data.h5"), "a") as file:
        for item, name in ((file["lat"], b"long_name"), (file["lat"], wrong), (file, b"title"), (file, wrong)):
            kind = h5py.h5t.py_create(h5py.string_dtype(), logical=True)
            made = h5py.h5a.create(item.id, name, kind, h5py.h5s.create(h5py.h5s.SCALAR))
            made.write(np.array(wrong, object))
        file.attrs["history"] = "Größe"
        h5py.h5ds.set_label(file["inputs"].id, 1, wrong)
        file["inputs"].attrs["coordinates"] = "gone"
    with open_dataset(tmp_path / "data.h5", targets=None) as dataset:
        assert dataset.attributes == {"history": "Größe"}
    out, left_out = predicted(tmp_path, tmp_path / "data.h5")
    assert left_out == ["gone (it is missing)"]
    with h5py.File(out) as file:
        assert {"units", "valid_range"} <= set(file["lat"].attrs) and "long_name" not in file["lat"].attrs
        assert names_of(file, "prediction")[1] == ["lat"]


def test_names_that_are_in_use(tmp_path):
    """Names of outputs and of the file's own datasets take precedence over names of coordinates."""
    write(tmp_path / "data.h5")
    out, left_out = predicted(tmp_path, tmp_path / "data.h5", {"lat": (H, W, 1), "width": (H, 3, 1), "lon": (2,)})
    assert sorted(left_out) == [f"{name} (predictions have a dataset of this name)" for name in ("lat", "lon")]
    with h5py.File(out) as file:
        assert names_of(file, "lat") == [["time"], ["height"], ["lat_2"], ["lat_channel"]]
        assert names_of(file, "width") == [["time"], ["height"], ["width_2"], ["width_channel"]]


def test_an_input_in_another_file_has_the_coordinates_of_that_file(tmp_path):
    """If an input is an external link, its coordinates are those of the other file."""
    write(tmp_path / "data.h5")
    with h5py.File(tmp_path / "index.h5", "w") as file:
        file["inputs"] = h5py.ExternalLink("data.h5", "inputs")
        file["lat"] = np.zeros(H)
    out, left_out = predicted(tmp_path, tmp_path / "index.h5")
    assert left_out == []
    with h5py.File(out) as file:
        np.testing.assert_array_equal(file["lat"], LAT)
        assert file["time"].shape == (2,)
