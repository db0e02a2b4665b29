"""What a step sends and keeps under a scheme of gradient reduction: program, buckets and loss together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...device import as_dtype
from ...dtensor import Groups
from ...layers import Network
from ...layers.parameter import ParameterBlocks, parameter_blocks
from ...layers.reduction_chunks import dense_layers
from ...layers.strategy import Strategy
from ...program.compiler import Target, compile_program
from ...program.program import Program
from ...program.traffic import ExchangeTraffic, GroupSum, Ledger, Move, messages_of, sums_of
from .reductions import Keeping, booked, kept
from .timeline import PricedBucket, aligned, buckets_of

__all__ = ["add_sums", "count_program", "count_step", "layers_memory", "memory_of", "program_of"]

#: What is summed with every loss [B]: it, and two numbers by which the ranks agree on checkpoints
#: (`halograd.training.pass_loss.VOTES`).
LOSS_BYTES = 24


def program_of(
    network: Network, strategy: Strategy, target: Target, blocks: Mapping[str, ParameterBlocks] | None = None
) -> Program:
    """The program of one rank as the runtime compiles it, with the dense layers that the strategy's scheme replicates.

    Parameters
    ----------
    target
        Batch, ranks, dtype, and for which of the ranks.
    blocks
        Of parameters and states, if they are known already.
    """
    replicated = list(dense_layers(network))[: strategy.reduction.replicated_dense] if target.trainable else []
    return compile_program(network, strategy, target, blocks, replicated)


def count_step(
    network: Network,
    strategy: Strategy,
    batch: int,
    ranks: int | None = None,
    dtype: str = "float32",
    per_node: int | None = None,
) -> dict[str, ExchangeTraffic]:
    """What every rank sends in one training step, by kind (``"halo"``, ``"redistribute"``, ``"allreduce"``, ...).

    Parameters
    ----------
    ranks
        How many there are; those of the strategy if None.
    per_node
        So many consecutive ranks share memory; all of them if None.

    Notes
    -----
    See :func:`halograd.program.traffic.messages_of`. Shards are gathered where there is an optimizer.
    """
    size = ranks or strategy.ranks
    blocks = parameter_blocks(network, strategy, size)
    program = program_of(network, strategy, Target(batch, size, dtype=as_dtype(dtype)), blocks)
    itemsize = as_dtype(dtype).itemsize
    buckets = buckets_of(network, blocks, itemsize, strategy)
    return count_program(program, buckets, strategy, per_node or size)


def count_program(
    program: Program, buckets: Sequence[PricedBucket], strategy: Strategy, per_node: int
) -> dict[str, ExchangeTraffic]:
    """The same of a program that is compiled already, and its buckets."""
    ranks, itemsize = program.target.size, program.target.dtype.itemsize
    ledger = Ledger(ranks)
    ledger.book(messages_of(program))
    for bucket in buckets:
        ledger.book(booked(bucket, strategy.reduction, per_node, itemsize))
    if program.loss is not None:
        ledger.book([GroupSum.of("loss", Groups.whole(ranks), [LOSS_BYTES])])
    return ledger.kinds


def memory_of(
    program: Program,
    blocks: Mapping[str, ParameterBlocks],
    buckets: Sequence[PricedBucket],
    strategy: Strategy,
    slots: int = 0,
    per_node: int | None = None,
    accumulates: bool = False,
) -> dict[str, int]:
    """Bytes of the program's rank by use, as `Executor.predicted_bytes` has them, less the workspaces of kernels [B].

    Parameters
    ----------
    slots
        Arrays of the parameters' size that the optimizer keeps.
    per_node
        So many consecutive ranks share memory; all of them if None.
    accumulates
        Whether batches are computed in parts, whose gradients are added up.
    """
    found, per_node = layers_memory(program, blocks), per_node or program.target.size
    add_sums(found, buckets, Keeping(strategy.reduction, program.target.rank, per_node, slots, accumulates))
    return found


def layers_memory(program: Program, blocks: Mapping[str, ParameterBlocks]) -> dict[str, int]:
    """The same without what sums of gradients and the optimizer keep [B]."""
    rank = program.target.rank
    found = dict(program.placement.uses)
    found["parameter"] = found["parameter gradient"] = 0
    for step in program.steps:
        itemsize = program.wide.itemsize
        for key in () if step.owner else step.parameters:
            own = aligned(blocks[f"{step.name}/{key}"].boxes[rank].size * itemsize)
            found["parameter"] += own
            found["parameter gradient"] += own
        for key in step.states:
            found["parameter"] += blocks[f"{step.name}/{key}"].boxes[rank].size * itemsize
    found["messages"] = _messages(program)
    return found


def add_sums(found: dict[str, int], buckets: Sequence[PricedBucket], keeping: Keeping) -> None:
    """Add what the sums of gradients and the optimizer keep on a rank [B]."""
    for bucket in buckets:
        for use, nbytes in kept(bucket, keeping).items():
            found[use] = found.get(use, 0) + nbytes


def _messages(program: Program) -> int:
    """Message buffers of all exchanges, of the sums within layers and of the loss."""
    rank = program.target.rank
    total = LOSS_BYTES if program.target.size > 1 else 0
    for move in (item for item in messages_of(program) if isinstance(item, Move)):
        total += int(move.peers(rank)[1].sum()) + int(move.adjoint.peers(rank)[1].sum())
    for one in sums_of(program):
        color, together = one.groups.color(rank), one.groups.members_each
        if color is not None and together > 1:
            total += one.sizes[color] * (together if one.method == "all_gather" else 1)
    return total
