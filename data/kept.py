"""Statistics of channels in a small file beside the data, for other runs on the same samples."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halograd.documents import replacing

from .normalize import ChannelStatistics
from .source import Dataset

__all__ = ["KeptStatistics"]

_log = logging.getLogger(__name__)


class KeptStatistics:
    """File of statistics in the folder of the first data file, named by a mark of all that they depend on. Local.

    The mark holds names, sizes and times of change of all data files, the fields of the data set, and `about`. Data
    sets without files, or with folders (Zarr), keep nothing.

    Parameters
    ----------
    dataset
        Samples; its `parts`, if there are any, are read from files.
    about
        Plain data on which the statistics depend too: samples, transforms, treatment of the data.
    """

    def __init__(self, dataset: Dataset, about: Mapping[str, Any]) -> None:
        self.path: Path | None = None
        files: list[Path] = []
        for part in getattr(dataset, "parts", ()):
            own = [path for path in (Path(part.path), *map(Path, part.structure.files)) if path.is_file()]
            if not own:
                return
            files += own
        if not files:
            return
        found = [path.stat() for path in files]
        marks = [(path.name, stat.st_size, stat.st_mtime_ns) for path, stat in zip(files, found)]
        fields = {
            name: [field.dataset, field.shape, field.channel_names, field.is_target, str(field.packing)]
            for name, field in dataset.fields.items()
        }
        text = json.dumps([marks, fields, about], sort_keys=True, default=str)
        self._mark = hashlib.sha256(text.encode()).hexdigest()
        self.path = files[0].parent / f"halograd-statistics-{self._mark[:8]}.json"

    def read(self) -> dict[str, Any]:
        """Return the kept states of statistics by field; empty without a file of this mark."""
        try:
            found = json.loads(self.path.read_text()) if self.path is not None else {}
            known = found["statistics"] if found["mark"] == self._mark else {}
            return {name: state for name, state in known.items() if ChannelStatistics.unpacked(state)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def write(self, statistics: Mapping[str, ChannelStatistics]) -> None:
        """Keep these statistics by field, with those that are kept already; not in a read-only folder."""
        if self.path is None:
            return
        states = self.read() | {name: own.state_dict() for name, own in statistics.items()}
        try:
            with replacing(self.path) as partial:
                partial.write_text(json.dumps({"mark": self._mark, "statistics": states}, indent=1))
        except OSError as error:
            _log.info("%s: the statistics of the data are not kept: %s", self.path, error)
