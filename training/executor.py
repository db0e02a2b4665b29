"""Execution: a network compiled for one strategy, batch and backend, into operators without set-up in a step."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from halograd.errors import UserError

from ..comm import Communicator
from ..comm.errors import is_shared
from ..device import is_low
from ..dtensor import Box, End, Exchange, Layout
from ..kernels.guards import GUARDS
from ..layers import Network
from ..layers.loss import is_weighing
from ..layers.reduction_chunks import exposed_layers
from ..layers.reduction_scheme import Scheme
from ..layers.strategy import Strategy, parameter_blocks
from ..lowering.operations import Operation
from ..lowering.views import Value
from ..perfmodel.cost import memory_of, program_of
from ..program.before import operations_before
from ..program.compiler import compile_program
from ..program.gradients import check_gradients, reduce_gradients
from ..program.program import Program, Target
from ..program.recording import Item
from ..program.runner import Call, Mode, Runner
from .backend import check_dtype, report_substitutes
from .gradient_scaling import GradientCheck
from .graph import GraphedPass, Graphs, check_graph, graphed_pass
from .inputs import block_of, check_name, name_of
from .memory import Memory, memory_errors
from .pass_loss import PassLoss
from .reduction import Reducer, check_possible
from .store import ParameterStore
from .timeline import Spans
from .watchdog import Heartbeat

__all__ = ["Block", "Executor", "Gather"]


@dataclass(frozen=True)
class Block:
    """Array, and the global box whose elements it holds."""

    array: Any
    box: Box


class Executor:
    """Network on this rank's blocks: `forward`, `backward`, gradients summed over all ranks.

    Collective over `comm`, to build and to run. The constructor makes every buffer, exchange and kernel; a step
    allocates nothing.

    Parameters
    ----------
    network
        Network to execute; if it has an output named ``"loss"``, this is a :class:`Loss`.
    comm
        Communicator of the ranks that share the batch.
    kernels
        Backend from :func:`halograd.kernels.get_backend`.
    batch
        Global number of samples per pass.
    strategy
        Cuts of the layers; by default only samples are cut.
    dtype
        Dtype of activations and their gradients: ``"float32"``, ``"float64"``, ``"bfloat16"`` or ``"float16"``; with
        the last two, parameters, their gradients and statistics are float32.
    trainable
        Whether `backward` is called later; False saves the memory of the backward pass.
    store
        Parameters to share with another executor (the same network for another batch size). A forward pass of either
        finishes the updates that the other one began.
    seed
        Seed of initial parameters and dropout.
    probed
        Inputs whose gradient is computed, too.
    graph
        Whether training passes are captured, and then replayed as graphs of the device: one graph per pass on one rank,
        else several, with messages between them (with NCCL, messages are part of the graphs). ``"auto"``: only if a
        measurement shows that this saves time; short batches then run without graphs.
    kept
        Layers whose outputs are kept for `gather`, in addition to the outputs of the network: other outputs share
        memory.
    parts
        Number of passes per step. Their gradients are added in arrays of their own, and summed over the ranks once.
        `mode.part` is the number of the pass. If a loss is divided by its weights, :meth:`count` every part first.
    heartbeat
        Heartbeat of another executor to which progress is reported; by default the executor has its own.
    debug
        Whether to look for faults of kernels until `close`: guard bytes surround every array and all scratch memory, to
        find a kernel that writes outside of its memory, and memory that is free or that a kernel does not declare is
        filled with NaNs, to find one that reads or writes what it does not declare (:mod:`halograd.kernels.access`).
        Every array then has separate memory, in sum more than `predicted_bytes`, and steps are slow. On the host only.

    Attributes
    ----------
    pass_loss
        Sum of the loss of the last pass over all ranks (:class:`halograd.training.pass_loss.PassLoss`).
    heartbeat
        Progress of this rank, for the watchdog.
    device
        Device of the arrays.
    spans
        Timer of the layers, for the recorder of `comm`.
    probed
        Inputs whose gradient is kept.
    checks
        Checks of gradients by name (:meth:`check_gradients`).
    graphs
        With `graph`, the training passes as graphs: forward, backward.
    counted
        Inputs that :meth:`count` reads: targets and weights whose sums divide a loss; empty with one part.

    Raises
    ------
    UserError
        If strategy, network and communicator do not fit, if the network lacks a name in `kept` or `probed`, or if
        `debug` is requested on a device.
    Exception
        Any other fault of a rank: all ranks raise the same error.
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
        graph: Graphs = False,
        kept: Iterable[str] = (),
        parts: int = 1,
        debug: bool = False,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self.probed, self.parts = frozenset(probed), parts
        self.checks: dict[str, GradientCheck] = {}
        self.counted, self._counts = frozenset[str](), 0
        self.network, self.comm, self.kernels, self.batch = network, comm, kernels, batch
        self.debug = debug
        self.memory = Memory(kernels)
        self.device = self.memory.device
        # Called only for the message of an allocation that fails.
        needs, held = partial(self._needs, trainable), partial(getattr, self, "predicted_bytes")
        with ExitStack() as opened, comm.agreement(), memory_errors(trainable, needs, held):
            for name in self.probed:
                check_name(name, network.inputs)
            self._kept = frozenset(name_of(network, name) for name in kept)
            if debug:
                if not kernels.device.is_host:
                    raise UserError(
                        f"debug: expected kernels on the CPU with it, got {kernels.name}; use onednn or numpy"
                    )
                # Before the arrays are made, because guard bytes surround them.
                opened.enter_context(GUARDS)
                GUARDS.each_kernel = True
            self.strategy = strategy or Strategy({"sample": comm.size})
            self.strategy.validate(network, comm.size)
            if comm.rank == 0:
                self.strategy.warn_of_idle_ranks(network, batch, comm.size)
            self.dtype = check_dtype(dtype, kernels)
            self.mode = Mode(training=trainable, seed=seed, valid=batch, size=batch, parts=parts if trainable else 1)
            self.store = store or self._make_store(seed)
            if store is None and self.store.loss_scale is not None:
                # The loss scale of a shared store is closed by the executor that made it.
                opened.callback(self.store.loss_scale.close)
            if trainable and self.store.parts != parts:
                raise ValueError(f"store: expected one for {parts} parts of a batch, got one for {self.store.parts}")
            if self.store.low != (self.dtype if is_low(self.dtype) else None):
                store_dtype = self.store.low or self.store.dtype
                raise ValueError(f"store: expected one for {self.dtype}, got one for {store_dtype}")
            if self.store.loss_scale is not None:
                self.mode.loss_scale = self.store.loss_scale.factor
            self.spans = Spans(self.device, comm.instruments.recorder)
            # In the memory of the kernels, so that a graph reads the step from it.
            self.mode.state = self.device.array([seed, 0, 0], np.uint64)
            self.heartbeat = Heartbeat() if heartbeat is None else heartbeat
            self._graph = check_graph(comm, self.device, graph) and trainable
            self._measures, self.graphs = graph == "auto", list[GraphedPass]()
            self._bind(trainable, opened)
            self._opened = opened.pop_all()
        # After the agreement: no rank has failed, so all of them take part.
        report_substitutes(comm, self.runner.substitutes)

    def _make_store(self, seed: int) -> ParameterStore:
        blocks = parameter_blocks(self.network, self.strategy, self.comm.size)
        nbytes, scheme = self.strategy.bucket_bytes, self.strategy.reduction
        if self.comm.size == 1 and not self.device.is_host:
            nbytes = sys.maxsize  # nothing is summed while backward runs: one update is one launch
        rank, separate = self.comm.rank, frozenset(self.replicable)
        arguments = (self.network, self.memory, self.dtype, seed, nbytes, blocks, rank, scheme, separate)
        return ParameterStore(*arguments, parts=self.parts, rounds=self.kernels.rounds_gradients)

    @cached_property
    def replicable(self) -> list[str]:
        """Dense layers whose weight gradients every rank computes from gathered inputs, or may compute so after
        :meth:`reduce_by`; in order of computation."""
        return exposed_layers(self.strategy, self.network, self.batch)

    def _bind(self, trainable: bool, opened: ExitStack) -> None:
        """Compile the program, and make what runs it; `opened` frees it, also after an error."""
        if trainable:
            check_possible(self.store, self.comm, self.store.scheme)
        replicable, target = self.replicable if trainable else (), self._target(trainable)
        # Without operations on gradients, which change with the scheme (`_reduced`).
        self._layers = compile_program(self.network, self.strategy, target, self.store.blocks, replicable)
        self.program = self._reduced()
        store = self.store
        arrays = {"params": store.params, "copies": store.copies, "grads": store.grads, "state": store.state}
        arrays["rounded"] = store.rounded
        self.runner = Runner(self._layers, self.comm, self.kernels, arrays, self.mode, self.debug)
        # Closed after all that is opened below, which refers to its arrays and kernels.
        opened.callback(self.runner.close)
        for use, nbytes in self._layers.placement.uses.items():
            self.memory.count(nbytes, use)
        self.pass_loss = PassLoss(self.comm, self.device, self.loss)
        opened.callback(self.pass_loss.close)
        self.reducer: Reducer | None = self._make_reducer() if trainable else None
        # Not `self.reducer.close`: another reducer, or a check, may replace this one later.
        opened.callback(self._close_reducer)
        self._make_calls()

    def _target(self, trainable: bool) -> Target:
        return Target(
            self.batch,
            self.comm.size,
            self.comm.rank,
            self.dtype,
            trainable,
            self.comm.waits_for_network,
            self.device.is_host,
            self.probed,
            self._kept,
            self.kernels.padded_channels,
            self.kernels.rounds_gradients,
            self.kernels.fuses_sums,
        )

    def _needs(self, trainable: bool) -> Mapping[str, int]:
        """Return the predicted memory of this rank by use, without the optimizer's state [B]. Local."""
        blocks = parameter_blocks(self.network, self.strategy, self.comm.size)
        target = self._target(trainable)
        return memory_of(program_of(self.network, self.strategy, target, blocks, self.parts), blocks)

    @property
    def loss(self) -> Any:
        """Loss of this rank's block, float64 ``(1,)``, where the kernels run; None without a loss."""
        return None if self.program.loss is None else self.runner.view(self.program.loss)

    def array(self, value: Value) -> Any:
        """Return this rank's block of a value; it is valid until its memory is reused."""
        return self.runner.view(value.view)

    def _reduced(self) -> Program:
        """Return the program with operations on gradients, by the scheme of the store's buckets."""
        chunks = [bucket.chunk for bucket in self.store.buckets]
        program = reduce_gradients(self._layers, chunks, self.store.scheme, self.parts)
        for what, check in self.checks.items():
            program = check_gradients(program, what, check.over_ranks)
        return program

    def _make_reducer(self) -> Reducer:
        """Make the reducer of the current program."""
        for name, kernel in self.program.exposed.items():
            self.runner.instance(kernel).replicates = name in self.replicable[: self.store.scheme.replicated_dense]
        checks = {what: check.measure for what, check in self.checks.items()}
        return Reducer(self.program, self.store, self.comm, self.runner, self._recorded, checks)

    def _make_calls(self) -> None:
        """Make the lists of calls that make up a step, in the order of the program. Collective with graphs."""
        program, runner = self.program, self.runner
        forward, backward = list[Item](), list[Item]()
        for segments, calls, items in (
            (program.forward, runner.forward, forward),
            (program.backward, runner.backward, backward),
        ):
            for segment, bound in zip(segments, calls, strict=True):
                items += self._on_gradients(segment.before, segment.name)
                items += map(partial(runner.item, segment), segment.operations, bound)
                items += self._on_gradients(segment.after, segment.name)
        self._make_counting()
        # One of the calls of the pass, so that a graph of the pass contains the copy of the loss.
        forward.append(Item(self.pass_loss.put, program.forward[-1].name if program.forward else ""))
        backward += self._on_gradients(program.end, program.backward[-1].name if program.backward else "")
        self._forward = {kind: self._calls(forward, "forward", kind) for kind in ("training", "evaluation")}
        self._backward = self._calls(backward, "backward", "training")

    def _make_counting(self) -> None:
        """Make the calls of :meth:`count`: those that lead to sums of weights, without the sums over the ranks."""
        self._counting = list[Call]()
        if self.mode.parts == 1:
            return
        operations, read = operations_before(self.program, [o for o in self.program if is_weighing(o)])
        # The runner has one call per operation, in the order of the program.
        bound = zip(self.program.forward, self.runner.forward, strict=True)
        calls = (pair for segment, own in bound for pair in zip(segment.operations, own, strict=True))
        self._counting = [call for operation, call in calls if operation in operations]
        values = self.program.values
        self.counted = frozenset(n for n in self.network.inputs if values[n].region.view.buffer in read)

    def _on_gradients(self, operations: Iterable[Operation], layer: str) -> list[Item]:
        reducer = self.reducer
        # No graph holds them: whether an update is due differs between passes.
        return [Item(reducer.call(o), layer, held=False, on_gradients=True) for o in operations] if reducer else []

    def _calls(self, items: Iterable[Item], phase: str, kind: str) -> list[Call]:
        """Return the calls of a pass, with progress reports and timing; with `graph`, training passes are replayed."""
        # Some operations are only for training, or only for evaluation.
        items = [item for item in items if item.when in (None, kind)]
        calls = list[Call]()
        key = attrgetter("layer", "again", "on_gradients")
        # Consecutive calls of a layer are timed together.
        for (layer, again, on_gradients), group in groupby(items, key):
            own = [item.call for item in group]
            calls.append(partial(self.heartbeat.at, phase, layer))
            calls += own if on_gradients else self._recorded(layer, "again" if again else phase, own)
        if not self._graph or kind != "training":
            return calls
        graphed = graphed_pass(self.comm, self.kernels, items, phase, self.heartbeat.at, self._measures)
        self.graphs.append(graphed)
        return [partial(self._replay, graphed, calls)]

    def _recorded(self, layer: str, phase: str, calls: Sequence[Call]) -> Sequence[Call]:
        """Return calls that make `calls` and record their time (:class:`Spans`)."""
        return self.spans.timed(layer, phase, calls)

    def _replay(self, graphed: GraphedPass, calls: Sequence[Call]) -> None:
        """Run a pass as graphs; or by its calls, for a short batch (ValueError with ``graph=True``), or while layers
        are timed by events, which a graph cannot contain.
        """
        short = self.mode.valid != self.batch  # a graph replays the counts of its capture
        if short and not graphed.measures:
            raise ValueError(
                f"mode.valid: expected {self.batch} samples, the whole batch, with graph=True, got {self.mode.valid}; "
                "leave out the short last batch of an epoch, or build the executor with graph=False"
            )
        for call in calls if short or self.spans.active else (graphed,):
            call()

    def check_gradients(self, checks: Mapping[str, GradientCheck]) -> None:
        """Run these checks in every step, after all gradients are complete and before any update. Collective.

        They replace earlier checks, which are closed. `checks` maps names to checks; their sums are counted under these
        names. The executor closes them.
        """
        assert self.reducer is not None, "the executor was built with trainable=False"
        if checks or self.checks:
            if self.heartbeat.count:  # residuals of rounding lie with the sums
                self.reducer.synchronize()
            before, self.checks = self.checks, dict(checks)
            self._replace_reducer(self.reducer)
            for check in before.values():
                if check not in self.checks.values():
                    check.close()

    def _replace_reducer(self, old: Reducer) -> None:
        """Replace the program and the reducer; all sums and updates must be complete. Collective."""
        old.close()
        with self.comm.agreement():
            self.program = self._reduced()
            self.reducer = self._make_reducer()
            self.reducer.update = old.update  # the trainer has set it once
            self._drop_graphs()
            self._make_calls()  # sums start and end in other places

    def reduce_by(self, scheme: Scheme) -> None:
        """Sum gradients by another scheme from now on, after all sums and updates in progress. Collective.

        Afterwards call :meth:`bind <halograd.training.optimizers.Optimizer.bind>` of the optimizer, and replace
        references to the old `reducer`. This allocates, so it is not part of a step.

        Raises
        ------
        ValueError
            If the scheme replicates more dense layers than the executor was built for (`replicable`), or changes the
            payload or the error feedback.
        UserError
            If the scheme is not possible here. After either error the executor is unchanged.
        """
        assert self.reducer is not None, "the executor was built with trainable=False"
        self.reducer.synchronize()
        with self.comm.agreement():  # the old reducer stays until the new scheme is known to be possible
            check_possible(self.store, self.comm, scheme)
            self.store.rechunk(scheme)
        self._replace_reducer(self.reducer)

    # -- running ------------------------------------------------------------------------------

    def forward(self, training: bool | None = None) -> None:
        """Compute all layers of the batch in the input arrays. Collective.

        `training` switches batch statistics and dropout on or off; None: no change. The loss becomes known with
        :meth:`loss_value`. Raises ValueError in training if calls of :meth:`count` are missing, or for a short batch
        (`mode.valid`) with ``graph=True``. With `debug`, this method and `backward` raise on all ranks GuardError if a
        kernel of one rank wrote outside of its memory, and AccessError if it read or wrote arrays that it does not
        declare.
        """
        if training is not None:
            self.mode.training = training
        if self._counting and self.mode.training:
            if self._counts != self.parts:
                raise ValueError(
                    f"forward(): expected {self.parts} calls of count() before the first part, because a loss is "
                    f"divided by its weights in the whole batch, got {self._counts}"
                )
            # The next batch must be counted anew.
            if self.mode.part + 1 == self.parts:
                self._counts = 0
        other = self.store.reducer
        if other is not None and other is not self.reducer:
            # Another executor of the same parameters: its updates would come too late, and read other gradients.
            other.finish()
            self.store.reducer = None
        # Dropout reads the step from device memory, so that a replayed graph draws new numbers.
        self.mode.write_state()
        self.heartbeat.count += 1
        for call in self._forward["training" if self.mode.training else "evaluation"]:
            call()
        self._check_memory()
        self.pass_loss.begin()

    def count(self) -> None:
        """Add the weights of a part, whose targets and weights are in the inputs (`counted`), to those of the batch.

        Collective. Call it for all parts of a batch, in order, before the first part is computed; without `counted`
        it does nothing.
        """
        if not self._counting:
            return
        mode, part = self.mode, self.mode.part
        mode.training, mode.counting, mode.part = True, True, self._counts % self.parts
        # The count restarts after the last part, also if an error ended the batch before the last forward pass.
        count, self._counts = self._counts % self.parts + 1, 0
        try:
            for call in self._counting:
                call()
            self._counts = count
        finally:
            mode.counting, mode.part = False, part

    def _check_memory(self) -> None:
        """With `debug`, raise GuardError or AccessError on all ranks if a kernel of one misused memory. Collective."""
        if self.debug:
            with self.comm.agreement():
                GUARDS.check()
                assert self.runner.poison is not None
                self.runner.poison.check()

    def loss_value(self) -> float:
        """Return the loss of the last `forward`, summed over all ranks. Collective; optional in a step."""
        self._require_loss("loss_value()")
        return self.pass_loss.finish()

    def _require_loss(self, what: str) -> None:
        if self.loss is None:
            raise ValueError(
                f"{what}: network {self.network.name!r} has no output named 'loss' that is a loss layer; "
                f"its outputs are {', '.join(self.network.outputs)}"
            )

    def backward(self) -> None:
        """Compute the gradients of all parameters; in the last part of a batch, start their sums as soon as they are
        ready. Collective.
        """
        assert self.reducer is not None, "the executor was built with trainable=False"
        self._require_loss("backward()")
        self.heartbeat.count += 1
        # So that a forward pass of another executor of these parameters finishes the updates first.
        self.store.reducer = self.reducer
        # Before any kernel of the pass: updates that are still due read the gradients that it overwrites.
        self.reducer.begin(self.mode.part)
        self.store.clear_untrained()
        for call in self._backward:
            call()
        self._check_memory()

    # -- data ---------------------------------------------------------------------------------

    def input(self, name: str) -> Block:
        """Return array and global box ``(N, *spatial, C)`` of an input on this rank, with halo; fill all of it. Local.

        Loaders fill inputs this way: without checks, agreement or messages. Raises UserError if there is no such input.
        """
        check_name(name, self.network.inputs)
        region = self.program.values[name].region
        return Block(self.runner.region(region), region.box)

    def set_input(self, name: str, array: Any) -> None:
        """Fill an input from the whole global array ``(N, *spatial, C)`` of real numbers. Collective, for agreement
        on errors.

        Every rank copies its block, so the array may hold anything outside of it; its shape is checked.

        Raises
        ------
        UserError
            On all ranks, if the array of one of them does not fit (:func:`halograd.training.inputs.block_of`).
        """
        with self.comm.agreement():
            region = self.input(name)
            shape = self.program.values[name].layout.shape
            block = block_of(name, array, shape, region.box, np.dtype(region.array.dtype))
        self.device.assign(region.array, block)

    def gather(self, name: str, gradient: bool = False) -> np.ndarray | None:
        """Gather an output of the network or of a layer, or the gradient of a probed input. Collective.

        Rank 0 gets the whole array, ``(N, *spatial, C)`` or in the shape of the layer's output; other ranks get None.
        For several arrays or repeated calls use :class:`Gather`, which documents what is raised.
        """
        with closing(Gather(self, [] if gradient else [name], [name] if gradient else [])) as way:
            return way.run()[0]

    @property
    def predicted_bytes(self) -> Mapping[str, int]:
        """Bytes of this rank by use, in host or device memory (where the kernels run), as counted while compiling.

        They include the workspaces of `kernels` and the message buffers of `comm`, also shared ones. For a device,
        message buffers of the host are not counted.
        """
        messages = self.comm.buffer_bytes if self.device.is_host else self.comm.device_bytes
        others = {"kernel workspace": self.kernels.held_bytes, "messages": messages}
        return {**self.memory.bytes, **others}

    def close(self) -> None:
        """Free graphs, kernels, channels and reductions. Collective."""
        self._drop_graphs()
        self._opened.close()

    def _close_reducer(self) -> None:
        if self.reducer is not None:
            self.reducer.close()
            # Otherwise another executor of the same parameters would call `finish` of this closed reducer.
            if self.store.reducer is self.reducer:
                self.store.reducer = None
        for check in self.checks.values():
            check.close()

    def _drop_graphs(self) -> None:
        """Free the graphs. Call it before the messages that they contain are freed."""
        for graphed in self.graphs:
            graphed.close()
        self.graphs.clear()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: object) -> None:
        # After a fault of one rank of several, a collective close would deadlock.
        if self.comm.size == 1 or is_shared(value, self.comm.size):
            self.close()


class Gather:
    """Gather of outputs, and of gradients of probed inputs, to rank 0. Creation, `run` and `close` are collective.

    Create it once and run it after every step: its set-up takes longer than a run.

    Parameters
    ----------
    executor
        Executor of the arrays.
    names
        Outputs of the network, inputs, and layers whose output is kept. A name that both a layer and an output have
        means the layer.
    gradients
        Names of probed inputs (other gradients share memory, and are overwritten before `backward` returns).

    Raises
    ------
    UserError
        If a name is unknown, or is the loss, which is not an array (:meth:`Executor.loss_value`).
    ValueError
        If an output or a gradient is not kept. All errors are raised before any communication, from names that are the
        same on all ranks.
    """

    def __init__(self, executor: Executor, names: Sequence[str] = (), gradients: Sequence[str] = ()) -> None:
        values = [(_output(executor, name), False) for name in names]
        values += [(_gradient(executor, name), True) for name in gradients]
        self._device, self._is_root = executor.device, executor.comm.rank == 0
        self._targets: list[Any] = []
        exchanges: list[dict[str, Any]] = []
        for value, is_gradient in values:
            # On the other ranks the box, and so the target, is empty.
            layout = Layout.on_rank(value.layout.shape, 0, executor.comm.size)
            self._targets.append(self._device.empty(layout.boxes[executor.comm.rank].shape, value.dtype))
            source = executor.runner.view(value.dy if is_gradient else value.view)
            ends = {"source": End(value.layout.boxes, source), "target": End(layout.boxes, self._targets[-1])}
            exchanges.append({**ends, "kind": "gather"})
        self._exchanges = Exchange.together(executor.comm, exchanges)

    def run(self) -> list[np.ndarray | None]:
        """Return whole arrays on rank 0, None elsewhere: outputs, then gradients. The next run overwrites them."""
        for exchange in self._exchanges:
            exchange.run()
        return [self._device.to_host(target) if self._is_root else None for target in self._targets]

    def close(self) -> None:
        """Free the channels."""
        for exchange in self._exchanges:
            exchange.close()


def _output(executor: Executor, name: str) -> Value:
    network, node = executor.network, name_of(executor.network, name)
    if executor.loss is not None and node == network.names[network.outputs["loss"]]:
        raise UserError(f"gather(): {name!r} is the loss, a number and no array; call loss_value()")
    value = executor.program.values.get(node)
    if value is not None and (value.kept or value.read):
        return value
    raise ValueError(
        f"gather(): the output of {name!r} is not kept; build the executor with kept=[{name!r}], it has "
        f"{sorted(n for n, v in executor.program.values.items() if v.kept or v.read)}"
    )


def _gradient(executor: Executor, name: str) -> Value:
    node = name_of(executor.network, name)
    value = executor.program.values.get(node)
    if node in executor.probed and value is not None and value.gradient is not None:
        return value
    raise ValueError(
        f"gather(): the gradient of {name!r} is not kept; build the executor with probed=[...] of inputs "
        f"that the loss depends on, it has {sorted(executor.probed)}"
    )
