"""Rollouts: a network that was trained on pairs of time points (``data.lag``) predicts from its own predictions.

::

    x(t-1), x(t) -> forward -> y(t+1) -> in the units of the data -> x(t), y(t+1) -> normalized -> forward -> ...

Predictions are restored to the units of the data, and normalized as the inputs of the next application are: both have
statistics of their own, also each time of a history. An exchange moves the blocks of the predictions to the boxes
that ranks read, with halos. Fields that all samples share do not change. An element that is absent (NaN on land) in
the last input stays absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halograd.errors import UserError

from ..data import Batch
from ..data.normalize import mark_absent
from ..data.structure import AND
from ..data.windows import SlidingWindows
from ..device import is_low
from ..dtensor import Blocks, Box, End, Exchange
from ..lowering.views import Value
from .build import datasets_of
from .session import Session
from .sliding import dtype_of

__all__ = ["Rollout", "check_rollout", "stepped"]


def check_rollout(session: Session, steps: int) -> None:
    """Raise UserError unless the session's network can predict `steps` time steps. Local."""
    data = session.config.data
    if not data.lag:
        raise UserError("--rollout: expected a network that was trained with data.lag, got data.lag = 0")
    if steps < 1 or steps % data.rollout:
        more = f", a multiple of data.rollout = {data.rollout}" if data.rollout > 1 else ""
        raise UserError(f"--rollout: expected 1 step or more{more}, got {steps}")
    if isinstance(session.samples.windows, SlidingWindows):
        raise UserError("--rollout: expected whole samples, got --window; the network predicts from whole predictions")


def stepped(shape: Sequence[int], boxes: Blocks, name: str, steps: int, at_once: int) -> tuple[tuple[int, ...], Blocks]:
    """Add a first axis of `steps` time points to the shape and boxes of an output, which has the channels of `at_once`
    time points; return both. Local.

    Raises
    ------
    UserError
        If the channels of several times cannot be separated.
    """
    if at_once == 1:
        channels, parts = shape[-1], boxes.axes[-1]
    elif shape[-1] % at_once or len(boxes.axes[-1]) > 1:
        raise UserError(
            f"--rollout: expected whole channels of data.rollout = {at_once} times in output {name!r}, got "
            f"{shape[-1]} channels in {len(boxes.axes[-1])} parts; choose another cut by --set"
        )
    else:
        channels = shape[-1] // at_once
        parts = ((0, channels),)
    # Axis 0 of the boxes is that of the samples, which `shape` does not have.
    axes = [boxes.axes[0], ((0, steps),), *boxes.axes[1:-1], parts]
    return (steps, *shape[:-1], channels), Blocks(axes, boxes.size)


@dataclass
class _Input:
    """Input that predictions replace.

    Attributes
    ----------
    name, source
        Name of the input, and index of the output that replaces it.
    channels
        Indices of the input's channels among those of one time point of the output.
    exchange, received
        Exchange of the output's blocks to this rank's box of the input, and the array that it fills.
    box
        Box that this rank reads, within the batch, with all channels of the input.
    own
        Slices of this box in the array of the input.
    state
        Values of all time points of the input, in the units of the data, ``(N, *spatial, history * C)``.
    absent
        Mask of the elements that are absent at the last time point.
    """

    name: str
    source: int
    channels: list[int]
    box: Box
    own: tuple[slice, ...]
    received: NDArray[Any]
    exchange: Exchange
    state: NDArray[Any] = field(init=False)
    absent: NDArray[np.bool_] = field(init=False)


class Rollout:
    """Predictions of several time steps by a session. Collective over the session's communicator; `close` is too.

    Parameters
    ----------
    steps
        Number of time points to predict, a multiple of ``data.rollout``.
    values
        Outputs of the network.
    channel_names
        Names of the channels of each output at one time; empty: unknown.

    Raises
    ------
    UserError
        If an input is not predicted.
    """

    def __init__(
        self, session: Session, steps: int, values: Sequence[Value], channel_names: Sequence[Sequence[str]]
    ) -> None:
        self._session, self._values, self._steps = session, list(values), steps
        comm, network, data = session.comm, session.network, session.config.data
        self._at_once, rank = data.rollout, comm.rank
        loss = network.outputs["loss"]
        names = {id(session.executor.program.values[name]): name for name in network.names.values()}
        numbers = {names[id(value)]: number for number, value in enumerate(values)}
        #: By number of the output: the target that it is compared with.
        self._targets: dict[int, str] = {}
        with comm.agreement():
            # Reversed, so that the first comparison of an output wins.
            for comparison in reversed(loss.layer.comparisons(*(n.shape for n in loss.inputs))):
                number = numbers.get(network.names[loss.inputs[comparison.prediction]])
                if number is not None and comparison.classes is None and comparison.members == 1:
                    self._targets[number] = network.names[loss.inputs[comparison.target]]
            fields = session.samples.dataset.fields
            changing = [name for name, field in fields.items() if not (field.is_target or field.static)]
            chosen = [self._source(name, channel_names) for name in changing]
        self._sent = [np.empty(value.layout.boxes[rank].shape, dtype_of(value)) for value in values]
        self._inputs: list[_Input] = []
        exchanges = list[dict[str, Any]]()
        for name, source, channels in chosen:
            value, stored = values[source], session.executor.program.values[name].stored
            shape, input_ = value.layout.shape, session.executor.input(name)
            # Within the sample: padding beyond its edges keeps the zeros of the loader.
            axes = [tuple((max(0, low), min(n, high)) for low, high in parts) for n, parts in zip(shape, stored.axes)]
            # All channels of the output: those of the input may have another order in it.
            whole = [*axes[:-1], tuple((0, shape[-1]) for _ in stored.axes[-1])]
            target = Blocks(whole, stored.size)
            received = np.zeros(target[rank].shape, self._sent[source].dtype)
            ends = {"source": End(value.layout.boxes, self._sent[source]), "target": End(target, received)}
            exchanges.append({**ends, "kind": "gather"})
            box = target[rank].replace(-1, 0, session.samples.dataset.fields[name].shape[-1])
            low, high = input_.box.ranges[-1]
            own = (*box.slices(input_.box.start)[:-1], slice(0, high - low))
            self._inputs.append(_Input(name, source, channels, box, own, received, None))  # type: ignore[arg-type]
        for one_input, exchange in zip(self._inputs, Exchange.together(comm, exchanges)):
            one_input.exchange = exchange

    def _source(self, name: str, channel_names: Sequence[Sequence[str]]) -> tuple[str, int, list[int]]:
        """Return the name of an input, the index of the output that predicts it, and the indices of the input's
        channels among those of one time in that output. Local.
        """
        data, field = self._session.config.data, self._session.samples.dataset.fields[name]
        expected = field.channel_names[: field.shape[-1] // data.history]
        # A data set of the user has no names of datasets.
        inputs, targets = ({}, {}) if data.file is not None else datasets_of(data, self._session.network)
        channels = []
        for number, target in self._targets.items():
            shape, stored = self._values[number].layout.shape[1:], targets.get(target, "")
            count = shape[-1] // self._at_once
            numbered = [f"channel {k}" for k in range(count)]
            names = list(map(str, channel_names[number])) or numbered
            if AND in stored:
                names = stored.split(AND)
            # The target is the dataset of the input, at a later time: so are its channels.
            if stored and stored == inputs.get(name):
                names = expected if count == len(expected) else numbered
            channels.append(f"{target!r} with {', '.join(names)}")
            if shape[:-1] == field.shape[:-1] and len(names) == count and {*expected} <= {*names}:
                return name, number, [names.index(channel) for channel in expected]
        raise UserError(
            f"--rollout: expected a prediction on the grid of input {name!r} with all of its channels "
            f"({', '.join(expected)}), got {'; '.join(channels) or 'none of numbers'}; predict them all; fields "
            "that do not change have no axis of samples"
        )

    def predicted(self, batches: Sequence[Batch]) -> Iterator[tuple[Batch, list[NDArray[Any]]]]:
        """Yield each batch with this rank's blocks of all steps, ``(N, steps, *spatial, C)``, in the units of the data,
        in new arrays on the host. Collective.
        """
        executor, rank = self._session.executor, self._session.comm.rank
        statistics = self._session.samples.statistics
        for batch in batches:
            arrays = self._begin(batch)
            predictions: list[list[NDArray[Any]]] = [[] for _ in self._values]
            for first in range(0, self._steps, self._at_once):
                if first:
                    self._advance(arrays)
                executor.forward(training=False)
                for v, value in enumerate(self._values):
                    block = np.array(executor.device.to_host(executor.array(value)), dtype_of(value))
                    if self._targets.get(v) in statistics:
                        channel = value.layout.boxes[rank].start[-1]
                        block = statistics[self._targets[v]].restored(block, channel)
                    # In the units of the data: `_advance` sends it to the next inputs.
                    np.copyto(self._sent[v], block)
                    times = block.reshape(*block.shape[:-1], self._at_once, block.shape[-1] // self._at_once)
                    predictions[v] += [times[..., k, :] for k in range(self._at_once)]
            yield batch, [np.stack(times, axis=1) for times in predictions]

    def _begin(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Fill the inputs of a batch; return copies of them. The loader reads nothing when this returns."""
        session, executor = self._session, self._session.executor
        # The feed copies the batch to the inputs before it yields.
        for _ in session.feed([batch]):
            pass
        arrays = {}
        for name in session.samples.dataset.fields:
            array = executor.device.to_host(executor.input(name).array)
            arrays[name] = np.array(array, np.float32 if is_low(array.dtype) else None)
        with session.comm.agreement():
            for source in self._inputs:
                source.state = np.zeros(source.box.shape, executor.store.dtype)
                session.samples.dataset.read(source.name, batch.indices, source.box, source.state)
                # The last time point is in the last channels.
                source.absent = ~np.isfinite(source.state[..., -len(source.channels) :])
        return arrays

    def _advance(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Fill the inputs of the next application from the predictions of the last one. Collective.

        `arrays` are the copies of the inputs that :meth:`_begin` returned; they are modified.
        """
        session, executor = self._session, self._session.executor
        for source in self._inputs:
            source.exchange.run()
            # ``(N, *spatial, times, channels)``
            times = source.received.reshape(*source.received.shape[:-1], self._at_once, -1)
            new = times[..., source.channels].astype(source.state.dtype)
            # Elements without data stay so: a network predicts numbers everywhere.
            new[np.broadcast_to(source.absent[..., None, :], new.shape)] = np.nan
            # The oldest times leave the history: the last channels stay.
            kept = source.state.shape[-1]
            source.state = np.concatenate([source.state, new.reshape(*new.shape[:-2], -1)], -1)[..., -kept:]
            values = source.state.copy()
            absent = mark_absent(values) if source.name in session.samples.dataset.lenient else None
            if source.name in session.samples.statistics:
                session.samples.statistics[source.name].apply(values)
            if absent is not None:
                # As the loader fills them: 0 is the mean of a normalized channel.
                values[absent] = 0
            # `values` have all channels; this rank may hold some of them, if the input is cut along channels.
            low, high = executor.input(source.name).box.ranges[-1]
            arrays[source.name][source.own] = values[..., max(0, low) : high]
        for name, array in arrays.items():
            executor.device.assign(executor.input(name).array, array)

    def close(self) -> None:
        """Free the exchanges. Collective."""
        for source in self._inputs:
            source.exchange.close()
