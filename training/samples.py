"""The samples of a run: the data set, its split, and the conversion of samples to inputs of the network."""

from __future__ import annotations

import hashlib
import logging
import math
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from dataclasses import field as attribute
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from halograd.documents import bytes_text
from halograd.errors import UserError
from halograd.signatures import check_methods

from ..comm import Communicator
from ..data import (
    AUGMENTATIONS,
    Augmentation,
    ChannelStatistics,
    DataError,
    Dataset,
    FileSet,
    Hdf5Dataset,
    TargetReduction,
    channel_statistics,
    check_transforms,
    split,
)
from ..data.files import check_same_fields, locate
from ..data.masked import Masked
from ..data.normalize import KeptStatistics
from ..data.sampler import held_out
from ..data.source import DatasetView, OneSize, sample_shape
from ..data.steps import TimeSteps
from ..data.structure import Field, Structure
from ..data.survey import LOOKS, count_classes, find_invalid, look_at_data
from ..data.targets import LabelMap, TargetRange
from ..data.windows import KEY as SLIDING
from ..data.windows import Foreground, SampleWindows, Slide, SlidingWindows, find_foreground, most_positions
from ..dtensor import Box
from ..layers import Input, Network
from ..models.own import call_own
from .build import check_batch, cuts_windows, datasets_of, label_maps, least_samples, weighted_targets, weights_of
from .checkpoint import TrainingProgress
from .config import Config, DataConfig
from .root import on_root

__all__ = ["Samples", "fit_together"]

_log = logging.getLogger(__name__)
_NAMED = 4  # samples named in a message
#: Keys of ``[data]`` without influence on the statistics of given samples.
_NOT_OF_STATISTICS = {
    *("path", "validation", "split", "shuffle", "prefetch", "open_files", "augment"),
    *("normalize", "normalize_targets", "statistics"),
}
_STATISTICS = 36  # separates the draw of samples for statistics from others of the same seed


@dataclass
class Samples:
    """Samples of a data set, the same on all ranks.

    Attributes
    ----------
    dataset
        Open data set; each rank reads its own blocks.
    training, validation
        Indices of the training samples and of the held-out samples.
    statistics
        Statistics of normalized inputs and targets, by name.
    reductions
        Reductions of targets that are finer than the predictions of the network, by name.
    invalid
        Samples with NaN, infinity or targets out of range, each with its first fault; empty if ``data.invalid`` needs
        no search.
    windows
        Reader of windows of the network's size, or of whole samples.
    augmentation
        Random changes of samples in training; None without them or without targets.
    class_counts
        Class counts in the training samples, by target, if a loss is balanced by them.
    foreground_seconds
        Time in which the positions of foreground were found [s].
    target_scale
        Order of magnitude of the loss of a regression for the prediction zero.
    """

    dataset: Dataset
    training: np.ndarray
    validation: np.ndarray
    statistics: dict[str, ChannelStatistics]
    reductions: dict[str, TargetReduction]
    invalid: dict[int, str]
    windows: SampleWindows
    augmentation: Augmentation | None = None
    target_scale: float = 0.0
    class_counts: dict[str, list[int]] = attribute(default_factory=dict)
    foreground_seconds: float = 0.0

    @classmethod
    def open(
        cls,
        config: Config,
        network: Network,
        comm: Communicator,
        stack: ExitStack,
        progress: TrainingProgress,
        trainable: bool,
        labelled: bool,
        slide: Slide | None = None,
    ) -> Samples:
        """Open the data set. Collective over `comm`, within an agreement; arguments as for `Session.open`.

        Sets the class counts in the loss of `network`.
        """
        data = config.data
        # Samples may differ in size if windows are cut out of them, or if each size is computed by itself.
        several = cuts_windows(data, labelled) or not trainable
        dataset: Dataset = stack.enter_context(closing(_open_dataset(data, network, comm, labelled, several)))
        with comm.agreement():
            if data.lag:
                # Before masks and windows, which apply to samples of several time points.
                dataset = TimeSteps(dataset, data.lag, data.history, data.rollout, labelled)
            if data.invalid == "mask" and labelled:
                dataset = _masked(data, dataset, network)
            if data.labels and labelled:
                if not hasattr(dataset, "labels"):
                    raise UserError(
                        "data.labels: expected a data set that replaces labels (an attribute of that name, of "
                        f"halograd.data.LabelMap), got {type(dataset).__name__}; replace them in {data.file}"
                    )
                dataset.labels = label_maps(data, network)
            windows = _windows(config, dataset, network, labelled, slide)
            if trainable and not windows.cut and getattr(dataset, "extents", None) is not None:
                raise UserError(
                    f"data.patches: expected 1 or more for samples of different size, in {data.where}, got 0; the "
                    "network is trained on windows of them then"
                )
            augmentation = None
            if labelled and data.augment is not None:
                augmentation = AUGMENTATIONS[data.augment.kind](data.augment, windows, config.training.seed)
                check_methods(augmentation)
            reductions = fit_together(data, windows.fields, network)
            _leave_out_padding(windows, network, reductions)
            if labelled and hasattr(dataset, "weighted"):
                # A rule that cannot skip absent cells reads them all, also where the weight is 0: they must be valid.
                skipped = {name for name, reduction in reductions.items() if not reduction.skips}
                weighted = weighted_targets(network)
                dataset.weighted = {name: weighted[name] for name in weighted if name not in skipped}
            if augmentation is not None:
                augmentation.prepare(_ranges(network), weighted_targets(network))
        invalid = _look_for_invalid(data, dataset, network, comm) if labelled else {}
        if data.invalid in ("fill", "mask"):
            # NaN in these inputs is not an error: the loader fills it.
            dataset.lenient = frozenset(name for name, field in dataset.fields.items() if not field.is_target)
        # Without targets, no samples are held out.
        training, validation = np.arange(len(dataset)), np.arange(0)
        if labelled:
            if isinstance(data.validation, list):
                held = held_out(dataset, data.validation)
                training, validation = np.flatnonzero(~held), np.flatnonzero(held)
            else:
                groups = _groups(data, dataset)
                training, validation = split(len(dataset), data.validation, config.training.seed, groups)
            if comm.rank == 0:
                _warn_of_neighbors(data, dataset, training, validation)
        if data.invalid == "skip":
            training, validation = (np.setdiff1d(indices, list(invalid)) for indices in (training, validation))
            left = training if trainable else np.union1d(training, validation)
            _check_left(config, dataset, invalid, len(left), trainable)
        if slide is None:  # otherwise a batch consists of windows, not of samples
            check_batch(config, len(training) if trainable else len(dataset), trainable)
        seconds = 0.0
        if trainable and data.foreground:
            seconds = _find_foreground(config, windows, network, training, comm)
        normalized = [*_normalized(data, dataset), *_normalized_targets(data, network)]
        known = progress.normalization or {}
        known = {normalized[0]: known} if normalized and "mean" in known else known  # format of earlier versions
        if comm.rank == 0:
            _warn_of_stored(dataset, known, [name for name in normalized if name in dataset.fields])
        lacking = [name for name in normalized if name not in known]
        unread = [name for name in lacking if name not in dataset.fields]
        if unread:
            raise UserError(
                f"data.normalize_targets: expected targets that the run has normalized, got {unread[0]!r}, which data "
                "without targets lack; leave the key as in the run"
            )
        computed = _statistics(config, dataset, lacking, training, comm)
        statistics = {
            name: computed[name] if name in computed else ChannelStatistics.from_state_dict(known[name])
            for name in normalized
        }
        scale = 0.0
        if labelled:
            names, ranges = [name for name, field in dataset.fields.items() if field.is_target], _ranges(network)
            bounded = all(name in ranges and ranges[name].bounded for name in names)
            seen = computed | {name: statistics[name] for name in names if name in statistics}
            weights = weights_of(network)
            # Samples to read, for the magnitude, or because a window with an invalid class may be drawn late.
            looks = 1 if bounded and not windows.cut else LOOKS
            usable = np.union1d(training, validation)
            first = int((training if len(training) else usable)[0])  # an evaluation needs no training samples
            scale = on_root(comm.mpi, lambda: look_at_data(dataset, seen, first, looks, weights, usable))
        counts = _balance(network, dataset, training, reductions, progress.class_counts, comm)
        treated = statistics, reductions, invalid, windows, augmentation
        return cls(dataset, training, validation, *treated, scale, counts, seconds)

    @property
    def everything(self) -> np.ndarray:
        """Indices of all usable samples."""
        return np.union1d(self.training, self.validation)

    @property
    def described(self) -> dict[str, Any]:
        """Attributes of the targets in the data (units, names, ...), by target. Local."""
        maps: Mapping[str, LabelMap] = getattr(self.dataset, "labels", {})
        described = {}
        for name, field in self.dataset.fields.items():
            if field.is_target and field.attributes:
                described[name] = maps[name].described(field.attributes) if name in maps else dict(field.attributes)
        return {name: attributes for name, attributes in described.items() if attributes}

    @property
    def placed(self) -> str:
        """Description of the windows that training reads; empty if samples are read whole. Local."""
        windows, table = self.windows, self.windows.foreground
        if not windows.cut:
            return ""
        sizes = " to ".join(dict.fromkeys("x".join(map(str, extents)) for extents in windows.sizes))
        text = f"windows of {windows.size} in samples of {sizes}"
        if table is None:
            return text
        kept = sum(own.nbytes for positions in table.positions.values() for own in positions.values())
        empty = f"; {len(table.empty)} of {len(table.positions)} samples have none" if table.empty else ""
        return (
            f"{text}; the foreground of {table.name!r} was found in {self.foreground_seconds:.2g} s, "
            f"{bytes_text(kept)} of positions{empty}"
        )

    @property
    def evaluated_part(self) -> str:
        """Description of the evaluated part of a sample; empty if it is the whole sample. Local."""
        windows = self.windows
        if windows.share == 1:
            return ""
        smallest, largest = ("x".join(map(str, extents)) for extents in windows.sizes)
        text = f"{windows.size} of {smallest}" + (f" to {largest}" if smallest != largest else "")
        text = f"only the middle window of every sample is evaluated, {text} ({100 * windows.share:.3g} %), because of "
        return f"{text}{windows.key}; `--set data.evaluate=whole` evaluates whole samples"

    @cached_property
    def drawn(self) -> str:
        """String that identifies the training samples and their files, independent of folders. Local.

        Samples are numbered over the files in order, so a new or renamed file changes the indices of later samples.
        """
        names = _of_files(self.dataset, "names", [])
        files = f" in {len(names)} files" if names else ""
        # Names without folders, so data may be moved or be mounted elsewhere.
        mark = zlib.crc32(self.training.tobytes(), zlib.crc32("\n".join(names).encode()))
        return f"{len(self.training)} of {len(self.dataset)} samples{files}, {mark:08x}"

    def warn_of_chunks(self, boxes: Mapping[str, Box], shuffled: bool) -> None:
        """Warn of files whose compressed chunks are much larger than the blocks that this rank reads. Local.

        Parameters
        ----------
        boxes
            Boxes of this rank in a batch, by name of the input.
        shuffled
            Whether samples are read in a random order.
        """
        slow_chunks = _of_files(self.dataset, "slow_chunks", None)
        if slow_chunks is None:
            return
        for name, box in boxes.items():
            reduction = self.reductions.get(name)
            slow = slow_chunks(name, reduction.fine_box(box) if reduction else box, shuffled)
            if slow:
                _log.warning("%s", slow)

    def check_drawn(self, before: str | None, instead: str) -> None:
        """Raise UserError if the run of a checkpoint trained on other samples. Local.

        Parameters
        ----------
        before
            :attr:`drawn` of the checkpoint's run; None if unknown.
        instead
            Alternative remedy, for the message.
        """
        if before not in (None, self.drawn):
            names = _of_files(self.dataset, "names", [])
            by_text = " (or sorted as text, by an older version: list them in that order)" * (names != sorted(names))
            raise UserError(
                f"data.path: expected the training samples of the checkpoint ({before}), got others ({self.drawn}): "
                f"files were added, removed, renamed or changed{by_text}, or data.validation, data.split or "
                f"training.seed changed; undo that, or {instead}"
            )


def _warn_of_stored(dataset: Dataset, known: Mapping[str, Any], names: Sequence[str]) -> None:
    """Warn of inputs that are unpacked although the statistics of a checkpoint may be those of packed values. Local."""
    for name in names:
        packing = dataset.fields[name].packing
        if name in known and not ChannelStatistics.unpacked(known[name]) and packing is not None and packing.scales:
            _log.warning(
                "data.unpack: %s is unpacked by %s; the run of the checkpoint may have read packed numbers. If so, "
                "set data.unpack = false, or train again",
                name,
                ", ".join(packing.names),
            )


def _look_for_invalid(data: DataConfig, dataset: Dataset, network: Network, comm: Communicator) -> dict[int, str]:
    """Return the first fault of each invalid sample, by its index; empty if ``data.invalid`` needs no search.
    Collective: the ranks divide the samples.
    """
    if data.invalid not in ("skip", "fill"):
        return {}
    with comm.agreement():
        own = find_invalid(dataset, _ranges(network), range(comm.rank, len(dataset), comm.size))
    # In the order of the samples, for any number of ranks.
    invalid = dict(sorted(item for part in comm.allgather_objects(own) for item in part.items()))
    if invalid and comm.rank == 0:
        listed = "; ".join(f"{dataset.place(index)}: {what}" for index, what in list(invalid.items())[:_NAMED])
        _log.warning(
            "data.invalid: %d of %d samples %s: %s%s",
            len(invalid),
            len(dataset),
            "are left out" if data.invalid == "skip" else "have numbers that count as the mean of their channel",
            listed,
            f"; and {len(invalid) - _NAMED} more" if len(invalid) > _NAMED else "",
        )
    return invalid


def _check_left(config: Config, dataset: Dataset, invalid: Mapping[int, str], left: int, trainable: bool) -> None:
    """Raise UserError if too few samples are left without the invalid ones. Local, the same on every rank."""
    needed = least_samples(config) if trainable else 1
    if invalid and left < needed:
        first, what = next(iter(invalid.items()))
        subject = f"{needed} samples for a batch of training" if trainable else "samples"
        raise UserError(
            f'data.invalid: expected {subject}, got {left}: "skip" leaves out {len(invalid)} of {len(dataset)} '
            f'({dataset.place(first)}: {what}); repair them, "fill" inputs, or give targets the weight 0 there'
        )


def _windows(
    config: Config, dataset: Dataset, network: Network, labelled: bool, slide: Slide | None
) -> SampleWindows:
    """Return the reader of windows, or of whole samples. Local."""
    extents = {name: network.inputs[name].shape for name in dataset.fields}
    if slide is not None:
        return SlidingWindows(dataset, extents, slide.overlap, _multiples(network))
    shapes = extents if cuts_windows(config.data, labelled) else None
    key = "data.patches" if config.data.patches else "data.augment.crop"
    if shapes is None and getattr(dataset, "extents", None) is not None:
        dataset = OneSize(dataset, 0)  # samples of other sizes are not read by these windows
    return SampleWindows(dataset, shapes, config.training.seed, key)


def _multiples(network: Network) -> list[int]:
    """Return, per axis, the least common multiple of the factors by which predictions are coarser than the first input
    with spatial axes; windows begin at multiples of this number.

    Raises
    ------
    UserError
        If the extents of a prediction do not divide those of the input.
    """
    made_of = [node.shape[:-1] for name, node in network.inputs.items() if name not in network.targets]
    # Inputs without spatial axes have no extents, and are passed over.
    own, loss = next(filter(None, made_of), ()), network.outputs["loss"]
    multiples = [1] * len(own)
    for output, node in network.outputs.items():
        if node is loss:
            continue
        have = node.shape[:-1]
        if len(have) != len(own) or any(n % m for n, m in zip(own, have)):
            raise UserError(
                f"{SLIDING}: expected outputs of the window's extents {own} or coarser by whole factors, got "
                f"{have} of {output!r}; apply whole samples"
            )
        multiples = [math.lcm(multiple, n // m) for multiple, n, m in zip(multiples, own, have)]
    return multiples


def _find_foreground(
    config: Config, windows: SampleWindows, network: Network, training: np.ndarray, comm: Communicator
) -> float:
    """Find the foreground of the training samples, around which windows are placed; return the time [s]. Collective."""
    data, dataset, ranges, begin = config.data, windows.dataset, _ranges(network), time.perf_counter()
    weights = weights_of(network)
    with comm.agreement():
        names = [weight for weight in windows.moved if dataset.fields[weight].is_target and weight not in weights]
        if not windows.cut or not names:
            expected = "targets with spatial axes" if windows.cut else "data.patches = 1 or more"
            raise UserError(f"data.foreground: expected {expected}, got none; set it to 0")
        # Windows are placed around elements of the first target.
        classes, ignored = data.foreground_classes, ranges.get(names[0], TargetRange()).ignored
        # The ranks divide the samples, and all of them keep all positions.
        own, most = training[comm.rank :: comm.size], most_positions(len(training), len(classes))
        mine = find_foreground(dataset, names[0], own, classes, config.training.seed, most, ignored)
    positions = {index: points for part in comm.allgather_objects(mine) for index, points in part.items()}
    shapes = {index: sample_shape(dataset, names[0], index)[:-1] for index in positions}
    windows.foreground = Foreground(names[0], shapes, positions)
    if len(windows.foreground.empty) == len(positions):
        what = f"classes {', '.join(map(str, classes))}" if classes else "values above 0"
        raise UserError(
            f"data.foreground: expected {what} in {names[0]!r} of the training samples, got none; set it to 0"
        )
    return time.perf_counter() - begin


def _leave_out_padding(windows: SampleWindows, network: Network, reductions: Mapping[str, TargetReduction]) -> None:
    """Set the values of targets outside of samples that are smaller than their window to values that the loss ignores.

    Raises
    ------
    UserError
        If the loss has neither weights there nor a class that it ignores.
    """
    ranges, weights, weighted = _ranges(network), weights_of(network), weighted_targets(network)
    for name, field in windows.fields.items():
        if not (field.is_target and windows.pads(name)) or name in weights:
            continue
        # Without an ignored class, the target needs weights that end with the sample: outside of it they are 0.
        ignored = ranges[name].ignored if name in ranges and name not in reductions else None
        if ignored is not None:
            windows.outside[name] = ignored
        elif not weighted.get(name) or not all(windows.pads(weight) for weight in weighted[name]):
            index, extents = windows.smallest
            raise UserError(
                f"{windows.key}: expected samples of at least {windows.size} elements, the network's window, got "
                f"{extents} in {windows.dataset.place(index)}, beyond which the target {name!r} has no value; give its "
                "loss weights on its grid, loss(prediction, target, weights), or an ignore_index, or pad the sample"
            )


def _open_dataset(
    data: DataConfig, network: Network, comm: Communicator, labelled: bool, several_sizes: bool
) -> Dataset:
    """Open the data set. Each file is examined by one rank; others open it at their first read. Collective."""
    if data.file is not None:
        with comm.agreement():
            return _open_own(data, network, labelled)
    inputs, targets = datasets_of(data, network)
    names = inputs, targets if labelled else {}
    # One rank lists the folder: all ranks need the same list, also if files are added meanwhile.
    paths = on_root(comm.mpi, lambda: locate(data.path, data.format, {**names[0], **names[1]}, targets))
    limits = _ranges(network)

    def open_(number: int, structure: Structure | None = None) -> Hdf5Dataset:
        outside, unpack, kind = data.allow_external, data.unpack, data.format
        return Hdf5Dataset(paths[number], *names, data.layout, limits, structure, outside, unpack, kind)

    opened: dict[int, Hdf5Dataset] = {}
    with comm.agreement():
        try:
            for number in range(comm.rank, len(paths), comm.size):
                opened[number] = open_(number)
                if len(paths) > 1:
                    # A `FileSet` opens files again when it reads them, at most `data.open_files` at a time.
                    opened[number].close()
        except DataError as error:
            vars(error)["needs_no_rank"] = True  # the text names the file
            raise
    gathered = comm.allgather_objects({number: part.structure for number, part in opened.items()})
    structures = {number: structure for of_rank in gathered for number, structure in of_rank.items()}
    ordered = [structures[number] for number in range(len(paths))]
    check_same_fields([Path(path) for path in paths], ordered, several_sizes)
    # With its structure, a file is not opened here.
    parts = [opened.get(number) or open_(number, structure) for number, structure in enumerate(ordered)]
    return parts[0] if len(parts) == 1 else FileSet(parts, data.open_files)


def _open_own(data: DataConfig, network: Network, labelled: bool) -> Dataset:
    """Open a data set with a function of the user, with the fields that are read. Local."""
    assert data.file is not None
    dataset = call_own(data.file, "data.file", data.path, **data.options)
    lacks = [name for name in ("fields", "read", "place", "close", "groups", "lenient") if not hasattr(dataset, name)]
    if lacks:
        raise UserError(
            f"data.file: expected {data.file} to return a halograd.data.Dataset, got {type(dataset).__name__} without "
            f"{lacks[0]!r}"
        )
    check_methods(dataset, base=Dataset)
    needed = [name for name in network.inputs if labelled or name not in network.targets]
    masked = weights_of(network) if data.invalid == "mask" else frozenset()
    missing = [name for name in needed if name not in dataset.fields and name not in masked]
    if missing:
        raise UserError(
            f"data.file: expected fields for the inputs of the network ({', '.join(needed)}), got "
            f"{', '.join(dataset.fields) or 'none'}; name them so"
        )
    # Inputs that only the loss reads are always targets: they are neither normalized nor augmented.
    kept = {name: field for name, field in dataset.fields.items() if name in needed}
    dataset.fields = {name: replace(f, is_target=f.is_target or name in network.targets) for name, f in kept.items()}
    dataset.ranges = _ranges(network)
    return dataset


def _masked(data: DataConfig, dataset: Dataset, network: Network) -> Masked:
    """Return the data set with weights that are 0 where a target is invalid. Local."""
    targets: dict[str, list[str]] = {}
    for name, weights in weighted_targets(network).items():
        for weight in weights:
            # Several targets may have the same weights.
            targets.setdefault(weight, []).append(name)
    if not targets:
        raise UserError(
            f'data.invalid: expected weights in the loss of network {network.name!r} for "mask", got none; give it '
            "an input of weights, loss(prediction, target, weights), which needs no dataset"
        )
    if data.rule == "center":
        raise UserError('data.rule: expected another rule than "center" with data.invalid = "mask"')
    for name, names in targets.items():
        shape, grid = network.inputs[name].shape, network.inputs[names[0]].shape
        if shape[:-1] != grid[:-1]:
            raise UserError(
                f'data.invalid: expected weights {name!r} of the extents of {names[0]!r} for "mask", '
                f"{(*grid[:-1], shape[-1])}, as invalid targets are at any position, got {shape}; give the input these "
                "extents (its dataset may have 1 for any of them)"
            )
    channels = {name: network.inputs[name].shape[-1] for name in targets}
    return Masked(dataset, targets, channels, _ranges(network))


def _of_files(dataset: Dataset, name: str, default: Any) -> Any:
    """Return an attribute of a data set of HDF5 files, also through a view; `default` for others. Local."""
    return getattr(dataset, name, default) if isinstance(dataset, Hdf5Dataset | FileSet | DatasetView) else default


def _groups(data: DataConfig, dataset: Dataset) -> np.ndarray | None:
    """Return the group of each sample if whole groups or files are held out; else None."""
    if data.validation == 0:  # nothing is held out
        return None
    files = _of_files(dataset, "file_of", None)
    if data.split == "file":
        if files is None:
            raise UserError(f'data.split: expected several files, to hold out whole ones, got {data.where}; use "auto"')
        return files
    if data.split == "group" and dataset.groups is None:
        raise UserError(
            f"data.split: expected a dataset 'simulation', a whole number per sample, got none in {data.where}; write "
            'one, or use "random" or "file"'
        )
    return None if data.split == "random" else dataset.groups


def _warn_of_neighbors(data: DataConfig, dataset: Dataset, training: np.ndarray, validation: np.ndarray) -> None:
    """Warn if samples of one file are both trained on and held out, because neighbors in time are similar; not if the
    data have groups, or ``data.split`` is not ``"auto"``.
    """
    file_of = _of_files(dataset, "file_of", None)
    if file_of is not None and data.split == "auto" and dataset.groups is None:
        both = np.intersect1d(file_of[training], file_of[validation])
        if both.size:
            _log.warning(
                "data.split: samples of %d of %d files are both trained on and held out; if those of a file are "
                'similar (neighbors in time), hold out whole files by data.split = "file"',
                both.size,
                file_of[-1] + 1,
            )


def fit_together(data: DataConfig, fields: Mapping[str, Field], network: Network) -> dict[str, TargetReduction]:
    """Check that every field has the shape of the network's input of this name; return the reductions of finer targets,
    by name.
    """
    reductions = {}
    for name, field in fields.items():
        extents = network.inputs[name].shape
        if field.static and field.is_target and name not in weights_of(network):
            raise UserError(
                f"data.targets: expected a target {name!r} of each sample, got {field.dataset!r} in {data.where}, "
                f"which all samples share (its axes are {field.static!r}, without those of samples)"
            )
        if field.is_target and field.shape != extents:
            # Weights of the cells of a patch are averaged, whatever the rule for labels.
            rule = "fraction" if name in weights_of(network) else data.rule
            reductions[name] = _reduction(data, field, extents, rule)
        elif field.shape != extents:
            remedy = "change the options of [model] or the data"
            if len(field.shape) == len(extents) - 1:  # the first axis of the dataset was interpreted as that of samples
                remedy = f"give {field.dataset!r} an axis of samples before the others, (1, ...) for one"
            raise UserError(
                f"data.path: expected samples of shape {extents} for {name!r} of model {network.name!r}, got "
                f"{field.shape} in {data.where}; {remedy}"
            )
    return reductions


def _reduction(data: DataConfig, field: Field, extents: tuple[int, ...], rule: str | None) -> TargetReduction:
    """Return the reduction of a target in the file to the coarser target of the network."""
    have = field.shape
    divides = len(have) == len(extents) > 1 and all(n and not m % n for m, n in zip(have, extents))
    if not divides or have[-1] != extents[-1]:
        raise UserError(
            f"data.targets: expected targets of shape {extents} (or finer by whole factors), got {have} in "
            f"{field.dataset!r} of {data.where}"
        )
    if rule is None:
        raise UserError(
            f"data.rule: expected a rule from cells to patches (any, all, majority, fraction, max, center), got "
            f"none; the network predicts {extents[:-1]} patches, the targets have {have[:-1]} cells"
        )
    return TargetReduction(rule, tuple(m // n for m, n in zip(have[:-1], extents[:-1])))


def _ranges(network: Network) -> dict[str, TargetRange]:
    """Return the valid range of each target that the loss compares: the range of the loss, and integers for classes."""
    loss, ranges = network.outputs["loss"], {}
    shapes = [node.shape for node in loss.inputs]
    for i, node in enumerate(loss.inputs):
        if isinstance(node, Input) and loss.layer.compares(i):
            limits = loss.layer.target_range(i, *shapes) or TargetRange()[:2]
            # Only class numbers have an integer dtype.
            whole, ignored = node.dtype != "compute", loss.layer.ignored_target(i)
            ranges[network.names[node]] = TargetRange(*limits, whole=whole, ignored=ignored)
    return ranges


def _balance(
    network: Network,
    dataset: Dataset,
    training: np.ndarray,
    reductions: Mapping[str, TargetReduction],
    known: Mapping[str, list[int]] | None,
    comm: Communicator,
) -> dict[str, list[int]]:
    """Balance the loss by the class counts in `known`, or by new counts; return the counts by target. Collective."""
    classes, known_counts = network.counted, dict(known or {})
    for name in classes:
        if name in known_counts:
            continue
        with comm.agreement():
            # The ranks divide the samples, and add up their counts below.
            own = training[comm.rank :: comm.size]
            counts = count_classes(dataset, name, classes[name], own, reductions.get(name))
        comm.reduction(counts, kind="data").run()
        known_counts[name] = counts.tolist()
    try:
        network.balance(known_counts)
    except ValueError as error:
        raise UserError(f"data.targets: {error}") from error
    return {name: known_counts[name] for name in classes}


def _normalized(data: DataConfig, dataset: Dataset) -> list[str]:
    """Return the names of the inputs to normalize; raise UserError for an unknown name."""
    inputs = [name for name, field in dataset.fields.items() if not field.is_target]
    if isinstance(data.normalize, bool):
        return inputs if data.normalize else []
    unknown = [name for name in data.normalize if name not in inputs]
    if unknown:
        raise UserError(f"data.normalize: expected names of inputs ({', '.join(inputs)}), got {unknown[0]!r}")
    return data.normalize


def _normalized_targets(data: DataConfig, network: Network) -> list[str]:
    """Return the names of the targets to normalize; raise UserError for a name that is not a target of a regression."""
    weights, ranges = weights_of(network), _ranges(network)
    # Targets with a smallest value, such as classes and probabilities, keep their numbers.
    numbers = [name for name in network.targets if name not in weights and not ranges.get(name, TargetRange()).bounded]
    if isinstance(data.normalize_targets, bool):
        return numbers if data.normalize_targets else []
    unknown = [name for name in data.normalize_targets if name not in numbers]
    if unknown:
        listed = f"({', '.join(numbers)})" if numbers else "(there are none)"
        raise UserError(
            f"data.normalize_targets: expected names of targets that may be any number {listed}, got {unknown[0]!r}"
        )
    return data.normalize_targets


def _statistics(
    config: Config, dataset: Dataset, names: Sequence[str], training: np.ndarray, comm: Communicator
) -> dict[str, ChannelStatistics]:
    """Compute mean and scale of the channels of the inputs and targets `names`, or read those that an earlier run has
    kept. Collective.
    """
    data, count = config.data, config.data.statistics
    if count is not None and count < len(training):
        drawn = np.random.default_rng([config.training.seed, _STATISTICS]).permutation(len(training))[:count]
        # Sorted, to read the files in order.
        training = training[np.sort(drawn)]

    # `channel_statistics` adds up the sums of all ranks by it.
    def total(array: np.ndarray) -> np.ndarray:
        comm.reduction(array, kind="data").run()
        return array

    if names:
        check_transforms(dataset, data.transforms)
    store: KeptStatistics | None = None
    kept = dict[str, Any]()
    if names and count is not None:
        # What is kept is valid only for these samples, weights and settings.
        about = {
            "samples": hashlib.sha256(training.tobytes()).hexdigest(),
            "weights": {name: list(own) for name, own in getattr(dataset, "weighted", {}).items()},
            "data": data.model_dump(mode="json", exclude=_NOT_OF_STATISTICS),
        }

        def read() -> dict[str, Any]:
            nonlocal store
            store = KeptStatistics(dataset, about)
            return store.read()

        kept = on_root(comm.mpi, read)  # files that rank 0 cannot examine are an error of all ranks
    statistics = {name: ChannelStatistics.from_state_dict(kept[name]) for name in names if name in kept}
    computed = {
        name: channel_statistics(
            dataset,
            name,
            training,
            rank=comm.rank,
            size=comm.size,
            allreduce=total,
            agree=comm.agree,
            transforms=data.transforms,
        )
        for name in names
        if name not in statistics
    }
    # Only rank 0 has the store.
    if store is not None and computed:
        store.write(computed)
    return statistics | computed
