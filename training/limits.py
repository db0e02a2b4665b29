"""What a configuration asks for, held against data and memory before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from halograd.comm import Communicator
from halograd.documents import bytes_text
from halograd.errors import UserError
from halograd.layers import Network, Strategy
from halograd.layers.parameter_blocks import parameter_blocks
from halograd.perfmodel.cost import buckets_of, memory_of, program_of
from halograd.perfmodel.profile.device import memory_size
from halograd.program.compiler import Target
from halograd.program.dtypes import dtype_of
from halograd.training.config import Config

__all__ = ["check_batch", "check_memory"]


def check_batch(config: Config, samples: int, trainable: bool) -> None:
    """Refuse a batch with more samples than there are. Local, the same on every rank.

    Parameters
    ----------
    samples
        Of which batches are made: those for training; of an evaluation, which fills its last batch, all.
    """
    if config.training.batch > samples:
        some = "the training samples" if trainable else "the samples"
        raise UserError(
            f"training.batch: expected at most {samples}, {some} of {config.data.path}, got {config.training.batch}; "
            "choose a smaller batch" + (", or hold out fewer samples by data.validation" if trainable else "")
        )


def check_memory(config: Config, comm: Communicator, network: Network, strategy: Strategy, trainable: bool) -> None:
    """Refuse what cannot fit into the memory of a node. Collective; the same error on all ranks.

    Counted are the arrays of the network and the batches that are read ahead, as the cost model knows them, without
    optimizer state and kernels' workspaces: what is refused would not have come through its first step.
    """
    batch, dtype, size = config.training.batch, config.training.dtype, comm.size
    blocks = parameter_blocks(network, strategy, size)
    target = Target(batch, size, comm.rank, dtype_of(dtype), trainable)
    program = program_of(network, strategy, target, blocks)
    buckets = buckets_of(network, blocks, program.wide.itemsize, strategy) if trainable else []
    needs = memory_of(program, blocks, buckets, strategy)
    needs["batches read ahead"] = (config.data.prefetch + 1) * needs.get("input", 0)
    _refuse_too_much(comm.allgather_objects((comm.nodes[comm.rank], memory_size(1), needs)))


def _refuse_too_much(ranks: Sequence[tuple[int, int, Mapping[str, int]]]) -> None:
    """Node, memory of that node [B] and needs by use [B] of every rank."""
    for node, there_is in {node: size for node, size, _ in ranks}.items():
        mine = [needs for other, _, needs in ranks if other == node]
        total = sum(sum(needs.values()) for needs in mine)
        if total > there_is:
            uses = {use: sum(needs.get(use, 0) for needs in mine) for needs in mine for use in needs}
            most = sorted(uses.items(), key=lambda item: -item[1])[:3]
            raise UserError(
                f"training.batch: expected a network and a batch within the {bytes_text(there_is)} of memory of a "
                f"node, got {bytes_text(total)} for its {len(mine)} rank(s): "
                f"{', '.join(f'{use} {bytes_text(n)}' for use, n in most)}; use more nodes, a smaller batch or a "
                "smaller network"
            )
