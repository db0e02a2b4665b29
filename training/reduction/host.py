"""Sums that the ranks of a node make together in its memory, and one rank of each node with the others."""

from __future__ import annotations

from collections.abc import Sequence

from halograd.comm import Communicator, Reduction
from halograd.errors import UserError
from halograd.layers.groups import in_group
from halograd.layers.reduction_scheme import Scheme
from halograd.training.reduction.bucketed import BucketedReducer
from halograd.training.store import Bucket, ParameterStore

__all__ = ["NodeReducer"]

_METHODS = {"hierarchical": "hierarchical", "host_accumulate": "accumulate"}


class NodeReducer(BucketedReducer):
    """``hierarchical`` and ``host_accumulate``: within the node in shared memory, then across by one rank per node.

    ::

        ready(last layer of a chunk)
                       every rank    its gradients to shared memory
        progress       every rank    its share of the sum over the node's ranks
        thread         the first     all-reduce with the first ranks of the other nodes
                       every rank    the sum from shared memory to its gradients
        require(first layer of the chunk), if the sum is not back yet: wait

    ``hierarchical`` has buckets by bytes; the main thread copies its gradients in, and back where it waits for them.
    ``host_accumulate`` has chunks of layers with weights, and the thread copies too, both ways, while backward goes
    on: the scheme of Le et al., in which gradients lie on a GPU and are sent to the host and back on streams of their
    own, and the host adds them up by its threads. Here they lie on the host, and every rank's progress thread adds up
    one share.

    Collective to build and run.

    Notes
    -----
    Communication per process and step, of all buckets that it holds: their bytes through shared memory, if there are
    others on the node that hold them (booked as ``"node"``); and their bytes again as an all-reduce across nodes, on
    the first of these if there are several nodes (booked as ``"allreduce"``).

    References
    ----------
    Le et al. 2018, Section 3.1 (steps B-4-1 to B-5-2) and Section 4.1 (chunks).
    """

    def __init__(self, store: ParameterStore, comm: Communicator, layers: Sequence[str], scheme: Scheme) -> None:
        if comm.size > 1 and comm.transport == "mpi":
            raise UserError(
                f'reduction.name: expected a transport by which ranks share memory with "{scheme.name}", got "mpi"; '
                'choose backend.transport = "auto", or one of blocking, per_layer, bucketed, two_chunks, sharded'
            )
        super().__init__(store, comm, layers, scheme)

    def _sum(self, bucket: Bucket) -> Reduction | None:
        method = _METHODS[self.scheme.name]
        return in_group(
            self.comm, bucket.holders, lambda group: group.reduction(bucket.grads, kind="allreduce", method=method)
        )
