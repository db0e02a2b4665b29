"""Monthly fields of a small ocean, as climate models write them: ``python data.py ocean.nc``.

Warm water is carried eastward by currents that differ in every latitude; land has no values. Variables are
``(time, lat, lon)`` with CF attributes: one of them is packed, another has fill values.
"""

import sys

import h5py
import numpy as np


def write(path: str, months: int = 96, rows: int = 32, columns: int = 64) -> None:
    rng = np.random.default_rng(0)
    lat, lon = np.linspace(-75, 75, rows), np.arange(columns) * 360 / columns
    land = np.hypot((lat[:, None] - 20) / 25, (lon[None] - 120) / 60) < 1
    speed = np.rint(2 + 1.5 * np.cos(np.radians(3 * lat))).astype(int)
    noise = rng.standard_normal((rows, columns))
    eddies = sum(np.roll(noise, shift, 1) for shift in range(4)) / 2
    warm = 28 * np.cos(np.radians(lat))[:, None] + 4 * eddies
    state = np.empty((months, rows, columns))
    for month in range(months):
        state[month] = warm
        moved = np.stack([np.roll(row, shift) for row, shift in zip(warm, speed)])
        mixed = moved + 0.01 * (np.roll(moved, 1, 1) + np.roll(moved, -1, 1) - 2 * moved)
        warm = mixed + 0.05 * rng.standard_normal(mixed.shape)
    with h5py.File(path, "w") as file:
        file.attrs.update(Conventions="CF-1.8", title="A small ocean")
        axes = {"time": ("days since 2000-01-01", 30.0 * np.arange(months)), "lat": ("degrees_north", lat)}
        for name, (units, values) in {**axes, "lon": ("degrees_east", lon)}.items():
            file[name] = values
            file[name].attrs["units"] = units
            file[name].make_scale(name)
        file["tos"] = np.where(land, 1e20, state).astype("f4")
        file["tos"].attrs.update(units="degC", standard_name="sea_surface_temperature", _FillValue=np.float32(1e20))
        file["uo"] = np.broadcast_to(np.where(land, 0, speed[:, None]) * 100, state.shape).astype("i2")
        file["uo"].attrs.update(units="m s-1", scale_factor=0.001)
        file["depth"] = np.where(land, 0.0, 4000.0)
        file["area"] = np.cos(np.radians(lat))
        for name, scales in {"tos": axes, "uo": axes, "depth": ("lat",), "area": ("lat",)}.items():
            every = [*scales, "lon"] if name != "area" else scales
            for axis, scale in enumerate(every):
                file[name].dims[axis].attach_scale(file[scale])


if __name__ == "__main__":
    write(sys.argv[1])
