"""HDF5 files with one error each in storage: unwritten elements, external storage, damage, odd values."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5p, h5s, h5t

from tests.training.hdf5_mutations import CHANNELS, EDGE, GRID, NAMES, Mutation, N, case, mutation, opened, replaced

CHUNK = (2, EDGE, EDGE)

# Numbers that are not there


def stored(folder: Path, name: str, **options: Any) -> None:
    """Store the same values with other storage options."""
    replaced(folder, name, lambda file, v: file.create_dataset(name, data=v, **options))


def chunk_of(values: np.ndarray) -> tuple[int, ...]:
    return (*CHUNK, *values.shape[3:])


def unwritten(folder: Path, name: str, written: int, fill: float | None = None, chunks: bool = True) -> None:
    """Store a dataset of which only the first `written` samples are written."""

    def make(file: h5py.File, values: np.ndarray) -> None:
        options = {} if fill is None else {"fillvalue": fill}
        made = file.create_dataset(
            name, values.shape, values.dtype, chunks=chunk_of(values) if chunks else None, **options
        )
        if written:
            made[:written] = values[:written]

    replaced(folder, name, make)


for _name in ("inputs", "mask"):
    case(f"{_name}_never_written", "refused", lambda f, r, n=_name: unwritten(f, n, 0, chunks=False))
    case(f"{_name}_no_chunk_written", "refused", lambda f, r, n=_name: unwritten(f, n, 0))
    case(f"{_name}_some_chunks", "warned", lambda f, r, n=_name: unwritten(f, n, int(r.integers(1, N - 1))))
    case(f"{_name}_all_fill_value", "warned", lambda f, r, n=_name: unwritten(f, n, 0, 1.0))
    case(
        f"{_name}_compressed",
        "sound",
        lambda f, r, n=_name: stored(f, n, compression="gzip", shuffle=True, fletcher32=True),
    )
case("a_thousand_million_samples", "refused", lambda f, r: _gigantic(f))


def _gigantic(folder: Path) -> None:
    samples = 10**9
    replaced(folder, "inputs", lambda file, v: file.create_dataset(
        "inputs", (samples, *v.shape[1:]), v.dtype, chunks=(1024, *v.shape[1:])))  # fmt: skip
    replaced(folder, "mask", lambda file, v: file.create_dataset(
        "mask", (samples, *v.shape[1:]), v.dtype, chunks=(1024, *v.shape[1:])))  # fmt: skip


def virtual(
    folder: Path, name: str, parts: int = 2, file_name: str = "part{}.h5", place: Path | None = None, **changes: Any
) -> None:
    """Replace the inputs by a virtual dataset over files with a part of the samples each.

    `changes`: ``missing`` (part that is not written), ``short`` (part that lacks a sample), ``gap`` (part that is not
    mapped), ``dataset`` (its name in the part), ``unlimited`` (a pattern of file names).
    """
    place = folder if place is None else place
    place.mkdir(exist_ok=True)

    def make(file: h5py.File, values: np.ndarray) -> None:
        rows, layout = len(values) // parts, h5py.VirtualLayout(values.shape, values.dtype)
        for k in range(parts):
            path, part = place / file_name.format(k), values[k * rows : (k + 1) * rows]
            if changes.get("missing") != k:
                with h5py.File(path, "w") as other:
                    other["x"] = part[1:] if changes.get("short") == k else part
            if changes.get("gap") != k:
                source = h5py.VirtualSource(os.path.relpath(path, folder), changes.get("dataset", "x"), part.shape)
                layout[k * rows : (k + 1) * rows] = source[:] if k % 2 else source
        if not changes.get("unlimited"):
            file.create_virtual_dataset(name, layout)
            return
        shape, properties = values.shape, h5p.create(h5p.DATASET_CREATE)
        space = h5s.create_simple((0, *shape[1:]), (h5s.UNLIMITED, *shape[1:]))
        ones = (1,) * (len(shape) - 1)
        space.select_hyperslab(
            (0,) * len(shape), (h5s.UNLIMITED, *ones), stride=(rows, *shape[1:]), block=(rows, *shape[1:])
        )
        source_space = h5s.create_simple((rows, *shape[1:]))
        source_space.select_all()
        properties.set_virtual(space, file_name.format("%b").encode(), b"x", source_space)
        whole = h5s.create_simple((0, *shape[1:]), (h5s.UNLIMITED, *shape[1:]))
        h5d.create(file.id, name.encode(), h5t.py_create(values.dtype), whole, properties)

    replaced(folder, name, make)


for _name in ("inputs", "mask"):
    case(f"virtual_{_name}", "sound", lambda f, r, n=_name: virtual(f, n, int(r.choice([1, 2, 4]))))
    case(f"virtual_{_name}_in_a_pattern", "sound", lambda f, r, n=_name: virtual(f, n, 4, unlimited=True))
    case(
        f"virtual_{_name}_source_missing", "refused", lambda f, r, n=_name: virtual(f, n, 4, missing=int(r.integers(4)))
    )
    case(f"virtual_{_name}_source_short", "refused", lambda f, r, n=_name: virtual(f, n, 4, short=int(r.integers(4))))
    case(f"virtual_{_name}_gap", "warned", lambda f, r, n=_name: virtual(f, n, 4, gap=int(r.integers(4))))
    case(f"virtual_{_name}_other_dataset", "refused", lambda f, r, n=_name: virtual(f, n, 2, dataset="y"))
case("virtual_pattern_with_a_gap", "refused", lambda f, r: virtual(f, "inputs", 4, unlimited=True, missing=2))
case("virtual_outside", "refused", lambda f, r: virtual(f, "inputs", place=f.parent / "outside"))


@mutation("refused")
def virtual_source_is_a_pipe(folder: Path, rng: np.random.Generator) -> None:
    virtual(folder, "inputs", 2)
    (folder / "part1.h5").unlink()
    os.mkfifo(folder / "part1.h5")


@mutation("refused")
def virtual_source_never_written(folder: Path, rng: np.random.Generator) -> None:
    virtual(folder, "inputs", 2)
    with h5py.File(folder / "part1.h5", "w") as file:
        file.create_dataset("x", (N // 2, EDGE, EDGE, CHANNELS), np.float32)


@mutation("refused")
def virtual_source_of_text(folder: Path, rng: np.random.Generator) -> None:
    virtual(folder, "inputs", 2)
    with h5py.File(folder / "part1.h5", "w") as file:
        file["x"] = np.full((N // 2, EDGE, EDGE, CHANNELS), b"text")


@mutation("refused")
def virtual_of_itself(folder: Path, rng: np.random.Generator) -> None:
    """Make a virtual dataset that refers to itself, directly or through another file; HDF5 itself crashes on it."""
    values = (*GRID, CHANNELS)
    virtual(folder, "inputs", 1)
    layout = h5py.VirtualLayout(values, np.float32)
    layout[:] = h5py.VirtualSource("data.h5", "inputs", values)
    if rng.integers(2):
        with h5py.File(folder / "part0.h5", "w") as file:
            file.create_virtual_dataset("x", layout)
    else:
        replaced(folder, "inputs", lambda file, v: file.create_virtual_dataset("inputs", layout))


def external(folder: Path, path: Path, length: int | None = None, offset: int = 0) -> None:
    """Store the inputs in an external file, which contains only `length` bytes."""

    def make(file: h5py.File, values: np.ndarray) -> None:
        content = b"\0" * offset + values.tobytes()
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content if length is None else content[:length])
        file.create_dataset("inputs", values.shape, values.dtype, external=[(str(path), offset, values.nbytes)])

    replaced(folder, "inputs", make)


case("external", "sound", lambda f, r: external(f, f / "raw.bin", offset=int(r.integers(64))))
case("external_short", "refused", lambda f, r: external(f, f / "raw.bin", int(r.integers(4000))))
case("external_outside", "refused", lambda f, r: external(f, f.parent / "outside" / "raw.bin"))
case("external_system_file", "refused", lambda f, r: external(f, Path("/etc/passwd")))
case("external_device", "refused", lambda f, r: external(f, Path("/dev/zero")))


@mutation("refused")
def external_missing(folder: Path, rng: np.random.Generator) -> None:
    external(folder, folder / "raw.bin")
    (folder / "raw.bin").unlink()


@mutation("refused")
def external_pipe(folder: Path, rng: np.random.Generator) -> None:
    os.mkfifo(folder / "raw.bin")
    external(folder, folder / "raw.bin")


# Damage


def bytes_changed(path: Path, rng: np.random.Generator, low: int, high: int, count: int) -> None:
    content = bytearray(path.read_bytes())
    for at in rng.integers(low, min(high, len(content)), count):
        content[at] ^= int(rng.integers(1, 256))
    path.write_bytes(content)


def damaged_chunk(folder: Path, rng: np.random.Generator, **options: Any) -> None:
    name = str(rng.choice(NAMES))
    with opened(folder) as file:
        shape = file[name].shape
    stored(folder, name, chunks=(*CHUNK, *shape[3:]), **options)
    with opened(folder) as file:
        chunk = file[name].id.get_chunk_info(int(rng.integers(N // 2)))
    bytes_changed(folder / "data.h5", rng, chunk.byte_offset, chunk.byte_offset + chunk.size, 3)


case("damaged_chunk_gzip", "refused", lambda f, r: damaged_chunk(f, r, compression="gzip"))
case("damaged_chunk_fletcher32", "refused", lambda f, r: damaged_chunk(f, r, fletcher32=True))


@mutation("refused")
def unknown_filter(folder: Path, rng: np.random.Generator) -> None:
    stored(folder, "inputs", chunks=(*CHUNK, CHANNELS), compression="gzip")
    path = folder / "data.h5"
    content = path.read_bytes()
    at = content.index(b"deflate\0")  # its number stands 8 bytes before the name
    path.write_bytes(content[: at - 8] + (31999).to_bytes(2, "little") + content[at - 6 :])


@mutation("refused")
def truncated(folder: Path, rng: np.random.Generator) -> None:
    path = folder / "data.h5"
    path.write_bytes(path.read_bytes()[: int(rng.integers(0, path.stat().st_size))])


@mutation("any")
def changed_in_the_head(folder: Path, rng: np.random.Generator) -> None:
    bytes_changed(folder / "data.h5", rng, 0, 2048, int(rng.integers(1, 5)))


@mutation("any")
def changed_anywhere(folder: Path, rng: np.random.Generator) -> None:
    if rng.integers(2):
        stored(folder, "inputs", chunks=(*CHUNK, CHANNELS), compression="gzip")
    bytes_changed(folder / "data.h5", rng, 0, 1 << 30, int(rng.integers(1, 40)))


@mutation("refused")
def text_file(folder: Path, rng: np.random.Generator) -> None:
    (folder / "data.h5").write_text("not HDF5")


@mutation("refused")
def pipe(folder: Path, rng: np.random.Generator) -> None:
    (folder / "data.h5").unlink()
    os.mkfifo(folder / "data.h5")


@mutation("refused")
def device(folder: Path, rng: np.random.Generator) -> None:
    (folder / "data.h5").unlink()
    (folder / "data.h5").symlink_to("/dev/zero")


@mutation("refused")
def folder_as_file(folder: Path, rng: np.random.Generator) -> None:
    (folder / "data.h5").unlink()
    (folder / "data.h5").mkdir()


@mutation("sound")
def user_block(folder: Path, rng: np.random.Generator) -> None:
    path = folder / "data.h5"
    with h5py.File(path) as old, h5py.File(folder / "new.h5", "w", userblock_size=512) as new:
        for name in old:
            old.copy(name, new)
    (folder / "new.h5").rename(path)


# Values


def valued(name: str, change: Callable[[np.ndarray, np.random.Generator], Any]) -> Mutation:
    def apply(folder: Path, rng: np.random.Generator) -> None:
        with opened(folder) as file:
            values = file[name][()]
            change(values, rng)
            file[name][...] = values

    return apply


def _at(rng: np.random.Generator) -> tuple[int, int, int]:
    sample, row, column = (int(k) for k in rng.integers(0, GRID))
    return sample, row, column


case("nan", "refused", valued("inputs", lambda v, r: v.__setitem__(_at(r), np.nan)))
case("infinite", "refused", valued("inputs", lambda v, r: v.__setitem__(_at(r), -np.inf)))
case("constant_channel", "warned", valued("inputs", lambda v, r: v.__setitem__((..., 1), float(r.integers(5)))))
case("targets_of_one_value", "warned", valued("mask", lambda v, r: v.fill(int(r.integers(2)))))
case("target_out_of_range", "refused", valued("mask", lambda v, r: v.__setitem__(_at(r), 7)))
