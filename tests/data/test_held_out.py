"""Samples that are held out by the names of files, simulations and years."""

import datetime

import h5py
import numpy as np
import pytest

from halograd.data import ArrayDataset, DataError, open_dataset
from halograd.data.sampler import held_out, years
from halograd.data.steps import TimeSteps


def write(path, samples=4, groups=None, times=None):
    with h5py.File(path, "w") as file:
        file.create_dataset("inputs", data=np.zeros((samples, 4, 4, 1), np.float32)).attrs["layout"] = "NHWC"
        if groups is not None:
            file["simulation"] = groups
        if times is not None:
            file["time"] = times
            file["time"].attrs["units"] = "days since 2017-12-30"
            file["time"].make_scale()
            file["inputs"].dims[0].attach_scale(file["time"])


def held(dataset, *names):
    return np.flatnonzero(held_out(dataset, names)).tolist()


def test_names_of_files_simulations_and_years(tmp_path):
    """A name is a file if there is one of this name, else a simulation, else a year."""
    write(tmp_path / "run1.h5", groups=[0, 0, 5, 2018], times=[0, 1, 2, 3])
    write(tmp_path / "run2.h5", 2, groups=[5, 1], times=[1, 2])
    write(tmp_path / "2019.nc", 1, groups=[2], times=[0])
    with open_dataset(tmp_path, targets=None) as found:
        assert found.names == ["2019.nc 1", "run1.h5 4", "run2.h5 2"]
        assert held(found, "run2") == held(found, "run2.h5") == held(found, "*/run2*") == [5, 6]
        assert held(found, "run?") == [1, 2, 3, 4, 5, 6] and held(found, "2019") == [0]
        assert held(found, "5") == [3, 5] and held(found, "5", "run2", "2019") == [0, 3, 5, 6]
        assert held(found, "2018") == [4] and held(found, "2017") == [0, 1, 2, 5]
        with pytest.raises(DataError, match=r"got 'run3', to which no sample belongs; files: 2019.nc 1, run1.h5 4"):
            held(found, "2018", "run3")
        with pytest.raises(DataError, match=r"expected some of the 7 samples, got all of them by 'run\?', '2019'"):
            held(found, "run?", "2019")


def test_years_of_pairs_of_times(tmp_path):
    write(tmp_path / "a.h5", 6, times=[0, 1, 2, 3, 4, 5])
    with open_dataset(tmp_path / "a.h5", "inputs", {"target": "inputs"}) as found:
        assert held(found, "2018") == [2, 3, 4, 5] and held(TimeSteps(found, 1), "2018") == [2, 3, 4]


def test_groups_of_arrays():
    found = ArrayDataset({"x": np.zeros((3, 4, 4, 1))}, (), groups=[7, 8, 7])
    assert held(found, "8") == [1]
    with pytest.raises(DataError, match="got '2018', to which no sample belongs"):
        held(found, "2018")
    times = ArrayDataset({"x": np.zeros((5, 4, 4, 1))}, (), groups=[7, 7, 8, 8, 8])
    assert held(TimeSteps(times, 1), "8") == [1, 2]


@pytest.mark.parametrize("units, step", [("hours", 3600), ("days", 86400), ("seconds", 1), ("minutes", 60)])
def test_years_are_those_of_the_calendar(units, step):
    begin = datetime.datetime(1999, 12, 30, 12, 30)
    times = np.arange(-40000, 40000, 777.0) * (86400 // step if step > 60 else 8640)
    want = [(begin + datetime.timedelta(seconds=time * step)).year for time in times]
    assert years(times, f"{units} since 1999-12-30 12:30:00").tolist() == want


def test_years_of_other_calendars():
    days = np.array([-1.0, 0.0, 58.0, 59.0, 306.0, 365.0, 366.0])
    assert years(days, "days since 2000-03-01", "noleap").tolist() == [2000] * 4 + [2001, 2001, 2001]
    assert years(days, "days since 2000-01-01", "366_day").tolist() == [1999] + [2000] * 5 + [2001]
    assert years(days, "days since 2000-01-01", "julian") is None and years(days, "months since 2000-01-01") is None
    for units in ("days since 0000-00-00", "days since 2001-13-01"):
        assert years(days, units) is None and years(days, units, "noleap") is None
