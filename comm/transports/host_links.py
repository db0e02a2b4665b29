"""Host transport: arrays travel between the ranks of a communicator by shared memory, MPI messages, or both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from halograd.limits import usable_cores

from .. import contexts
from ..channel import Channel
from ..counters import Meter
from ..errors import CommError
from ..reduction import ReductionPlan
from ..rounds import side_by_side
from ..sums import Method
from ..transport import TRANSPORTS, Transport
from . import base
from .base import Pattern, TransportContext, numbered
from .memory import Planning, SharedBlock
from .mpi import MessageSums, MpiChannel
from .nodes import NodeGroup, plan_by_nodes
from .shared import NodeMemory, WindowChannel

__all__ = ["HostLinks"]


class HostLinks:
    """Factory of channels and sums on one communicator.

    Parameters
    ----------
    transport
        Transport whose properties choose the links.
    """

    def __init__(self, context: TransportContext, transport: Transport) -> None:
        network = transport.network
        self._context, self._transport, self._network = context, transport, network
        self._memory: NodeMemory | None = None
        self._messages = MessageSums(context)
        node_of: tuple[int, ...] = ()
        if network is not None:
            node_of = numbered([rank // network.node for rank in context.ranks])
        if transport.shares:
            oversubscribed = context.mpi.size > usable_cores().count
            self._memory = NodeMemory(context, network, node_of, oversubscribed)
        # Only an emulated network needs one clock, so only then is there something to check.
        self._node_of, self._one_machine = node_of, network is None
        self._node_group: NodeGroup | None = None

    def nodes(self) -> tuple[int, ...]:
        """Return the node number of every rank, counted from 0 in order of appearance. Collective."""
        if self._network is not None:
            return self._node_of
        mpi = self._context.mpi
        node = base.split_node(mpi) if self._memory is None else self._memory.node
        alone = node.size == mpi.size
        # A node is identified by its first rank.
        first = 0 if alone else node.bcast(mpi.rank, root=0)
        if self._memory is None:
            contexts.free(node)
        return (0,) * mpi.size if alone else numbered(mpi.allgather(first))

    def neighbors(self) -> set[int]:
        """Return the ranks that this rank reaches by shared memory, itself among them; empty if the transport has none.
        Collective at the first call.
        """
        return set() if self._memory is None else self._memory.neighbors()

    @property
    def buffer_bytes(self) -> int:
        """Memory of the buffers that all channels and reductions of this rank use in common [B]."""
        return self._messages.buffer_bytes + (0 if self._memory is None else self._memory.buffer_bytes)

    def channels(self, patterns: Sequence[Pattern], meters: Sequence[Meter]) -> list[Channel]:
        """Return one channel per pattern; patterns are valid and match between ranks. Collective over the communicator.
        """
        self._check_clock()
        if self._memory is None:
            return [MpiChannel(self._context, pattern, meter) for pattern, meter in zip(patterns, meters)]
        near = self.neighbors()
        beyond = [set(pattern.peers) - near for pattern in patterns]
        # All ranks agree, because only some of them may have far peers.
        if not self._transport.messages:
            far = set().union(*beyond)
            fault = None
            if far:
                fault = CommError(
                    f"shared transport: expected peers on the same node, got rank {min(far)} on another; use "
                    "transport='auto'"
                )
            self._context.agree(fault)
        # Collective over the node, so a rank without peers on its node takes part.
        shared = self._memory.channels([pattern.among(near) for pattern in patterns], meters)
        return [
            MixedChannel(pattern, meter, near_channel, MpiChannel(self._context, pattern.among(far), meter))
            if far
            else near_channel
            for pattern, meter, near_channel, far in zip(patterns, meters, shared, beyond)
        ]

    def plans(self, sums: Sequence[tuple[np.ndarray, Method, str]]) -> list[ReductionPlan]:
        """Return the plans of the sums of several named buffers. Collective over the communicator.

        There are several ranks, and no buffer is empty.

        Raises
        ------
        CommError
            If the method needs shared memory, and this transport has none.
        """
        self._check_clock()
        # Sums by messages are made before all others, so that all ranks make their collectives in one order.
        far = [i for i, (_, method, _) in enumerate(sums) if self._by_messages(method)]
        over = self._messages.plans([(sums[i][0].reshape(-1), sums[i][1]) for i in far])
        near = [request for i, request in enumerate(sums) if i not in far]
        plans, within = iter(over), iter(side_by_side([self._plan(*request) for request in near], self._reserve))
        return [next(plans if i in far else within) for i in range(len(sums))]

    def _by_messages(self, method: Method) -> bool:
        """Return whether the sum is made by messages, because some of the ranks share no memory. Collective at the
        first call.
        """
        if method.by_nodes:
            return False
        return self._memory is None or len(self.neighbors()) < self._context.mpi.size

    def _reserve(self, sizes: Sequence[int]) -> list[SharedBlock]:
        assert self._memory is not None
        return self._memory.blocks(sizes)

    def _plan(self, buffer: np.ndarray, method: Method, name: str) -> Planning:
        flat = buffer.reshape(-1)
        # Reached by hierarchical sums only: without shared memory, all others are made by messages.
        if self._memory is None:
            *names, last = (repr(known) for known in TRANSPORTS.names if TRANSPORTS[known].shares)
            raise CommError(
                f"reduction {name}: expected a transport by which ranks of a node share memory ({', '.join(names)} or "
                f"{last}), got "
                f"'{self._transport}'; choose another transport, or a sum that needs none (allreduce, reduce_scatter)"
            )
        if not method.by_nodes:
            return (yield from self._memory.plan(flat, method))
        if self._node_group is None:
            self._node_group = self._make_node_group(self._memory)
        return (yield from plan_by_nodes(flat, method, self._node_group, self._context.progress))

    def _make_node_group(self, memory: NodeMemory) -> NodeGroup:
        """Return the node group of this rank for hierarchical sums. Collective."""
        mpi, nodes = self._context.mpi, self._node_of
        # All emulated nodes are on one machine: their first ranks share memory, and need no communicator.
        if self._network is not None:
            here = [rank for rank in range(mpi.size) if nodes[rank] == nodes[mpi.rank]]
            heads = [nodes.index(node) for node in range(max(nodes) + 1)]
            return NodeGroup(mpi.rank, here, heads, network=self._network)
        mine, size = memory.node.rank, memory.node.size
        leaders: MPI.Comm = MPI.COMM_NULL
        if size < mpi.size:
            self._context.agree(contexts.shortage())
            # The first rank of each node.
            leaders = mpi.Split(0 if mine == 0 else MPI.UNDEFINED, mpi.rank)
            if leaders != MPI.COMM_NULL:
                contexts.hold(leaders)
        return NodeGroup(mine, range(size), (0,), leaders)

    def close(self) -> None:
        """Free the resources of the transport, after its channels were closed. Collective over the communicator."""
        if self._node_group is not None and self._node_group.leaders != MPI.COMM_NULL:
            contexts.free(self._node_group.leaders)
        self._messages.close()
        if self._memory is not None:
            self._memory.close()

    def _check_clock(self) -> None:
        """Raise on all ranks if the network is emulated and the ranks share no clock. Collective at the first call."""
        if self._one_machine:
            return
        # A rank whose set-up has failed is in an agreement, not in the split below.
        self._context.agree(None)
        node = base.split_node(self._context.mpi)
        here, all_ranks = node.size, self._context.mpi.size
        contexts.free(node)
        fault = None
        if here != all_ranks:
            fault = CommError(
                f"emulated network: expected all {all_ranks} ranks on one machine, whose clock they share, got "
                f"{here} here; run on one node or use transport='auto'"
            )
        self._context.agree(fault)
        self._one_machine = True


class MixedChannel(Channel):
    """Two channels that start and finish together, each for its own peers."""

    def __init__(self, pattern: Pattern, meter: Meter, near: WindowChannel, far: MpiChannel) -> None:
        super().__init__(pattern.sends, pattern.recvs, pattern.dtype, meter)
        self._parts: tuple[Channel, Channel] = (far, near)  # far peers first: their messages take longer
        self._part_of = {peer: part for part in self._parts for peer in part.peers}

    @property
    def buffer_bytes(self) -> int:
        return sum(part.buffer_bytes for part in self._parts)

    def _send_buffer(self, peer: int, slot: int) -> np.ndarray:
        return self._part_of[peer]._send_buffer(peer, slot)

    def _recv_buffer(self, peer: int, slot: int) -> np.ndarray:
        return self._part_of[peer]._recv_buffer(peer, slot)

    # Call the hooks of the parts, not their public methods: this channel alone keeps the meter and the state.
    def _start(self) -> None:
        for part in self._parts:
            part._start()

    def _finish(self) -> float:
        for part in self._parts:
            part._finish()
        return 0.0  # the near part does not know when its data arrived

    def _close(self) -> None:
        for part in self._parts:
            part._close()


