"""Execution: a network compiled for one strategy, batch and backend into operators that only run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from ..comm import Communicator
from ..comm.errors import is_shared
from ..device import is_low
from ..dtensor import Box
from ..layers import Network
from ..layers.parameter import parameter_blocks
from ..layers.reduction_chunks import dense_layers, replicable_layers
from ..layers.reduction_scheme import Scheme
from ..layers.strategy import Strategy
from ..program.compiler import Target, compile_program
from ..program.runner import Mode, Runner
from ..program.views import Value
from .graph import GraphedPass, check_graph, drop, graphed_passes
from .kernels import Memory, check_dtype, report_substitutes
from .pass_loss import PassLoss
from .reduction import Reducer, check_possible
from .store import ParameterStore
from .timeline import DeviceSpans
from .transfer import Gather, block_of, check_name
from .watch import Pulse

__all__ = ["Block", "Executor"]


@dataclass(frozen=True)
class Block:
    """An array and the global box that it holds."""

    array: Any
    box: Box


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
        Global number of samples per pass.
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
        Whether training passes are recorded, and launched as graphs of the device from then on: one graph per pass on
        one rank, else several, between which messages travel (by NCCL within them).
    kept
        Layers whose outputs `gather` is asked for, beside the outputs of the network: others share memory.
    parts
        How many passes make a step: their gradients are added up, in arrays beside the gradients, and summed over the
        ranks once. Which one it is says `mode.part`.

    Attributes
    ----------
    pass_loss
        The loss of the last pass, on its way to all ranks (:class:`halograd.training.pass_loss.PassLoss`).
    votes, counted
        Those of `pass_loss`: what this rank has to say to all others, and what all have said.
    pulse
        Where this rank stands.
    device
        Where the arrays live.
    probed
        Inputs whose gradient is kept.

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
        kept: Iterable[str] = (),
        parts: int = 1,
    ) -> None:
        self.probed, self._kept, self.parts = frozenset(probed), frozenset(kept), parts
        self.network, self.comm, self.kernels, self.batch = network, comm, kernels, batch
        with comm.agreement():
            self.strategy = strategy or Strategy({"sample": comm.size})
            self.strategy.validate(network, comm.size)
            if comm.rank == 0:
                self.strategy.warn_of_idle_ranks(network, batch, comm.size)
            self.dtype = check_dtype(dtype, kernels)
            self.memory = Memory(kernels)
            self.mode = Mode(training=trainable, seed=seed, valid=batch, size=batch)
            self._made_store = store is None
            self.store = store or self._make_store(seed)
            if trainable and self.store.parts != parts:
                raise ValueError(f"store: expected one for {parts} parts of a batch, got one for {self.store.parts}")
            if self.store.low != (self.dtype if is_low(self.dtype) else None):
                found = self.store.low or self.store.dtype
                raise ValueError(f"store: expected one for {self.dtype}, got one for {found}")
            if self.store.loss_scale is not None:
                self.mode.loss_scale = self.store.loss_scale.factor
            self.recorder, self.device = comm.instruments.recorder, self.memory.device
            timed = self.recorder is not None and not self.device.is_host
            self._spans = DeviceSpans(self.device, self.recorder) if timed and self.recorder else None
            self.mode.state = self.device.array([seed, 0, 0], np.uint64)
            self.pulse = Pulse()
            if graph:
                check_graph(comm, self.device)
            self._bind(trainable)
        self._graphed = graph and trainable
        self._graphs: tuple[GraphedPass, GraphedPass] | None = None
        report_substitutes(comm, self.runner.substitutes)

    def _make_store(self, seed: int) -> ParameterStore:
        blocks = parameter_blocks(self.network, self.strategy, self.comm.size)
        nbytes, scheme = self.strategy.bucket_bytes, self.strategy.reduction
        rank, apart = self.comm.rank, frozenset(self.replicable)
        some = (self.network, self.memory, self.dtype, seed, nbytes, blocks, rank, scheme, apart)
        return ParameterStore(*some, parts=self.parts)

    @cached_property
    def replicable(self) -> list[str]:
        """Dense layers whose gradients are replicated, or may be by :meth:`reduce_by`; in order of computation."""
        scheme = self.strategy.reduction
        if scheme.kind.searches:
            return replicable_layers(self.strategy, self.network, self.batch)
        return list(dense_layers(self.network))[: scheme.replicated_dense]

    def _bind(self, trainable: bool) -> None:
        target = Target(
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
        )
        replicable = self.replicable if trainable else ()
        self.program = compile_program(self.network, self.strategy, target, self.store.blocks, replicable)
        self.steps, self.values = self.program.steps, self.program.values
        store = self.store
        arrays = {"params": store.params, "copies": store.copies, "grads": store.grads, "state": store.state}
        arrays["rounded"] = store.rounded
        self.runner = Runner(self.program, self.comm, self.kernels, arrays, self.mode)
        for use, nbytes in self.program.placement.uses.items():
            self.memory.count(nbytes, use)
        self.pass_loss = PassLoss(self.comm, self.device, self.loss)
        self.votes, self.counted = self.pass_loss.votes, self.pass_loss.counted
        self.reducer: Reducer | None = self._make_reducer() if trainable else None

    @property
    def loss(self) -> Any:
        """The loss of this rank's block, float64 ``(1,)``, where the kernels run; None if there is none."""
        return None if self.program.loss is None else self.runner.view(self.program.loss)

    def array(self, value: Value) -> Any:
        """This rank's block of a value, while it is there."""
        return self.runner.view(value.view)

    def _make_reducer(self) -> Reducer:
        """The reducer of the scheme for which the store has its buckets."""
        scheme, reached = self.store.scheme, {segment.name for segment in self.program.backward}
        dense = [self.runner.made(kernel) for name, kernel in self.program.exposed.items() if name in reached]
        for operator in dense:
            operator.replicates = operator.name in self.replicable[: scheme.replicated_dense]
        return Reducer(self.store, self.comm, scheme, dense, self._run)

    def reduce_by(self, scheme: Scheme) -> None:
        """Sum gradients by another scheme from now on; what is under way is finished and updated. Collective.

        The optimizer has to :meth:`bind <halograd.training.optimizers.Optimizer.bind>` afterwards, and whoever holds
        `reducer` to take the new one. This is no part of a step: it allocates.

        Raises
        ------
        ValueError
            If more dense layers are to be replicated than the executor was built for (`replicable`).
        UserError
            If the scheme cannot be had here. After either the executor goes on as before.
        """
        assert self.reducer is not None, "the executor was built with trainable=False"
        self.reducer.settle()
        with self.comm.agreement():  # nothing is given up before it is known that the other can be had
            check_possible(self.store, self.comm, scheme)
            self.store.rechunk(scheme)
        update = self.reducer.update
        self.reducer.close()
        with self.comm.agreement():
            self.reducer = self._make_reducer()
        self.reducer.update = update
        drop(self._graphs)  # sums begin and are waited for elsewhere
        self._graphs = None

    # -- running ------------------------------------------------------------------------------

    def forward(self, training: bool | None = None) -> None:
        """Compute all layers of the batch in the input arrays. Collective.

        `training` switches batch statistics and dropout; unchanged if None. The loss becomes known with
        :meth:`loss_value`. Raises ValueError for a short batch (`mode.valid`) in training with graphs.
        """
        if training is not None:
            self.mode.training = training
        self.mode.tell()
        self.pulse.count += 1
        if self._graphed and self.mode.training and not self._timed:
            self._refuse_short_batch()
            self._graphs = self._graphs or graphed_passes(self)
            self._graphs[0]()
        else:
            self._compute()
        self.pass_loss.begin()

    @property
    def _timed(self) -> bool:
        """Whether layers are timed now: by events, which cannot be read in a graph."""
        return self.recorder is not None and not getattr(self.recorder, "paused", False)

    def _refuse_short_batch(self) -> None:
        """A graph repeats the counts with which it was recorded."""
        if self.mode.valid != self.batch:
            raise ValueError(
                f"mode.valid: expected {self.batch} samples, the whole batch, with graph=True, got {self.mode.valid}; "
                "leave out the short last batch of an epoch, or build the executor with graph=False"
            )

    def _compute(self) -> None:
        """All layers forward."""
        training = self.mode.training
        for layer in self.runner.forward:
            if self.reducer is not None:
                self.reducer.require(layer.name)
            self._run(layer.name, "forward", partial(layer.run, training))
        self.pass_loss.put()

    def loss_value(self) -> float:
        """The loss of the last `forward`, summed over all ranks. Collective, and optional."""
        self._require_loss("loss_value()")
        return self.pass_loss.settle()

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
        self.reducer.begin(self.mode.part)
        self.store.clear_untrained()
        if self._graphs is not None and not self._timed:
            self._graphs[1]()
        else:
            for layer in self.runner.backward:
                self._run(layer.name, "backward", partial(layer.run, True))
                self.reducer.ready(layer.name)
        self.reducer.flush()

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

    def input(self, name: str) -> Block:
        """Array and global box ``(N, *spatial, C)`` of an input on this rank, halo included: fill all of it. Local.

        Nothing is checked or agreed on: this is how loaders bring batches, without a message. Raises UserError if there
        is no such input.
        """
        check_name(name, self.network.inputs)
        region = self.values[name].region
        return Block(self.runner.region(region), region.box)

    def set_input(self, name: str, array: Any) -> None:
        """Fill an input from the whole global array ``(N, *spatial, C)`` of real numbers. Collective: one message.

        Every rank copies its block, so that elsewhere the array need not hold true values; its shape is checked.

        Raises
        ------
        UserError
            On all ranks, if the array of one of them does not fit (:func:`halograd.training.transfer.block_of`).
        """
        with self.comm.agreement():
            region = self.input(name)
            shape = self.values[name].layout.shape
            block = block_of(name, array, shape, region.box, np.dtype(region.array.dtype))
        self.device.assign(region.array, block)

    def gather(self, name: str, gradient: bool = False) -> np.ndarray | None:
        """The whole array of a layer on rank 0, None elsewhere; with `gradient` that of a probed input. Collective.

        Of several arrays, or after several steps: :class:`halograd.training.transfer.Gather`.
        """
        with closing(Gather(self, [] if gradient else [name], [name] if gradient else [])) as way:
            return way.run()[0]

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
        """Free graphs, kernels, channels and reductions. Collective."""
        drop(self._graphs)
        self._graphs = None
        self.runner.close()
        if self.reducer is not None:
            self.reducer.close()
        self.pass_loss.close()
        if self._made_store and self.store.loss_scale is not None:
            self.store.loss_scale.close()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: object) -> None:
        if is_shared(value, self.comm.size):  # else the other ranks wait for this one, and this one would wait for them
            self.close()
