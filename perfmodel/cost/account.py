"""Traffic and memory of a training step, counted from its program, sums of gradients by the chosen scheme included."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from ...comm.sums import Held, NodeShare, held_together, node_shares
from ...device import as_dtype, is_low
from ...dtensor import Groups
from ...layers import Network
from ...layers.parameter import ParameterBlocks
from ...layers.reduction_chunks import aligned, buckets_of, exposed_layers
from ...layers.strategy import Strategy, parameter_blocks
from ...lowering.operations import Run, Sum, Transfer
from ...lowering.views import View
from ...program.compiler import compile_program
from ...program.gradients import Accumulate, Compensate, Update, reduce_gradients
from ...program.program import Program, Target
from ...program.traffic import ExchangeTraffic, GroupSum, Ledger, Move, messages_of, sums_of

__all__ = [
    "count_program",
    "count_step",
    "gradients_memory",
    "layers_memory",
    "memory_of",
    "program_of",
    "workspace_of",
]

#: Size of the sum of a loss [B]: the loss, and two numbers by which the ranks agree on checkpoints
#: (`halograd.training.pass_loss.VOTES`).
LOSS_BYTES = 24


def program_of(
    network: Network,
    strategy: Strategy,
    target: Target,
    blocks: Mapping[str, ParameterBlocks] | None = None,
    parts: int = 1,
) -> Program:
    """Compile the program of one rank as the runtime does, with the sums of gradients by the strategy's scheme.

    Parameters
    ----------
    target
        Batch, ranks, dtype, and the rank of the program.
    blocks
        Blocks of parameters and states; computed if None.
    parts
        Number of parts of a batch whose gradients are added before an update.
    """
    blocks = blocks or parameter_blocks(network, strategy, target.size)
    exposed = exposed_layers(strategy, network, target.batch) if target.trainable else []
    program = compile_program(network, strategy, target, blocks, exposed)
    buckets = buckets_of(network, blocks, strategy, program.wide.itemsize, exposed)
    return reduce_gradients(program, buckets, strategy.reduction, parts)


def count_step(
    network: Network,
    strategy: Strategy,
    batch: int,
    ranks: int | None = None,
    dtype: str = "float32",
    per_node: int | None = None,
) -> dict[str, ExchangeTraffic]:
    """Count the traffic that every rank sends in one training step, by kind (``"halo"``, ``"allreduce"``, ...).

    Parameters
    ----------
    ranks
        Number of ranks; None: the strategy's number.
    per_node
        Number of consecutive ranks that share memory; all ranks if None.

    Notes
    -----
    See :func:`halograd.program.traffic.messages_of`. The count includes the all-gathers of shards after an update.
    """
    target = Target(batch, ranks or strategy.ranks, dtype=as_dtype(dtype))
    return count_program(program_of(network, strategy, target), per_node).kinds


def count_program(program: Program, per_node: int | None = None) -> Ledger:
    """Count the traffic that every rank sends in one step of a compiled program; `per_node` as in :func:`count_step`.
    """
    ledger = Ledger(program.target.size)
    for layer, item in messages_of(program, per_node):
        ledger.add(item, layer)
    # The runtime sums the loss (`halograd.training.pass_loss`): no operation of the program does.
    if program.loss is not None:
        ledger.add(GroupSum.of("loss", Groups.whole(program.target.size), [LOSS_BYTES]))
    return ledger


def memory_of(
    program: Program,
    blocks: Mapping[str, ParameterBlocks],
    slots: int = 0,
    per_node: int | None = None,
    ahead: int = 0,
    workspace: int | None = None,
) -> dict[str, int]:
    """Return the memory of the program's rank by use, with the uses of `Executor.predicted_bytes` [B].

    All of it is exact, except the estimated workspace of kernels and the messages that MPI buffers.

    Parameters
    ----------
    blocks
        Blocks of parameters and states.
    slots
        Number of arrays of the parameters' size in the optimizer's state.
    per_node
        Number of consecutive ranks that share memory; all ranks if None.
    ahead
        Number of batches that are read ahead of their use.
    workspace
        Memory that kernels hold in addition to their arrays, if the kernels exist already [B]; None: an estimate
        (:func:`workspace_of`).
    """
    # A Counter adds: both parts have "messages".
    memory = Counter(layers_memory(program, blocks, ahead))
    memory.update(gradients_memory(program, slots, per_node))
    # The actual size of existing kernels replaces the estimate.
    if workspace is not None:
        memory["kernel workspace"] = workspace
    return dict(memory)


def workspace_of(program: Program) -> int:
    """Estimate the memory that kernels hold in addition to their arrays on the program's rank [B].

    All kernels share one buffer of scratch memory, to which a convolution copies its weights in the format that oneDNN
    requires. In three dimensions it also copies the input of one sample and, for one plane of the output, the input of
    each product, and it holds four partial gradients of the weights. This is exact to 1 % with AVX2, and too much where
    oneDNN has kernels without these copies (AVX-512). The positions of max pools are added. Masks of activations depend
    on the backend and are left out: less than 1 % of the arrays of U-Nets.
    """
    kernels = dict.fromkeys(run.kernel for run in program if isinstance(run, Run))
    return max((_scratch(kernel.views) for kernel in kernels), default=0) + sum(kernel.keeps for kernel in kernels)


def _scratch(views: Mapping[str, View | None]) -> int:
    """Return the scratch memory of a convolution by its arrays; 0 for other kernels [B]."""
    weights = views.get("w") or views.get("dw")
    source, target = (views.get(name) or views.get(f"d{name}") for name in ("x", "y"))
    if weights is None or source is None or target is None or len(weights.shape) != len(source.shape):
        return 0
    elements, (_, *kernel, _) = math.prod(weights.shape), weights.shape
    if not kernel:  # products of dense layers take the weights as they are
        return 0
    if len(kernel) == 3 and math.prod(kernel) > 1:
        plane, channels = math.prod(target.shape[2:-1]), source.shape[-1]
        elements += 4 * elements + math.prod(source.shape[1:]) + math.prod(kernel) * channels * plane
    return elements * source.dtype.itemsize


def layers_memory(program: Program, blocks: Mapping[str, ParameterBlocks], ahead: int = 0) -> dict[str, int]:
    """Return the memory of the program's rank by use, without that of sums of gradients and of the optimizer [B].

    The parameters are those of :func:`memory_of`.
    """
    memory = Counter(program.placement.uses)
    memory["kernel workspace"] = workspace_of(program)
    if ahead:
        memory["batches read ahead"] = ahead * memory["input"]
    memory["parameter"] = memory["parameter gradient"] = 0
    rank, itemsize = program.target.rank, program.wide.itemsize
    low = program.target.dtype.itemsize if is_low(program.target.dtype) else 0
    flats = {g.name: (bucket.sharing, bucket.replicated) for bucket in program.buckets for g in bucket.gradients}
    rounded = Counter[object]()  # bytes of gradients by flat array, of those with gradients in 16 bits
    rounds = set[object]()
    for step in program.steps:
        for key, spec in () if step.owner else step.parameters.items():
            name = f"{step.name}/{key}"
            # Aligned, as in the flat arrays of the parameters and gradients (`halograd.training.store`).
            own = aligned(blocks[name].boxes[rank].size * itemsize)
            # If `low` is not 0, kernels read a copy of the parameters in 16 bits.
            memory["parameter"] += own + own * low // itemsize
            memory["parameter gradient"] += own
            flat = flats.get(name)
            rounded[flat] += own * low // itemsize
            rounds |= {flat} if spec.rounded and program.target.rounds else set()
        for key in step.states:
            memory["parameter"] += blocks[f"{step.name}/{key}"].boxes[rank].size * itemsize
    memory["parameter gradient"] += sum(rounded[flat] for flat in rounds)
    memory["messages"] = LOSS_BYTES if program.target.size > 1 else 0
    starts = (o for o in program if isinstance(o, Transfer) and o.end == "start" and o.when != "evaluation")
    for exchange in dict.fromkeys(operation.exchange for operation in starts):
        # Buffers for what the rank sends, and for what it receives, which is what the adjoint sends.
        move = Move.of(exchange)
        memory["messages"] += int(move.peers(rank)[1].sum()) + int(move.adjoint.peers(rank)[1].sum())
    # Sums of layers add up or gather in shared memory, whatever the nodes.
    # Sums without a layer are those of gradients (`gradients_memory`).
    sums = sums_of(operation for operation in program if operation.layer)
    memory["messages"] += _held(sums, rank, program.target.size)
    return dict(memory)


def gradients_memory(program: Program, slots: int = 0, per_node: int | None = None) -> dict[str, int]:
    """Return the memory of operations on gradients on the program's rank, by use [B].

    Sums in progress need as much memory for messages as for their gradients; large sums of one group of ranks
    share a ring (`halograd.comm.ring`).
    """
    rank, per_node = program.target.rank, per_node or program.target.size
    memory = Counter[str]()
    for operation in program:
        if isinstance(operation, Update):
            memory["optimizer state"] += slots * operation.updated
        elif isinstance(operation, Compensate):
            memory["gradient error"] += operation.nbytes
        elif isinstance(operation, Accumulate):
            memory["gradient sum"] += operation.nbytes
    sums = sums_of(operation for operation in program if not operation.layer)
    memory["messages"] = _held(sums, rank, per_node)
    return {use: nbytes for use, nbytes in memory.items() if nbytes}


def _held(sums: Sequence[Sum], rank: int, per_node: int) -> int:
    """Return the memory of sums that are planned together on a rank, in addition to their arrays [B]."""
    by_groups = dict[Groups, list[Sum]]()
    for operation in sums:
        # A rank in no group, or in a group of one, takes no part in a sum.
        if operation.groups.color(rank) is not None and operation.groups.members_each > 1:
            by_groups.setdefault(operation.groups, []).append(operation)
    total = 0
    for groups, together in by_groups.items():
        color = groups.color(rank)
        assert color is not None
        members = groups.members(color)
        position = members.index(rank)
        share: NodeShare | None = None  # it depends on all members, so sums of one group of ranks have it in common
        held = list[tuple[int, Held]]()
        for operation in together:
            nbytes, method, itemsize = operation.sizes[color], operation.algorithm, operation.view.dtype.itemsize
            if method.by_nodes:
                share = share or node_shares([member // per_node for member in members])[position]
                held.append((nbytes, share.held(nbytes)))
            else:
                count = nbytes // itemsize
                held.append((nbytes, method.held(count, itemsize, len(members), position, operation.feedback)))
        total += held_together(held)
    return total
