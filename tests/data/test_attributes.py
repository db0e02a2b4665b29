"""Attributes as plain data: texts, numbers and lists; what is of another kind is left out, and breaks nothing."""

import h5py
import numpy as np

from halograd.data.attributes import OF_NUMBERS, plain_attributes


def test_plain_data_alone(tmp_path):
    given = {
        "units": "m",
        "bytes": np.bytes_(b"abc"),
        "whole": np.int16(3),
        "yes": np.bool_(True),
        "number": 0.5,
        "list": np.array([1, 2], np.uint8),
        "names": ["a", "b"],
    }
    left_out = {
        "nan": np.nan,
        "none": h5py.Empty("f"),
        "table": np.zeros((2, 2)),
        "long": "x" * 9000,
        "many": np.zeros(300),
        "complex": 1j,
        "_NCProperties": "version=2",
    }
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.attrs.update({**given, **left_out})
        file.attrs["reference"] = file.ref
        found = plain_attributes(file)
        assert found == {**given, "bytes": "abc", "whole": 3, "yes": 1, "list": [1, 2]}
        assert all(type(value) in (str, int, float, list) for value in found.values())
        assert plain_attributes(file, OF_NUMBERS) == {"units": "m"}
