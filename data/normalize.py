"""Per-channel normalization, computed once in parallel; the result is the same for every number of ranks.

A channel is first transformed by a named rule. Then its mean is subtracted, and it is divided by its standard
deviation. The mean of values that spread over orders of magnitude has little meaning, so densities and pressures take
the rule ``log`` by default. Some quality metrics become huge where a cell tangles (Verdict clamps them to 1e30); these
take ``metric``. A small file next to the data keeps the statistics for other runs on the same samples.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halograd.documents import replacing

from ..dtensor.box import Box
from .disk import DataError
from .source import Dataset, sample_shape
from .targets import has_no_weight

__all__ = [
    "DEFAULT_RULES",
    "TRANSFORMS",
    "ChannelStatistics",
    "KeptStatistics",
    "SampleRows",
    "channel_statistics",
    "check_transforms",
    "mark_absent",
]

Array = NDArray[np.float64]
AllReduce = Callable[[Array], Array]

_logger = logging.getLogger(__name__)

DEFAULT_RULES = {
    **dict.fromkeys(("Density", "Pressure"), "log"),
    **dict.fromkeys(("aspectRatio", "conditionNumber", "oddy", "taper", "stretch"), "metric"),
}
"""Default rules by channel name; other channels take ``none``."""

LARGEST = 1e6
"""Limit at which ``metric`` clips, so that a clamped 1e30 is not an outlier."""
CLIP = 5.0
"""Standard deviations at which ``clip`` cuts."""
_RULES = 3  # version of the numbers' meaning: 2 separates "metric" from "log", 3 unpacks packed numbers
# Rows of a sample that are read at once (`SampleRows`), and that are normalized at once.
_ROWS = 64
_CACHED_ROWS = 16
_LONG = 8e9  # bytes that one rank needs ten seconds or more to read


def _log(x: NDArray[Any]) -> None:
    """Replace x by ``sign(x) log(1 + |x|)``."""
    magnitude = np.log1p(np.abs(x))
    np.copysign(magnitude, x, out=x)


def _metric(x: NDArray[Any]) -> None:
    """Clip x to +-:data:`LARGEST`, then apply `_log`."""
    np.clip(x, -LARGEST, LARGEST, out=x)
    _log(x)


def _asinh(x: NDArray[Any]) -> None:
    np.arcsinh(x, out=x)


def _identity(x: NDArray[Any]) -> None:
    """Leave x unchanged."""


TRANSFORMS: dict[str, Callable[[NDArray[Any]], None]] = {
    "none": _identity,
    "log": _log,
    "metric": _metric,
    "asinh": _asinh,
    "clip": _identity,
}
"""Functions of the rules by name; they change an array in place. ``clip`` acts after normalization, on values beyond
+-5 standard deviations.
"""


def transform(x: NDArray[Any], rules: Sequence[str]) -> None:
    """Transform x ``(..., C)`` channel by channel by these rules, in place. Local."""
    for k, rule in enumerate(rules):
        if TRANSFORMS[rule] is not _identity:
            TRANSFORMS[rule](x[..., k])


def mark_absent(x: NDArray[Any]) -> NDArray[np.bool_]:
    """Return the mask of the NaN and infinite elements of x, and set them to NaN, which no transform changes. Local."""
    absent = ~np.isfinite(x)
    x[absent] = np.nan
    return absent


@dataclass(frozen=True)
class ChannelStatistics:
    """Mean and standard deviation of the transformed channels.

    Attributes
    ----------
    mean, std : float64 arrays ``(C,)``
        Mean and standard deviation of the transformed values; a constant channel has std 0 and becomes 0.
    transforms : tuple of str
        Keys of :data:`TRANSFORMS`, one per channel.
    count : int
        Number of cells from which they were computed; the largest of all channels, if some have absent values.
    """

    mean: Array
    std: Array
    transforms: tuple[str, ...]
    count: int

    def apply(self, x: NDArray[Any], first_channel: int = 0) -> None:
        """Normalize x ``(N, *spatial, C')``, whose channels begin at global `first_channel`, in place. Local."""
        mine = slice(first_channel, first_channel + x.shape[-1])
        rules = self.transforms[mine]
        std = self.std[mine]
        # A constant channel becomes 0 instead of infinite.
        scale = np.divide(1.0, std, out=np.zeros_like(std), where=std > 0).astype(x.dtype)
        mean = self.mean[mine].astype(x.dtype)
        for sample in x if x.ndim > 2 else x[:, None]:  # a vector per sample is one row
            # Blocks of rows that fit the cache, because every rule reads them again.
            for first in range(0, len(sample), _CACHED_ROWS):
                rows = sample[first : first + _CACHED_ROWS]
                transform(rows, rules)
                rows -= mean
                rows *= scale
                for k, rule in enumerate(rules):
                    if rule == "clip":
                        np.clip(rows[..., k], -CLIP, CLIP, out=rows[..., k])

    def restored(self, x: NDArray[Any], first_channel: int = 0) -> NDArray[Any]:
        """Return normalized values ``(N, *spatial, C')`` in the units of the data: the inverse of :meth:`apply` for
        channels without a transform. Local.

        The first of the channels has the global number `first_channel`. The `C` statistics repeat along the channels.
        """
        channels = np.arange(first_channel, first_channel + x.shape[-1]) % len(self.mean)
        return x * self.std[channels].astype(x.dtype) + self.mean[channels].astype(x.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics as plain data, for checkpoints and :class:`KeptStatistics`."""
        return {
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
            "transforms": list(self.transforms),
            "count": self.count,
            "rules": _RULES,
        }

    @staticmethod
    def unpacked(state: Mapping[str, Any]) -> bool:
        """Return whether a state comes from a version of halograd that unpacks packed data."""
        return bool(state.get("rules", 1) >= _RULES)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> ChannelStatistics:
        mean, std = (np.asarray(state[key], dtype=np.float64) for key in ("mean", "std"))
        # In checkpoints older than the rule "metric", "log" meant "metric".
        renamed = {} if state.get("rules", 1) >= 2 else {"log": "metric"}
        return cls(mean, std, tuple(renamed.get(rule, rule) for rule in state["transforms"]), int(state["count"]))


def _raise(fault: Exception | None) -> None:
    if fault is not None:
        raise fault


def check_transforms(dataset: Dataset, transforms: Mapping[str, str]) -> None:
    """Check the names and rules of transforms. Local.

    Raises
    ------
    DataError
        A rule is unknown, or a name is neither an input nor a channel of one; the message lists the valid ones.
    """
    inputs = {name: field for name, field in dataset.fields.items() if not field.is_target}
    channels = dict.fromkeys(channel for field in inputs.values() for channel in field.channel_names)
    unknown = [n for n in transforms if n not in inputs and n not in channels]
    if unknown:
        raise DataError(
            f"transforms: expected inputs out of {', '.join(inputs)}, or channels out of {', '.join(channels)}, got "
            f"{', '.join(unknown)}"
        )
    wrong = [r for r in transforms.values() if r not in TRANSFORMS]
    if wrong:
        raise DataError(f"transforms: expected rules out of {', '.join(TRANSFORMS)}, got {', '.join(wrong)}")


def _rule(transforms: Mapping[str, str], name: str, channel: str) -> str:
    """Return the rule of a channel, else that of its input, else the default."""
    common = transforms.get(name, DEFAULT_RULES.get(channel, "none"))
    return transforms.get(channel, common)


def channel_statistics(
    dataset: Dataset,
    name: str,
    indices: Sequence[int] | NDArray[np.int64],
    *,
    rank: int = 0,
    size: int = 1,
    allreduce: AllReduce = lambda a: a,
    agree: Callable[[Exception | None], None] = _raise,
    transforms: Mapping[str, str] | None = None,
) -> ChannelStatistics:
    """Compute mean and standard deviation per channel of one input or target over these samples.

    Collective over the ranks that `allreduce` joins: each reads every `size`-th of the samples, from position `rank`
    on, then one array of 3 C numbers is summed. The result depends on the number of ranks by rounding only (1e-12): the
    float64 sums are over values shifted by an estimate of the mean, the same on all ranks, so that nothing cancels.
    Elements of a target that have the weight 0 are left out.

    Parameters
    ----------
    dataset : Dataset
    name : str
        Name of the input, or of the target, whose channels are not transformed.
    indices : sequence of int
        The training samples; the same on every rank.
    rank, size : int
    allreduce : callable
        ``allreduce(a)`` returns the sum over the ranks of the float64 array `a` of one axis.
    agree : callable
        ``agree(fault)`` raises on all ranks if any rank passes a read error instead of None. Called before the sums are
        reduced.
    transforms : dict, optional
        Rule by the name of a channel, or by the name of this input for its other channels. They replace the defaults
        (:data:`DEFAULT_RULES`, else ``none``). Other names are ignored (:func:`check_transforms`).

    Raises
    ------
    DataError
        There are no samples, or a channel has no finite number.
    """
    if len(indices) == 0:
        raise DataError(f"{dataset.path}: expected samples to compute the normalization from, got none")
    field = dataset.fields[name]
    rules = ("none",) * field.shape[-1]
    if not field.is_target:
        rules = tuple(_rule(transforms or {}, name, channel) for channel in field.channel_names)
    if rank == 0:
        _announce(dataset, name, len(indices), size)
    shift, total, fault = np.zeros(len(rules)), np.zeros((3, len(rules))), None
    try:
        buffer = SampleRows(dataset, name, rules)
        # Every rank reads the same block: a shift of its own would make the sums of ranks incomparable.
        shift = _mean(buffer.first(int(indices[0])).reshape(-1, len(rules)))
        _add_up(buffer, indices[rank::size], shift, total)
    except Exception as error:
        fault = error
    # Before the sum, or the other ranks would wait in it for a rank that has raised.
    agree(fault)
    count, sums, squares = np.asarray(allreduce(total.reshape(-1)), dtype=np.float64).reshape(total.shape)
    if not count.all():
        absent = int(np.flatnonzero(count == 0)[0])
        raise DataError(
            f"{dataset.path}: expected finite numbers in {field.channel(absent)}, got none in "
            "all training samples; leave that channel out"
        )
    mean = sums / count
    # Rounding may make the difference negative.
    variance = np.maximum(squares / count - mean**2, 0.0)
    # The deviation of a constant channel is only rounding; dividing by it would scale that to order one.
    scale = np.maximum(np.abs(shift + mean), 1e-300)
    variance[np.sqrt(variance) < 1e-7 * scale] = 0.0
    return ChannelStatistics(shift + mean, np.sqrt(variance), rules, int(count.max()))


def _announce(dataset: Dataset, name: str, samples: int, size: int) -> None:
    """Log a warning before a long read."""
    nbytes = samples * math.prod(dataset.fields[name].shape) * np.dtype(np.float32).itemsize
    if nbytes > _LONG * size:
        _logger.warning(
            "%s: reading all %s training samples (%.0f GB) for the normalization; data.normalize = false omits it",
            dataset.path, f"{samples:,}", nbytes / 1e9,
        )  # fmt: skip


def _mean(x: NDArray[Any]) -> Array:
    """Compute the mean of every channel, ignoring NaN; 0 for a channel of NaN only."""
    there = ~np.isnan(x)
    return np.where(there, x, 0).sum(axis=0, dtype=np.float64) / np.maximum(there.sum(axis=0), 1)


def _add_up(buffer: SampleRows, indices: Sequence[int] | NDArray[np.int64], shift: Array, total: Array) -> None:
    """Add the counts of cells, the sums and the sums of squares of the channels of these samples, less `shift`, to
    `total` ``(3, C)``. Local.
    """
    channels = len(shift)
    for index in indices:
        for block in buffer.of_sample(int(index)):
            shifted = block.reshape(-1, channels).astype(np.float64) - shift
            absent = np.isnan(shifted)
            shifted[absent] = 0
            total[0] += len(shifted) - absent.sum(axis=0)
            total[1] += shifted.sum(axis=0)
            # Sums of squares, without an array of the squares.
            total[2] += np.einsum("nc,nc->c", shifted, shifted)


class SampleRows:
    """Reader of a field, one sample after the other, by blocks of rows in one buffer.

    With `rules`, values are transformed, and permitted invalid values and targets of weight 0 become NaN.
    """

    def __init__(self, dataset: Dataset, name: str, rules: tuple[str, ...] = ()) -> None:
        self._dataset, self._name, self._rules = dataset, name, rules
        shape = dataset.fields[name].shape
        step = min(_ROWS, shape[0]) if len(shape) > 1 else shape[0]  # a vector per sample is one block
        self._buffer = np.empty((1, step, *shape[1:]), np.float32)

    def of_sample(self, index: int) -> Any:
        """Yield blocks of rows ``(1, rows, ..., C)`` of a sample, one after the other in the same memory."""
        for first in range(0, sample_shape(self._dataset, self._name, index)[0], self._buffer.shape[1]):
            yield self._read(index, first)

    def first(self, index: int) -> NDArray[np.float32]:
        """Return the first block of rows of a sample, ``(1, rows, ..., C)``."""
        return self._read(index, 0)

    def _read(self, index: int, first: int) -> NDArray[np.float32]:
        shape = sample_shape(self._dataset, self._name, index)
        box = Box.of_shape((1, *shape)).replace(1, first, min(first + self._buffer.shape[1], shape[0]))
        block = self._buffer[tuple(slice(n) for n in box.shape)]  # a part, for the last rows or a smaller sample
        self._dataset.read(self._name, [index], box, block)
        # Without rules, numbers are returned as they were read: `find_invalid` checks them itself.
        weights = getattr(self._dataset, "weighted", {}).get(self._name) if self._rules else None
        if weights:

            def read(other: str, part: Box, out: NDArray[Any]) -> object:
                return self._dataset.read(other, [index], part, out)

            block[has_no_weight(read, self._dataset.fields, self._name, weights, box)] = np.nan
        if self._rules and self._name in self._dataset.lenient:
            mark_absent(block)
        transform(block, self._rules)
        return block


class KeptStatistics:
    """File of statistics in the folder of the first data file, named by a hash of all that they depend on. Local.

    The hash is that of names, sizes and modification times of all data files, the fields of the data set, and `about`.
    No file is written for data sets without files, or with samples in folders (Zarr).

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
            if part.has_folders:
                return
            files += (Path(part.path), *map(Path, part.structure.files))
        if not files:
            return
        states = [path.stat() for path in files]
        # Not of the contents: their hash would take as long as the statistics.
        marks = [(path.name, stat.st_size, stat.st_mtime_ns) for path, stat in zip(files, states)]
        fields = {
            name: [field.dataset, field.shape, field.channel_names, field.is_target, str(field.packing)]
            for name, field in dataset.fields.items()
        }
        text = json.dumps([marks, fields, about], sort_keys=True, default=str)
        self._mark = hashlib.sha256(text.encode()).hexdigest()
        self.path = files[0].parent / f"halograd-statistics-{self._mark[:8]}.json"

    def read(self) -> dict[str, Any]:
        """Return the stored states of statistics, by field; empty without a file of this hash."""
        try:
            kept = json.loads(self.path.read_text()) if self.path is not None else {}
            # The file's name has 8 digits of the hash only.
            known = kept["statistics"] if kept["mark"] == self._mark else {}
            return {name: state for name, state in known.items() if ChannelStatistics.unpacked(state)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def write(self, statistics: Mapping[str, ChannelStatistics]) -> None:
        """Add these statistics, by field, to those in the file. Nothing is written if the folder is read-only."""
        if self.path is None:
            return
        states = self.read() | {name: own.state_dict() for name, own in statistics.items()}
        try:
            with replacing(self.path) as partial:
                partial.write_text(json.dumps({"mark": self._mark, "statistics": states}, indent=1))
        except OSError as error:
            _logger.info("%s: the statistics of the data are not kept: %s", self.path, error)
