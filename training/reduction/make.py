"""The reducer of a scheme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.replicated_dense import ReplicatedDense
from halograd.training.reduction.base import Reducer
from halograd.training.reduction.bucketed import BucketedReducer
from halograd.training.reduction.host import NodeReducer
from halograd.training.reduction.replicated_dense import ReplicatedDenseReducer, Run
from halograd.training.reduction.sharded import ShardedReducer
from halograd.training.store import ParameterStore

__all__ = ["make_reducer"]

_KINDS: Mapping[str, type[Reducer]] = {
    "blocking": BucketedReducer,
    "per_layer": BucketedReducer,
    "bucketed": BucketedReducer,
    "two_chunks": BucketedReducer,
    "host_accumulate": NodeReducer,
    "hierarchical": NodeReducer,
    "sharded": ShardedReducer,
    "auto": BucketedReducer,  # until a tuner has chosen
}


def make_reducer(
    store: ParameterStore,
    comm: Communicator,
    layers: Sequence[str],
    scheme: Scheme,
    dense: Sequence[ReplicatedDense] = (),
    run: Run | None = None,
) -> Reducer:
    """The reducer of a scheme. Collective over `comm`.

    Parameters
    ----------
    store
        Made for this scheme.
    comm
        Whose ranks share the parameters.
    layers
        Names of the steps, in order of computation.
    scheme
        What is asked for.
    dense
        The operators of the layers that may be replicated, as far as backward reaches them, in order of computation.
    run
        Who tells the recorder of their gradients (:class:`ReplicatedDenseReducer`).

    Raises
    ------
    UserError
        If the scheme cannot be had here; on all ranks.
    """
    if scheme.payload == "bfloat16" and store.dtype != np.float32:
        raise UserError(
            f'reduction.payload: expected training.dtype = "float32" with "bfloat16", got "{store.dtype}"; change one'
        )
    if scheme.payload == "bfloat16" and scheme.error_feedback and store.loss_scale is not None:
        raise UserError(
            'reduction.error_feedback: expected false with training.dtype = "float16", whose overflows would stay in '
            'the errors, got true; set it to false, or choose training.dtype = "bfloat16"'
        )
    if scheme.name not in _KINDS:
        raise UserError(f"reduction.name: expected one of {', '.join(_KINDS)}, got {scheme.name!r}; choose one of them")
    reducer = _KINDS[scheme.name](store, comm, layers, scheme)
    if any(bucket.replicated for bucket in store.buckets):
        return ReplicatedDenseReducer(reducer, dense, run)
    return reducer
