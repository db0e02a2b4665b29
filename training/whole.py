"""Whole samples in addition to windows of them: sessions of the same parameters at the sizes of the samples.

A run that trains on windows validates whole samples, which may differ in size. For each size there is a session with
its own executor, which only computes forward, without copies of parameters and statistics. If all samples
have one size, its session is made once; sessions of several sizes are made and closed one after another, so that the
memory is that of the largest one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from halograd.documents import bytes_text
from halograd.errors import UserError

from ..data import Batch, Dataset
from ..data.source import OneSize, sample_shape
from ..data.windows import SampleWindows
from ..layers import Network, Strategy
from ..layers.strategy import cuts_text, parameter_blocks
from .adapting import at_size, extents_of, grid_of
from .build import check_memory, fitting_cuts, make_network, make_strategy, needs_of
from .config import Config
from .executor import Executor
from .samples import fit_together
from .session import Session, open_loader

__all__ = ["Sized", "WholeSamples", "open_sized", "planned_or_similar", "whole_samples"]

_log = logging.getLogger(__name__)
_NAMED = 4  # largest number of sizes that a line names


class WholeSamples:
    """Whole samples of a session, by size. Collective over the session's communicator; `close` closes the session that
    computed the last size.

    Parameters
    ----------
    session
        Session that computes windows of its samples, or samples of one size.
    indices
        Samples to compute, one or more.

    Raises
    ------
    UserError
        If the network takes no samples of one of the sizes, or they do not fit into memory.
    """

    def __init__(self, session: Session, indices: np.ndarray) -> None:
        self._session, self._stack = session, ExitStack()
        self._opened: Session | None = None
        dataset, comm = session.samples.dataset, session.comm
        name = grid_of(session.network)
        groups: dict[tuple[int, ...], list[int]] = {}
        for index in indices:
            # The shapes of all fields, because targets may be finer than the inputs.
            shapes = [sample_shape(dataset, other, int(index)) for other in (name, *dataset.fields)]
            groups.setdefault(tuple(n for shape in shapes for n in shape), []).append(int(index))
        #: Per size: its samples, and what computes them.
        self.sizes: list[tuple[np.ndarray, Sized]] = []
        with comm.agreement():
            for members in groups.values():
                extents = sample_shape(dataset, name, members[0])[:-1]
                config = at_size(session.config, extents, len(members), comm.size)
                self.sizes.append((np.array(members), Sized(session, config)))
        if session.executor.device.is_host:
            self._check_memory()

    def _check_memory(self) -> None:
        """Raise UserError if the session of the largest size does not fit into memory next to this one. Collective."""
        own, comm = self._session, self._session.comm
        trains = own.executor.reducer is not None
        others = sum(needs_of(own.config, comm, own.network, own.executor.strategy, trains, None).values())
        sized = max((sized for _, sized in self.sizes), key=lambda sized: math.prod(sized.extents))
        check_memory(sized.config, comm, sized.network, sized.strategy, False, others=others)

    def parts(self) -> Iterator[tuple[Session, Sequence[Batch]]]:
        """Yield a session per size, and the batches of its samples. Collective."""
        for members, sized in self.sizes:
            if self._opened is None:
                dataset = OneSize(self._session.samples.dataset, int(members[0]))
                self._opened = open_sized(self._session, sized, dataset, self._stack)
            session = self._opened
            yield session, session.in_order(members)
            # Only then the memory of another size is needed; a single session is used again by the next validation.
            if len(self.sizes) > 1:
                self.close()

    @property
    def text(self) -> str:
        """Sentence on the sizes of the samples, their cuts, and the memory that they need. Local."""
        comm, texts = self._session.comm, []
        for members, sized in self.sizes[:_NAMED]:
            extents = "x".join(map(str, sized.extents))
            cut = cuts_text(sized.strategy.cuts_of(next(iter(sized.network.layers))))
            needs = needs_of(sized.config, comm, sized.network, sized.strategy, False, None)
            texts.append(f"{len(members)} of {extents} ({cut}, {bytes_text(sum(needs.values()))} per rank)")
        more = f", and {len(self.sizes) - _NAMED} more sizes" if len(self.sizes) > _NAMED else ""
        cost = ", for each size by a network made for it" if len(self.sizes) > 1 else ""
        return f"whole samples are evaluated{cost}: {', '.join(texts)}{more}"

    def close(self) -> None:
        """Close the session that :meth:`parts` opened last, if it is open. Collective."""
        self._opened = None
        self._stack.close()

    def __enter__(self) -> WholeSamples:
        return self

    def __exit__(self, *raised: object) -> None:
        if raised[0] is None:
            self.close()
        else:
            # The executor on the stack decides by the error whether all ranks can close it.
            self._stack.__exit__(*raised)  # type: ignore[arg-type]


class Sized:
    """Network and strategy of a configuration, for the parameters of a session. Local.

    Raises
    ------
    UserError
        If no cut fits, or if the cut of the parameters differs from that of the session.
    """

    def __init__(self, session: Session, config: Config) -> None:
        size, own, self.config = session.comm.size, session.executor, config
        self.network = make_network(config)
        if self.network.counted:
            self.network.balance(session.samples.class_counts)
        if config.strategy.auto:
            self.strategy = planned_or_similar(own.strategy, self.network, size, config.training.at_once)
        # With the cuts of small layers, which `make_strategy` does not choose.
        elif config.strategy == session.config.strategy:
            self.strategy = own.strategy
        else:
            cuts = make_strategy(config.strategy, size, self.network, config.training.at_once, False)
            # Small layers with cuts of their own keep them, because both share the parameters.
            self.strategy = cuts if session.small is None else replace(cuts, layers=session.small.strategy.layers)
        self.strategy.validate(self.network, size)
        self.strategy.refuse_empty_blocks(self.network)
        self.extents = extents_of(self.network)
        mine, theirs = parameter_blocks(self.network, self.strategy, size), own.store.blocks or {}
        # This executor computes with the arrays of the session's store, which hold the blocks of the session's cuts.
        if any(not (blocks.whole and theirs[name].whole) and blocks != theirs[name] for name, blocks in mine.items()):
            raise UserError(
                'data.evaluate: expected "middle" where parameters are cut, and whole samples need another cut; '
                "evaluate them by `halograd evaluate`"
            )


def planned_or_similar(strategy: Strategy, network: Network, size: int, batch: int) -> Strategy:
    """Return a planned strategy or, if it does not fit whole samples, the most similar cut of all layers that does.

    Without a cut that fits, the planned strategy is returned. `size` is the number of ranks. Local.
    """
    try:
        strategy.validate(network, size)
        strategy.refuse_empty_blocks(network)
        fits = max(strategy.parts_of(name)["sample"] for name in network.layers) <= batch
    except UserError:
        fits = False
    cuts = [] if fits else fitting_cuts(network, size, batch, strategy.parts_of(next(iter(network.layers))))
    return Strategy(cuts[0]) if cuts else strategy


def open_sized(session: Session, sized: Sized, dataset: Dataset, stack: ExitStack) -> Session:
    """Open a session that computes samples of one size forward, with the parameters of another session. Collective.

    It shares votes and heartbeat with that session; `stack` closes it.
    """
    comm, config, executor = session.comm, sized.config, session.executor
    with comm.agreement():
        windows, reductions = SampleWindows(dataset), fit_together(config.data, dataset.fields, sized.network)
    samples = replace(session.samples, dataset=dataset, reductions=reductions, windows=windows, augmentation=None)
    settings = config.training
    whole = stack.enter_context(
        Executor(
            sized.network,
            comm,
            executor.kernels,
            settings.at_once,
            sized.strategy,
            settings.dtype,
            False,
            executor.store,
            settings.seed,
            heartbeat=executor.heartbeat,
        )
    )
    # A signal, or a checkpoint that is due, is noticed during passes of this executor, too.
    whole.pass_loss.votes, whole.pass_loss.counted = executor.pass_loss.votes, executor.pass_loss.counted
    loader, ahead = open_loader(config, whole, samples, stack)
    return Session(config, comm, sized.network, whole, samples, loader, session.timeline, ahead)


def whole_samples(session: Session, indices: np.ndarray) -> WholeSamples | None:
    """Return the whole samples to compute instead of windows, by ``data.evaluate``; None: the windows. Collective."""
    dataset, evaluated = session.samples.dataset, session.config.data.evaluate
    several = getattr(dataset, "extents", None) is not None
    # The session neither cuts windows nor takes samples of several sizes.
    if several and not session.samples.windows.cut:
        return WholeSamples(session, indices)
    if not session.samples.evaluated_part or not len(indices):
        return None
    if evaluated == "middle" or (evaluated is None and not several and not session.config.data.patches):
        return None
    try:
        return WholeSamples(session, indices)
    except UserError as error:
        if evaluated == "whole":
            raise
        if session.comm.rank == 0:
            _log.warning('middle windows are evaluated (data.evaluate = "middle"), not whole samples: %s', error)
        return None
