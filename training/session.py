"""Everything a run works with, built from a configuration: data, network, executor and the loader between."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np

from halograd.errors import UserError

from ..comm import Communicator
from ..data import (
    Batch,
    ChannelStatistics,
    DataError,
    Dataset,
    FileSet,
    Hdf5Dataset,
    Loader,
    Sampler,
    TargetReduction,
    channel_statistics,
    check_transforms,
    find_files,
    split,
)
from ..data.files import check_alike
from ..data.look import LOOKS, look_at_data
from ..data.sampler import Batches
from ..data.structure import Field, Structure
from ..data.targets import TargetRange
from ..layers import GivenValues, Input, Network, Strategy
from ..models.own import is_own, source_of
from .build import check_batch, check_memory, datasets_of, make_network, make_strategy, with_reduction
from .config import Config, DataConfig
from .executor import Executor
from .inputs import DeviceFeed
from .kernels import connect_device, open_kernels
from .root import on_root
from .timeline import Timeline

__all__ = ["Session"]

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass
class Session:
    """Data, network and executor of one run. Collective over `comm` to open; closed by the stack it was opened on.

    Attributes
    ----------
    training, validation
        Dataset indices, the same on all ranks.
    statistics
        By input, of those that are normalized.
    timeline
        None unless ``output.timeline`` is set, or the run follows a plan; then it is paused but for some steps.
    ahead
        Who brings batches to a device; None on the host.
    target_scale
        What the loss of a regression is, in order of magnitude, if zero is predicted.
    """

    config: Config
    comm: Communicator
    network: Network
    executor: Executor
    dataset: Dataset
    training: np.ndarray
    validation: np.ndarray
    statistics: dict[str, ChannelStatistics]
    loader: Loader
    timeline: Timeline | None
    ahead: DeviceFeed | None = None
    target_scale: float = 0.0

    @classmethod
    def open(
        cls,
        config: Config,
        comm: Communicator,
        stack: ExitStack,
        trainable: bool = True,
        normalization: dict[str, Any] | None = None,
        strategy: Strategy | None = None,
        labelled: bool = True,
    ) -> Session:
        """Build everything. Collective over `comm`: what fails on one rank is raised on all.

        `normalization` is that of a checkpoint, computed from the data otherwise; `strategy` one that was planned,
        that of the configuration otherwise; not `labelled`: targets are not read, and no samples are held out.
        """
        with comm.agreement():
            return cls._build(config, comm, stack, trainable, normalization, strategy, labelled)

    @classmethod
    def _build(
        cls,
        config: Config,
        comm: Communicator,
        stack: ExitStack,
        trainable: bool,
        normalization: dict[str, Any] | None,
        strategy: Strategy | None,
        labelled: bool,
    ) -> Session:
        data, settings = config.data, config.training
        network = make_network(config)
        _check_given(network, comm)
        planned = strategy is not None
        strategy = strategy or _strategy(config, comm, network)
        strategy = with_reduction(strategy, config)
        strategy.validate(network, comm.size)
        strategy.refuse_empty_blocks(network)
        dataset = stack.enter_context(closing(_open_dataset(data, network, comm, labelled)))
        with comm.agreement():
            reductions = _fit_together(data, dataset, network)
        training, validation = np.arange(len(dataset)), np.arange(0)
        if labelled:
            training, validation = split(len(dataset), data.validation, settings.seed, _groups(data, dataset))
            if comm.rank == 0:
                _warn_of_neighbors(data, dataset, training, validation)
        check_batch(config, len(training) if trainable else len(dataset), trainable)
        wanted, known = _normalized(data, dataset), normalization or {}
        known = {wanted[0]: known} if wanted and "mean" in known else known  # of a checkpoint of an earlier version
        computed = _statistics(data, dataset, [name for name in wanted if name not in known], training, comm)
        statistics = {
            name: computed[name] if name in computed else ChannelStatistics.from_state_dict(known[name])
            for name in wanted
        }
        scale = 0.0
        if labelled:
            looks = _looks(dataset, network)
            scale = _on_root(comm, lambda: look_at_data(dataset, computed, int(training[0]), looks))
        timeline = None
        if config.output.timeline or planned:
            timeline = comm.recorder = Timeline(comm.rank)
            timeline.paused = not config.output.timeline
        kernels = stack.enter_context(open_kernels(config.backend, comm))
        if kernels.device.is_host:
            check_memory(config, comm, network, strategy, trainable)
        connect_device(kernels, comm, config.backend.device_transport)
        executor = stack.enter_context(
            Executor(
                network,
                comm,
                kernels,
                settings.batch,
                strategy,
                settings.dtype,
                trainable,
                seed=settings.seed,
                graph=config.backend.graph,
            )
        )
        inputs = {name: executor.input(name) for name in dataset.fields}
        slots, device, ahead = data.prefetch + 1, executor.device, None
        if not device.is_host:
            arrays = {name: made.array for name, made in inputs.items()}
            ahead = DeviceFeed(executor.memory, arrays, slots, executor.store.dtype)
        loader = stack.enter_context(
            Loader(
                dataset,
                {name: made.box for name, made in inputs.items()},
                statistics=statistics,
                reductions=reductions,
                dtype=executor.store.dtype,  # of 16 bits are the inputs on the device only: statistics come before
                depth=slots,
                recorder=timeline,
                allocate=np.zeros if device.is_host else device.pinned,
                ahead=ahead,
            )
        )
        found = (dataset, training, validation, statistics)
        return cls(config, comm, network, executor, *found, loader, timeline, ahead, scale)

    def sampler(self) -> Sampler:
        """Batches of the training samples, in the order of the run's seed."""
        shuffle: Literal["epoch", "never"] = "epoch" if self.config.data.shuffle else "never"
        return Sampler(self.training, self.config.training.batch, self.config.training.seed, shuffle)

    @cached_property
    def drawn(self) -> str:
        """Which samples of which files are trained on: the same text for the same ones, wherever the files lie. Local.

        They are numbered over the files in order, so one that is added or renamed moves those of others.
        """
        names = self.dataset.names if isinstance(self.dataset, FileSet) else []
        files = f" in {len(names)} files" if names else ""
        mark = zlib.crc32(self.training.tobytes(), zlib.crc32("\n".join(names).encode()))
        return f"{len(self.training)} of {len(self.dataset)} samples{files}, {mark:08x}"

    @cached_property
    def source(self) -> str | None:
        """Function of a network of the user's own, and a checksum of its file; else None. Local."""
        name = self.config.model.source
        return " ".join(source_of(name)) if is_own(name) else None

    def warn_of_changes(self, before: str | None) -> None:
        """Say that the file of the network, which may have layers, was changed since a checkpoint. Local."""
        if before not in (None, self.source) and self.comm.rank == 0:
            _log.warning(
                "model.file: the checkpoint is of %s, this is %s; the network has the same layers and settings, but a "
                "layer of your own may compute otherwise",
                before,
                self.source,
            )

    def check_drawn(self, before: str | None, instead: str) -> None:
        """Refuse to go on from a checkpoint of a run that trained on others: what this one holds out. Local.

        Parameters
        ----------
        before
            :attr:`drawn` of that run; None: it is not known.
        instead
            What else to do.
        """
        if before not in (None, self.drawn):
            raise UserError(
                f"data.path: expected the training samples of the checkpoint ({before}), got others ({self.drawn}): "
                "files were added, removed, renamed or changed, or data.validation, data.split or training.seed; put "
                f"that back, or {instead}"
            )

    def in_order(self, indices: np.ndarray) -> Batches:
        """Batches of these samples, each once; the last one is filled up."""
        batch = self.config.training.batch
        return Sampler(indices, batch, shuffle="never", remainder="fill").rest_of_epoch()

    def feed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Bring one batch after the other into the inputs of the executor. Local."""
        inputs = {name: self.executor.input(name).array for name in self.dataset.fields}
        pulse = self.executor.pulse
        pulse.at("data", "")
        with closing(self.loader.iterate(batches)) as loaded:
            for item in loaded:
                if self.ahead is not None:
                    self.ahead.bring(item)
                else:
                    for name, array in inputs.items():
                        np.copyto(array, item.arrays[name], casting="unsafe")
                self.executor.mode.valid = item.batch.valid
                yield item.batch
                pulse.at("data", "")


def _check_given(network: Network, comm: Communicator) -> None:
    """Refuse files of initial values that differ between ranks, as those on disks of nodes may. Collective."""
    specs = {**network.parameters(), **network.state()}.values()
    mine = sorted({spec.init.source for spec in specs if isinstance(spec.init, GivenValues)})
    comm.agree(None)
    first = comm.bcast(mine)
    if first != mine:
        raise UserError(
            f"model: expected initial values from {', '.join(first)} as on rank 0, got {', '.join(mine)}; put one file "
            "where all nodes see it"
        )


def _strategy(config: Config, comm: Communicator, network: Network) -> Strategy:
    """That of the configuration; a file is read by rank 0 for all. Collective."""

    def make() -> Strategy:
        return make_strategy(config.strategy, comm.size, network, config.training.batch)

    return make() if config.strategy.file is None else _on_root(comm, make)  # arithmetic is alike on all ranks


def _on_root(comm: Communicator, call: Callable[[], Result]) -> Result:
    """:func:`on_root`, within an agreement. Collective."""
    comm.agree(None)
    return on_root(comm.mpi, call)


def _open_dataset(data: DataConfig, network: Network, comm: Communicator, labelled: bool) -> Dataset:
    """The data set. Every file is examined by one rank for all: the others open it when they first read. Collective."""
    inputs, targets = datasets_of(data, network)
    names = inputs, targets if labelled else {}
    paths = _on_root(comm, lambda: find_files(data.path))
    limits = _ranges(network)

    def open_(number: int, structure: Structure | None = None) -> Hdf5Dataset:
        return Hdf5Dataset(paths[number], *names, data.layout, limits, structure, data.allow_external)

    opened: dict[int, Hdf5Dataset] = {}
    fault: DataError | None = None
    try:
        for number in range(comm.rank, len(paths), comm.size):
            opened[number] = open_(number)
            if len(paths) > 1:
                opened[number].close()
    except DataError as error:
        vars(error)["needs_no_rank"] = True  # it names the file
        fault = error
    comm.agree(fault)
    found = comm.allgather_objects({number: part.structure for number, part in opened.items()})
    structures = {number: structure for some in found for number, structure in some.items()}
    check_alike(paths, [structures[number] for number in range(len(paths))])
    parts = [opened.get(number) or open_(number, structures[number]) for number in range(len(paths))]
    return parts[0] if len(parts) == 1 else FileSet(parts, data.open_files)


def _groups(data: DataConfig, dataset: Dataset) -> np.ndarray | None:
    """Which samples are held out together."""
    files = dataset.file_of if isinstance(dataset, FileSet) else None
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
    """Samples of one simulation are much alike: validation by neighbors in time says little."""
    if isinstance(dataset, FileSet) and data.split == "auto" and dataset.groups is None:
        both = np.intersect1d(dataset.file_of[training], dataset.file_of[validation])
        if both.size:
            _log.warning(
                "data.split: samples of %d of %d files are both trained on and held out; if those of a file are much "
                'alike (neighbors in time), hold out whole files by data.split = "file"',
                both.size,
                len(dataset.parts),
            )


def _fit_together(data: DataConfig, dataset: Dataset, network: Network) -> dict[str, TargetReduction]:
    """Check that every field has the shape of its input; how targets that are finer are reduced, by name."""
    reductions = {}
    for name, field in dataset.fields.items():
        wanted = network.inputs[name].shape
        if field.is_target and field.shape != wanted:
            reductions[name] = _reduction(data, field, wanted)
        elif field.shape != wanted:
            raise UserError(
                f"data.path: expected samples of shape {wanted} for {name!r} of model {network.name!r}, got "
                f"{field.shape} in {data.where}; change the options of [model] or the data"
            )
    return reductions


def _reduction(data: DataConfig, field: Field, wanted: tuple[int, ...]) -> TargetReduction:
    """How a target of the file becomes that of the network, which is coarser."""
    have = field.shape
    divides = len(have) == len(wanted) > 1 and all(n and not m % n for m, n in zip(have, wanted))
    if not divides or have[-1] != wanted[-1]:
        raise UserError(
            f"data.targets: expected targets of shape {wanted} (or finer by whole factors), got {have} in "
            f"{field.dataset!r} of {data.where}"
        )
    if data.rule is None:
        raise UserError(
            f"data.rule: expected how a patch is made of its cells (any, all, majority, fraction, max, center), got "
            f"nothing; the network predicts {wanted[:-1]} patches, the targets have {have[:-1]} cells"
        )
    return TargetReduction(data.rule, tuple(m // n for m, n in zip(have[:-1], wanted[:-1])))


def _ranges(network: Network) -> dict[str, TargetRange]:
    """What targets may be, by name: as the loss says, and whole numbers where they are classes."""
    loss, found = network.outputs["loss"], {}
    shapes = [node.shape for node in loss.inputs]
    for i, node in enumerate(loss.inputs):
        if isinstance(node, Input) and loss.layer.compares(i):
            limits = loss.layer.target_range(i, *shapes) or TargetRange()[:2]
            found[network.names[node]] = TargetRange(*limits, whole=node.dtype != "compute")
    return found


def _looks(dataset: Dataset, network: Network) -> int:
    """How many samples show how large targets are: one where losses say it of all of them."""
    ranges = _ranges(network)
    names = [name for name, field in dataset.fields.items() if field.is_target]
    return 1 if all(name in ranges and ranges[name].bounded for name in names) else LOOKS


def _normalized(data: DataConfig, dataset: Dataset) -> list[str]:
    """Names of the inputs that are."""
    inputs = [name for name, field in dataset.fields.items() if not field.is_target]
    if isinstance(data.normalize, bool):
        return inputs if data.normalize else []
    unknown = [name for name in data.normalize if name not in inputs]
    if unknown:
        raise UserError(f"data.normalize: expected names of inputs ({', '.join(inputs)}), got {unknown[0]!r}")
    return data.normalize


def _statistics(
    data: DataConfig, dataset: Dataset, names: Sequence[str], training: np.ndarray, comm: Communicator
) -> dict[str, ChannelStatistics]:
    """Mean and scale of the channels of these inputs. Collective."""

    def total(array: np.ndarray) -> np.ndarray:
        comm.reduction(array, kind="data").run()
        return array

    if names:
        check_transforms(dataset, data.transforms)
    return {
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
    }
