"""Execution: a network compiled for one strategy, batch and backend into operators that only run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from halograd.comm import Communicator
from halograd.comm.errors import is_shared
from halograd.device import is_low
from halograd.dtensor import Box, Exchange, Layout
from halograd.kernels import Substitute
from halograd.layers import Network, Redistribute
from halograd.layers.binding import Binding
from halograd.layers.loss import LossOperator
from halograd.layers.memory import Memory
from halograd.layers.operator import Mode, Operator
from halograd.layers.parameter_blocks import parameter_blocks
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.replicated_dense import ReplicatedDenseOperator
from halograd.layers.replication import dense_layers, replicable_layers
from halograd.layers.strategy import Strategy
from halograd.layers.value import Region, Value
from halograd.training.compiler import Step, compile_steps
from halograd.training.device_spans import DeviceSpans
from halograd.training.graph import GraphedPass, check_graph
from halograd.training.inputs import block_of, check_name
from halograd.training.kernels import report_substitutes
from halograd.training.pending import FetchedNumber, PendingLoss
from halograd.training.precision import check_dtype
from halograd.training.pulse import Pulse
from halograd.training.reduction import Reducer, make_reducer
from halograd.training.store import ParameterStore

__all__ = ["CHECKPOINT", "STOP", "VOTES", "Executor"]

#: Numbers that travel with the loss of a pass, and what they are for: see `Executor.votes`.
VOTES = 2
STOP, CHECKPOINT = range(VOTES)


class Executor:
    """A network on this rank's blocks: `forward`, `backward`, gradients summed over all ranks.

    Collective over `comm`, to build and to run. Building makes every buffer, exchange and kernel; a
    step allocates nothing.

    Parameters
    ----------
    network
        Its output named ``"loss"``, if there is one, is a :class:`Loss`.
    comm
        Communicator whose ranks share the batch.
    kernels
        Backend from :func:`halograd.kernels.get_backend`.
    batch
        Global number of samples per step.
    strategy
        How layers are cut; by default not at all.
    dtype
        Of activations and their gradients: ``"float32"``, ``"float64"``, on a device also ``"bfloat16"`` and
        ``"float16"``, beside parameters, gradients of them, statistics and losses in float32.
    trainable
        Whether `backward` will be called (False saves its memory).
    store
        Parameters to share with another executor (the same network for another batch size).
    seed
        Of parameters and dropout.
    probed
        Inputs whose gradient is wanted too.
    graph
        Whether training passes are recorded, and launched as graphs of the device from then on.

    Attributes
    ----------
    votes
        ``(VOTES,)`` float64: what this rank has to say to all others in the next pass; it travels with the loss, so
        it costs no message. Kept until changed.
    counted
        The same, summed over all ranks, of the last pass whose loss was waited for: all ranks see the same numbers
        after the same pass, and may decide by them.
    pulse
        Where this rank stands.
    device
        Where the arrays live.
    pending
        On a device, the loss of the last `forward`.

    Raises
    ------
    UserError
        If strategy, network and communicator do not fit.
    Exception
        Whatever else goes wrong on any rank: all ranks raise the same error.
    """

    def __init__(
        self,
        network: Network,
        comm: Communicator,
        kernels: Any,
        batch: int,
        strategy: Strategy | None = None,
        dtype: str = "float32",
        trainable: bool = True,
        store: ParameterStore | None = None,
        seed: int = 0,
        probed: Iterable[str] = (),
        graph: bool = False,
    ) -> None:
        self._probed = frozenset(probed)
        self._substitutes: list[tuple[str, Substitute]] = []
        self.network, self.comm, self.kernels, self.batch = network, comm, kernels, batch
        with comm.agreement():
            self.strategy = strategy or Strategy({"sample": comm.size})
            self.strategy.validate(network, comm.size)
            if comm.rank == 0:
                self.strategy.warn_of_idle_ranks(network, batch, comm.size)
            self.dtype = check_dtype(dtype, kernels)
            self.memory = Memory(kernels)
            self.mode = Mode(training=trainable, seed=seed, valid=batch)
            self._made_store = store is None
            self.store = store or self._make_store(seed)
            if self.store.low != (self.dtype if is_low(self.dtype) else None):
                found = self.store.low or self.store.dtype
                raise ValueError(f"store: expected one for {self.dtype}, got one for {found}")
            if self.store.loss_scale is not None:
                self.mode.loss_scale = self.store.loss_scale.factor
            self.recorder, self.device = comm.recorder, self.memory.device
            timed = self.recorder is not None and not self.device.is_host
            self._spans = DeviceSpans(self.device, self.recorder) if timed and self.recorder else None
            if not self.device.is_host:
                self.mode.state = self.device.array([seed, 0], np.uint64)
            self.votes, self.counted = np.zeros(VOTES), np.zeros(VOTES)
            self.pulse = Pulse()
            self._bind(trainable)
            self._graphs = self._make_graphs() if graph and trainable else None
        report_substitutes(comm, self._substitutes)

    def _make_graphs(self) -> tuple[GraphedPass, GraphedPass]:
        """Forward and backward, to be recorded."""
        operators = [operator for _, _, operator in self._bindings]
        check_graph(self.network, self.comm, self.device, self.memory.cuda is not None, operators)
        prepare = getattr(self.kernels, "before_capture", None)
        device = self.device
        return GraphedPass(device, self._compute, prepare), GraphedPass(device, self._differentiate, prepare)

    def _make_store(self, seed: int) -> ParameterStore:
        blocks = parameter_blocks(self.network, self.strategy, self.comm.size)
        nbytes, scheme = self.strategy.bucket_bytes, self.strategy.reduction
        rank, apart = self.comm.rank, frozenset(self.replicable)
        return ParameterStore(self.network, self.memory, self.dtype, seed, nbytes, blocks, rank, scheme, apart)

    @cached_property
    def replicable(self) -> list[str]:
        """Dense layers whose gradients are replicated, or may be by :meth:`reduce_by`; in order of computation."""
        scheme = self.strategy.reduction
        if scheme.name == "auto":
            return replicable_layers(self.strategy, self.network, self.batch)
        return list(dense_layers(self.network))[: scheme.replicated_dense]

    def _bind(self, trainable: bool) -> None:
        self.steps, self.values = compile_steps(
            self.network, self.strategy, self.batch, self.comm.size, self.comm.rank, self.dtype, self._probed
        )
        self.kernels.take_substitutes()  # those of others are not ours to report
        for name in self.network.inputs:
            self._allocate_input(self.values[name])
        self._bindings = [self._bind_forward(step, trainable) for step in self.steps]
        self._moves = self._find_moves()
        self._launched_after = {id(v): some for v, some in self._moves}
        self.loss = self._find_loss()
        self._loss_sum = np.zeros(1 + VOTES)
        self._vote_sums = self._loss_sum[1:]
        self._loss_reduction = self.comm.reduction(self._loss_sum, kind="loss")
        self._loss_under_way = False
        self._fetched = None if self.device.is_host else FetchedNumber(self.device)
        self.pending: PendingLoss | None = None
        self.reducer: Reducer | None = None
        self._backward: list[tuple[str, Callable[[], None]]] = []
        self._sums: list[Any] = []
        if trainable:
            self._bind_backward()
            self.reducer = self._make_reducer()

    def _allocate_input(self, value: Value) -> None:
        """With channels as the kernels want them, where all layers that read it take them so."""
        readers = [step for step in self.steps if any(v is value for v in step.inputs)]
        if is_low(value.dtype) and all(step.layer.takes_padded_channels for step in readers):
            value.room = self.kernels.padded_channels(value.layout.shape[-1], value.dtype)
        value.allocate(self.memory, "input")

    def _make_reducer(self) -> Reducer:
        """Of the scheme for which the store has its buckets."""
        scheme, reached = self.store.scheme, {name for name, _ in self._backward}
        dense = [o for _, _, o in self._bindings if isinstance(o, ReplicatedDenseOperator) and o.name in reached]
        for operator in dense:
            operator.replicates = operator.name in self.replicable[: scheme.replicated_dense]
        return make_reducer(self.store, self.comm, [s.name for s in self.steps], scheme, dense, self._run)

    def reduce_by(self, scheme: Scheme, bucket_bytes: int | None = None) -> None:
        """Sum gradients by another scheme from now on; what is under way is finished and updated. Collective.

        The optimizer has to :meth:`bind <halograd.training.optimizers.Optimizer.bind>` afterwards, and whoever holds
        `reducer` to take the new one. This is no part of a step: it allocates.

        Raises
        ------
        ValueError
            If more dense layers are to be replicated than the executor was built for (`replicable`).
        """
        assert self.reducer is not None, "the executor was built with trainable=False"
        self.reducer.settle()
        update = self.reducer.update
        self.reducer.close()
        with self.comm.agreement():
            self.store.rechunk(scheme, self.store.bucket_bytes if bucket_bytes is None else bucket_bytes)
            self.reducer = self._make_reducer()
        self.reducer.update = update

    def _bind_forward(self, step: Step, trainable: bool) -> tuple[Step, Binding, Operator]:
        step.output.allocate(self.memory, "activation")
        store, options = self.store, step.options
        if trainable and step.name in self.replicable:
            options = {**options, "weight_gradient": "replicated"}
        binding = Binding(
            step.layer,
            step.name,
            self.comm,
            self.kernels,
            self.memory,
            self.mode,
            step.inputs,
            step.output,
            store.read_by(step.name, step.layer.exact_parameters),
            store.written_by(step.name),
            store.of_layer(step.name, store.state),
            options,
            step.parts,
        )
        operator = step.layer.bind(binding)
        binding.end_scratch()
        self._note_substitutes(step.name)
        return step, binding, operator

    def _note_substitutes(self, layer: str) -> None:
        self._substitutes += [(layer, substitute) for substitute in self.kernels.take_substitutes()]

    def _find_moves(self) -> list[tuple[Value, list[tuple[str, Operator]]]]:
        """Values that are redistributed, and by whom: they travel as soon as they are there, while others compute."""
        found: dict[int, tuple[Value, list[tuple[str, Operator]]]] = {}
        for step, _, operator in self._bindings:
            if isinstance(step.layer, Redistribute):
                found.setdefault(id(step.inputs[0]), (step.inputs[0], []))[1].append((step.name, operator))
        return list(found.values())

    def _find_loss(self) -> LossOperator | None:
        """The operator of the output named ``"loss"``."""
        node = self.network.outputs.get("loss")
        for step, _, operator in self._bindings:
            if node is not None and step.layer is node.layer and isinstance(operator, LossOperator):
                return operator
        return None

    def _bind_backward(self) -> None:
        """In reverse order of computation, so that every gradient has its place when its maker is bound."""
        for step, binding, operator in reversed(self._bindings):
            value = step.output
            if not value.trainable or not (value.contributions or operator is self.loss):
                continue
            self._close_gradient(step.name, value)
            operator.bind_backward()
            binding.end_scratch()
            self._note_substitutes(step.name)
            value.end_gradient(self.memory)
            self._backward.append((step.name, operator.backward))
        for name in sorted(self._probed):
            self._close_gradient(name, self.values[name])

    def _close_gradient(self, name: str, value: Value) -> None:
        for other, some in self._moves:
            if other is value:
                self._backward += [(f"{name} (moved)", o.settle) for _, o in some]
        total = value.close_gradient(self.memory, self.kernels)
        if total is not None:
            self._sums.append(total)
            self._backward.append((f"{name} (sum)", total))

    # -- running ------------------------------------------------------------------------------

    def forward(self, training: bool | None = None) -> None:
        """Compute all layers of the batch in the input arrays. Collective.

        `training` switches batch statistics and dropout; unchanged if None. The loss becomes known with
        :meth:`loss_value`.
        """
        if training is not None:
            self.mode.training = training
        if self.mode.state is not None:
            self.mode.state[1:].fill(self.mode.step)
        self.pulse.count += 1
        if self._graphs is not None and self.mode.training and self.recorder is None:
            assert self.reducer is not None
            for step in self.steps:
                self.reducer.require(step.name)  # within the graph nothing is due any more
            self._graphs[0]()
        else:
            self._compute()
        if self.loss is not None:
            self._settle_loss()
            self._vote_sums[...] = self.votes
            if self._fetched is None:
                self._loss_sum[0] = self.loss.value
                self._loss_reduction.start()
            else:
                self._fetched.fetch()
                self.pending = PendingLoss(self.loss_value)
            self._loss_under_way = True

    def _compute(self) -> None:
        """All layers forward."""
        for name in self.network.inputs:
            self._launch(self.values[name])
        for step, _, operator in self._bindings:
            if self.reducer is not None:
                self.reducer.require(step.name)
            self._run(step.name, "forward", operator.forward)
            self._launch(step.output)
        if self.loss is not None and self._fetched is not None:
            self._fetched.put(self.loss.value)  # here, as a graph writes an array and leaves `value` as it is

    def _launch(self, value: Value) -> None:
        for name, operator in self._launched_after.get(id(value), ()):
            self._run(name, "forward", operator.launch)

    def _settle_loss(self) -> None:
        """Wait for the loss of the last pass. On a device its sum is made here: nobody waited for it to be computed."""
        if self._loss_under_way:
            self._loss_under_way = False
            if self._fetched is not None:
                self._loss_sum[0] = self._fetched.read()
                self._loss_reduction.start()
            self._loss_reduction.finish()
            self.counted[...] = self._vote_sums
            if self.pending is not None:
                self.pending.value = float(self._loss_sum[0])

    def loss_value(self) -> float:
        """The loss of the last `forward`, summed over all ranks. Collective; nobody has to ask for it."""
        self._require_loss("loss_value()")
        self._settle_loss()
        return float(self._loss_sum[0])

    def _require_loss(self, what: str) -> None:
        if self.loss is None:
            raise ValueError(
                f"{what}: network {self.network.name!r} has no output named 'loss' that is a loss layer; "
                f"its outputs are {', '.join(self.network.outputs)}"
            )

    def backward(self) -> None:
        """Gradients of all parameters; their sums over the ranks are started as they become ready. Collective."""
        assert self.reducer is not None, "the executor was built with trainable=False"
        self._require_loss("backward()")
        self.pulse.count += 1
        self.reducer.begin()
        self.store.clear_untrained()
        if self._graphs is not None and self.recorder is None:
            self._graphs[1]()
            for name, _ in self._backward:
                self.reducer.ready(name)
        else:
            for name, run in self._backward:
                self._run(name, "backward", run)
                self.reducer.ready(name)
        self.reducer.flush()

    def _differentiate(self) -> None:
        """All layers backward."""
        for name, run in self._backward:
            self._run(name, "backward", run)

    def _run(self, name: str, category: str, run: Callable[[], None]) -> None:
        self.pulse.place, self.pulse.phase = name, category
        if self.recorder is None:
            run()
        else:
            self.timed(name, category, run)

    def timed(self, name: str, category: str, run: Callable[[], None]) -> None:
        """Call `run` and tell the recorder how long it took, on a device how long what it enqueues takes there."""
        assert self.recorder is not None
        if self._spans is not None:
            self._spans.run(name, category, run)
            return
        begin = time.perf_counter()
        run()
        self.recorder.span(name, category, begin, time.perf_counter())

    def finish_spans(self) -> None:
        """The recorder knows of everything so far when this returns. Waits for a device."""
        if self._spans is not None:
            self._spans.finish()

    # -- data ---------------------------------------------------------------------------------

    def input(self, name: str) -> Region:
        """Array and global box ``(N, *spatial, C)`` of an input on this rank, halo included: fill all of it. Local.

        Nothing is checked or agreed on: this is how loaders bring batches, without a message. Raises UserError if there
        is no such input.
        """
        check_name(name, self.network.inputs)
        region = self.values[name].region
        assert region is not None
        return region

    def set_input(self, name: str, array: Any) -> None:
        """Fill an input from the whole global array ``(N, *spatial, C)`` of real numbers. Collective: one message.

        Every rank copies its block, so that elsewhere the array need not hold true values; its shape is checked.

        Raises
        ------
        UserError
            On all ranks, if the array of one of them does not fit (:func:`halograd.training.inputs.block_of`).
        """
        with self.comm.agreement():
            region = self.input(name)
            shape = self.values[name].layout.shape
            block = block_of(name, array, shape, region.box, np.dtype(region.array.dtype))
        self.device.assign(region.array, block)

    def gather(self, name: str, gradient: bool = False) -> np.ndarray | None:
        """The whole array of a layer on rank 0, None elsewhere. Collective; for small networks.

        With `gradient` that of a probed input: others share memory, and are gone when `backward` returns.
        """
        value = self.values[name]
        if gradient and (name not in self._probed or value.gradient is None):
            raise ValueError(
                f"gather(): the gradient of {name!r} is not kept; build the executor with probed=[...] of inputs "
                f"that the loss depends on, it has {sorted(self._probed)}"
            )
        layout = Layout.on_rank(value.layout.shape, 0, self.comm.size)
        box: Box = layout.boxes[self.comm.rank]
        target = self.device.empty(box.shape, value.dtype)
        source = value.dy if gradient else value.array
        exchange = Exchange(self.comm, value.layout.boxes, layout.boxes, source, target, kind="gather")
        exchange.run()
        exchange.close()
        return self.device.to_host(target) if self.comm.rank == 0 else None

    @property
    def predicted_bytes(self) -> Mapping[str, int]:
        """Bytes of this rank by use, as counted while compiling, where the kernels run.

        With the workspaces of `kernels` and the message buffers of `comm`, also those that others share. Of a device:
        its memory; the buffers of the host, through which messages pass, are not counted.
        """
        messages = self.comm.buffer_bytes if self.device.is_host else self.comm.device_bytes
        beside = {"kernel workspace": self.kernels.held_bytes, "messages": messages}
        return {**self.memory.bytes, **beside}

    def close(self) -> None:
        """Free kernels, channels and reductions. Collective."""
        for _, _, operator in self._bindings:
            operator.close()
        for total in self._sums:
            total.close()
        if self.reducer is not None:
            self.reducer.close()
        self._loss_reduction.close()
        if self._made_store and self.store.loss_scale is not None:
            self.store.loss_scale.close()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: object) -> None:
        if is_shared(value, self.comm.size):  # else the other ranks wait for this one, and this one would wait for them
            self.close()
