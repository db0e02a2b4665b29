"""The data set of the demonstration: made once, used again as long as it is what would be made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from halograd.data import DataError, Hdf5Dataset, generate
from halograd.data.mesh_tangling import FORMAT, FORMAT_VERSION, Settings
from halograd.data.reading import open_to_read
from halograd.demo.settings import DemoSettings
from halograd.errors import UserError

__all__ = ["make_dataset"]


def make_dataset(path: Path, settings: DemoSettings, progress: Callable[[int, int], None] | None = None) -> bool:
    """Write the data set unless a complete one of these settings is there; whether it was written. Local.

    Raises
    ------
    UserError
        If `path` is a file that no generator of ours has written: it is not replaced.
    """
    if path.exists() and _is_wanted(path, settings):
        return False
    generate(path, settings.resolution, settings.samples, settings.seed, progress=progress)
    return True


def _is_wanted(path: Path, settings: DemoSettings) -> bool:
    wanted = asdict(Settings(settings.resolution, settings.samples, settings.seed))
    wanted["format_version"] = FORMAT_VERSION
    try:
        with open_to_read(path) as file:
            attributes = dict(file.attrs)
    except OSError:
        attributes = {}
    if attributes.get("format") != FORMAT:
        raise UserError(f"expected no file or a mesh-tangling data set at {path}, got another file; move it away")
    return all(attributes.get(key) == value for key, value in wanted.items()) and _is_complete(path, settings)


def _is_complete(path: Path, settings: DemoSettings) -> bool:
    try:
        with Hdf5Dataset(path) as dataset:
            return len(dataset) == settings.samples and dataset.groups is not None
    except DataError:
        return False
