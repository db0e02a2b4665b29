"""Objects of a run, built from a configuration, and their description for the log."""

from __future__ import annotations

import logging
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from halograd.errors import UserError
from halograd.user_code import is_location
from halograd.version import __version__

from ..comm import Communicator
from ..data import (
    Batch,
    Loader,
    Sampler,
)
from ..data.sampler import Batches
from ..data.windows import Slide
from ..device import device_of
from ..interchange.weights import WeightsFile
from ..layers import GivenValues, Network, Strategy
from ..layers.strategy import cuts_text
from ..lowering.context import copying
from ..lowering.operations import Run
from ..models.own import source_of
from ..perfmodel.small import SmallLayers
from .backend import connect_device, open_kernels
from .build import check_memory, fit_memory, make_network, make_strategy, needs_of, with_reduction
from .checkpoint import TrainingProgress
from .config import Config
from .directory import job_id
from .executor import Executor
from .inputs import DeviceFeed
from .memory import memory_errors
from .root import on_root
from .samples import Samples
from .small import describe, suited
from .timeline import Timeline

__all__ = ["Session", "begin_entry", "begin_with", "data_lines", "headline", "open_loader"]

_log = logging.getLogger(__name__)
NAMED = 4  # largest number of layers that a message names


@dataclass
class Session:
    """Data, network and executor of one run. `open` is collective over `comm`; its argument `stack` closes all objects.

    Attributes
    ----------
    samples
        Data set, and the samples to read.
    timeline
        Recorder, if ``output.timeline`` is set or the run follows a plan (then it records only some steps); else None.
    ahead
        Feed that copies batches to a device ahead of their use; None on the host.
    small
        Other cuts of small layers; None: there are none.
    """

    config: Config
    comm: Communicator
    network: Network
    executor: Executor
    samples: Samples
    loader: Loader
    timeline: Timeline | None
    ahead: DeviceFeed | None = None
    small: SmallLayers | None = None

    @classmethod
    def open(
        cls,
        config: Config,
        comm: Communicator,
        stack: ExitStack,
        trainable: bool = True,
        progress: TrainingProgress | None = None,
        strategy: Strategy | None = None,
        labelled: bool = True,
        slide: Slide | None = None,
    ) -> Session:
        """Build all objects. Collective over `comm`: a fault of one rank is raised on all ranks.

        Statistics of the data are those of `progress`, from a checkpoint, if it has them; else they are computed.
        `strategy` comes from a plan; None: the strategy of the configuration is used. Without `labelled`, targets are
        not read and no samples are held out. With `slide`, the network's inputs are windows of the samples.
        """
        with comm.agreement(), memory_errors(trainable):
            data, settings = config.data, config.training
            network = make_network(config)
            _check_given(network, comm)
            if trainable and settings.accumulate > 1 and comm.rank == 0:
                _warn_of_parts(network, settings.at_once)
            planned = strategy is not None
            small = None
            if strategy is None:
                strategy, small = _strategy(config, comm, network, trainable)
            strategy = with_reduction(strategy, config)
            strategy.validate(network, comm.size)
            strategy.refuse_empty_blocks(network)
            known = progress or TrainingProgress()
            samples = Samples.open(config, network, comm, stack, known, trainable, labelled, slide)
            timeline = None
            if config.output.timeline or planned:
                # Before the executor, which makes calls that are timed only if there is a recorder.
                timeline = comm.instruments.recorder = Timeline(comm.rank, alone=comm.size == 1)
                timeline.paused = not config.output.timeline
            kernels = stack.enter_context(open_kernels(config.backend, comm))
            # A plan has chosen already what is computed again.
            if trainable and not planned and config.strategy.recompute == "auto":
                strategy = fit_memory(config, comm, network, strategy, kernels.device)
            # Linux grants more memory than there is, and kills a process when it is used.
            if kernels.device.is_host:
                check_memory(config, comm, network, strategy, trainable)
            # Before the executor, whose exchanges and sums need the transport.
            connect_device(kernels, comm, config.backend.device_transport)
            executor = stack.enter_context(
                Executor(
                    network,
                    comm,
                    kernels,
                    settings.at_once,
                    strategy,
                    settings.dtype,
                    trainable,
                    seed=settings.seed,
                    graph=config.backend.graph,
                    parts=settings.accumulate if trainable else 1,
                )
            )
            if kernels.device.is_host:  # scratch memory of the kernels is reserved, but not used yet
                check_memory(config, comm, network, strategy, trainable, kernels.held_bytes)
            inputs = {name: executor.input(name) for name in samples.dataset.fields}
            if comm.rank == 0:
                samples.warn_of_chunks({name: value.box for name, value in inputs.items()}, trainable and data.shuffle)
            loader, ahead = open_loader(config, executor, samples, stack, timeline)
            return cls(config, comm, network, executor, samples, loader, timeline, ahead, small)

    def memory_errors(self) -> AbstractContextManager[None]:
        """Return a context that explains an allocation that fails (:func:`halograd.training.memory.memory_errors`)."""
        return _memory_errors(self.config, self.executor)

    def sampler(self) -> Sampler:
        """Return the sampler of the training samples, in the order of the run's seed."""
        shuffle: Literal["epoch", "never"] = "epoch" if self.config.data.shuffle else "never"
        batch, seed = self.config.training.batch, self.config.training.seed
        augmented = self.samples.augmentation is not None or self.samples.windows.cut
        return Sampler(
            self.samples.training,
            batch,
            seed,
            shuffle,
            augmented=augmented,
            patches=max(1, self.config.data.patches),
            steps=self.config.training.steps_per_epoch,
            foreground=self.config.data.foreground,
        )

    @cached_property
    def source(self) -> str | None:
        """Location and checksum of the user's function that builds the network; None for other models. Local."""
        name = self.config.model.source
        return " ".join(source_of(name)) if is_location(name) else None

    def warn_of_changes(self, before: str | None) -> None:
        """Warn if the file of the network, which may define layers, has changed since a checkpoint, whose
        :attr:`source` is `before`. Local.
        """
        if before not in (None, self.source) and self.comm.rank == 0:
            _log.warning(
                "model.file: the checkpoint is from %s, this is %s; the network has the same layers and settings, but "
                "your own layers may compute other results",
                before,
                self.source,
            )

    def in_order(self, indices: np.ndarray) -> Batches:
        """Return batches of the samples `indices`, each sample once; the last batch is padded."""
        batch = self.config.training.at_once
        return Sampler(indices, batch, shuffle="never", remainder="fill").rest_of_epoch()

    def feed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Copy each batch to the inputs of the executor, then yield it. Local."""
        inputs = {name: self.executor.input(name).array for name in self.samples.dataset.fields}
        heartbeat = self.executor.heartbeat
        # Also here, because the loader may hang before the first batch.
        heartbeat.at("data", "")
        with closing(self.loader.iterate(batches)) as loaded:  # also if the caller ends early: a thread reads ahead
            for item in loaded:
                if self.ahead is not None:
                    self.ahead.copy_to_inputs(item)
                else:
                    for name in inputs.keys() if item.batch.only is None else item.batch.only:
                        # The loader converts to the dtype of the parameters; inputs may have 16 bits.
                        np.copyto(inputs[name], item.arrays[name], casting="unsafe")
                # Losses and metrics ignore the samples that fill up a last batch.
                self.executor.mode.valid = item.batch.valid
                yield item.batch
                heartbeat.at("data", "")


def open_loader(
    config: Config, executor: Executor, samples: Samples, stack: ExitStack, timeline: Timeline | None = None
) -> tuple[Loader, DeviceFeed | None]:
    """Open the loader of an executor's inputs, with the feed of its device. Local; `stack` closes both."""
    inputs = {name: executor.input(name) for name in samples.dataset.fields}
    # One batch is in use while the others are read ahead.
    slots, device, ahead = config.data.prefetch + 1, executor.device, None
    with _memory_errors(config, executor):
        if not device.is_host:
            arrays = {name: staged.array for name, staged in inputs.items()}
            ahead = stack.enter_context(DeviceFeed(executor.memory, arrays, slots, executor.store.dtype))
        loader = stack.enter_context(
            Loader(
                samples.dataset,
                {name: staged.box for name, staged in inputs.items()},
                statistics=samples.statistics,
                reductions=samples.reductions,
                windows=samples.windows,
                augmentation=samples.augmentation,
                # Normalized before the copy to a device, whose inputs may have 16 bits.
                dtype=executor.store.dtype,
                depth=slots,
                recorder=timeline,
                # Copies from other than pinned memory make the host wait.
                allocate=np.zeros if device.is_host else device.pinned,
                ahead=ahead,
            )
        )
    return loader, ahead


def _memory_errors(config: Config, executor: Executor) -> AbstractContextManager[None]:
    trainable = executor.reducer is not None
    needs = executor.comm, executor.network, executor.strategy, trainable
    return memory_errors(
        trainable,
        lambda: needs_of(config, *needs, executor.kernels.held_bytes),
        lambda: executor.predicted_bytes,
    )


def _warn_of_parts(network: Network, size: int) -> None:
    """Warn of results that depend on the parts of a batch, which have `size` samples each. Local."""
    layers = [f"{name}: {node.layer.of_batch}" for name, node in network.layers.items() if node.layer.of_batch]
    if layers:
        more = f"; and {len(layers) - NAMED} more" if len(layers) > NAMED else ""
        _log.warning(
            "training.accumulate: these results are over the %d samples of each part, not over the batch: %s%s",
            size,
            "; ".join(layers[:NAMED]),
            more,
        )


def _check_given(network: Network, comm: Communicator) -> None:
    """Raise UserError if files of initial values differ between ranks, as on local disks of nodes. Collective."""
    specs = {**network.parameters(), **network.state()}.values()
    mine = sorted({spec.init.source for spec in specs if isinstance(spec.init, GivenValues)})
    # If another rank has no network, its error is raised here: the broadcast would wait for that rank.
    comm.agree(None)
    first = comm.bcast(mine)
    if first != mine:
        raise UserError(
            f"model: expected initial values from {', '.join(first)} as on rank 0, got {', '.join(mine)}; put one file "
            "on a file system that all nodes share"
        )


def _strategy(
    config: Config, comm: Communicator, network: Network, trainable: bool
) -> tuple[Strategy, SmallLayers | None]:
    """Return the strategy of the configuration, and the other cuts of small layers in it, None without such cuts.
    Collective; rank 0 reads a file.
    """
    small: list[SmallLayers] = []

    def suit(strategy: Strategy) -> Strategy:
        small.extend(filter(None, [suited(config, comm, network, strategy)]))
        return small[0].strategy if small else strategy

    # `make_strategy` calls `suit` once the cut of all layers is known.
    arguments = config.strategy, comm.size, network, config.training.at_once, trainable
    if config.strategy.file is not None:
        return on_root(comm.mpi, lambda: make_strategy(*arguments)), None
    return make_strategy(*arguments, suit), small[0] if small else None


def begin_with(session: Session) -> None:
    """Set this rank's parameters and states from the file ``training.init``. Collective.

    A rank reads each array that it needs whole and copies its block, so the values are the same under every cut.

    Raises
    ------
    UserError
        If the file has no weights, does not fit the network, or differs between ranks.
    """
    comm, store, settings = session.comm, session.executor.store, session.config.training
    assert settings.init is not None
    with comm.agreement():
        file = WeightsFile(session.network, settings.init, settings.init_fresh)
        mark = file.checksum()
    first = comm.bcast(mark)
    with comm.agreement():
        if mark != first:
            raise UserError(
                f"training.init: expected the same file {settings.init} on all nodes, got another one than rank 0 has; "
                "name a file on a file system that the nodes share"
            )
        for name in file.names:
            target = store.params[name] if name in store.params else store.state[name]
            block = store.box(name)
            # An array of which this rank holds nothing is not read.
            if block.size:
                device_of(target).assign(target, file.read(name)[block.slices()])
    store.refresh()


_NAMED = 20  # largest number of classes or channels in a line


def headline(session: Session) -> str:
    """Return one line on network, data, ranks and kernels. Local."""
    executor, again, choice = session.executor, len(_recomputed(session)), session.comm.devices.choice
    by = f", arrays by {choice.describe()}" if choice is not None and session.comm.size > 1 else ""
    more = f", outputs of {again} of {len(session.network.layers)} layers are computed again" if again else ""
    return (
        f"{session.network.name}: {executor.store.count:,} parameters, {len(session.samples.training)} + "
        f"{len(session.samples.validation)} samples, {session.comm.size} rank(s) ({_cuts(session)}), "
        f"{_kernels(session)}{by}{more}"
    )


def _recomputed(session: Session) -> list[str]:
    """Return the layers whose operations the backward pass of this rank repeats."""
    again = [segment for segment in session.executor.program.backward if segment.again]
    # Copies for a layer that reads a repeated output belong to that layer, whose own output may be kept.
    runs = (o for segment in again for o in segment.operations if isinstance(o, Run) and o.kernel.make is not copying)
    repeated = {run.layer for run in runs}
    return [name for name in session.network.layers if name in repeated]


def data_lines(session: Session) -> list[str]:
    """Return lines on cuts and on treatments of the data that the configuration does not show. Local.

    They list small layers with other cuts; the channels that are transformed before normalization, some because of
    their names; for targets with class counts, the count and weight of each class; and the windows that are trained on.
    """
    small = [] if session.small is None else [describe(session.network, session.small)]
    return [*small, *_transforms(session), *_balances(session), *filter(None, [session.samples.placed])]


def _transforms(session: Session) -> Iterator[str]:
    dataset = session.samples.dataset
    for name, statistics in session.samples.statistics.items():
        if name not in dataset.fields:  # a target, in data without targets
            continue
        by_rule: dict[str, list[str]] = {}
        for channel, rule in zip(dataset.fields[name].channel_names, statistics.transforms):
            by_rule.setdefault(rule, []).append(channel)
        by_rule.pop("none", None)
        if by_rule:
            rules = "; ".join(f'{_listed(channels)} by "{rule}"' for rule, channels in by_rule.items())
            yield f"{name}: transformed before they are normalized (data.transforms): {rules}"


def _balances(session: Session) -> Iterator[str]:
    factors = session.network.class_factors
    for name, counts in session.samples.class_counts.items():
        each = [f"{c}: {n:,} ({w:.4g})" for c, (n, w) in enumerate(zip(counts, factors[name]))]
        yield f"classes of {name} in the training samples, and their weights: {_listed(each)}"


def _listed(texts: Sequence[str]) -> str:
    more = f", and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return ", ".join(texts[:_NAMED]) + more


def begin_entry(session: Session, step: int, epochs: int, sampler: Sampler) -> dict[str, Any]:
    """Return the log entry ``begin``: network, data, ranks, versions and configuration. Collective.

    `step` is the number of updates so far, after which `sampler` continues, and `epochs` the number of all epochs.
    """
    config, comm, small = session.config, session.comm, session.small
    hosts = Counter(comm.allgather_objects(platform.node()))
    return {
        "step": step,
        "epochs": epochs,
        "steps_per_epoch": len(sampler),
        # Not the product of both: earlier jobs of this run may have had batches of another size.
        "last_step": step + sampler.left(epochs),
        "batch": config.training.batch,
        "samples": len(session.samples.training),
        "held_out": len(session.samples.validation),
        "invalid": len(session.samples.invalid),
        "class_counts": session.samples.class_counts,
        "network": session.network.name,
        "parameters": session.executor.store.count,
        "ranks": comm.size,
        "hosts": dict(hosts),
        "cut": _cuts(session),
        "small_layers": {name: cuts_text(small.strategy.cuts_of(name)) for name in small.layers} if small else {},
        "recomputed": _recomputed(session),
        "kernels": _kernels(session),
        "transport": comm.transport,
        "device_transport": None if comm.devices.choice is None else comm.devices.choice.describe(),
        "job": job_id(),
        "version": __version__,
        "config": config.model_dump(mode="json", exclude_unset=True),
    }


def _kernels(session: Session) -> str:
    """Return a string about the backend and, if there is a choice, the arithmetic of its matrix products."""
    kernels = session.executor.kernels
    return ", ".join(filter(None, (kernels.describe(), kernels.describe_arithmetic(session.executor.dtype.name))))


def _cuts(session: Session) -> str:
    strategy = session.executor.strategy
    every = {cuts_text(strategy.cuts_of(name)) for name in session.network.layers}
    return f"{len(every)} cuts, layer by layer" if len(every) > 1 else every.pop()
