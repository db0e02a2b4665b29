"""Attention as cuDNN graphs (`sdpa`, `sdpa_backward`).

Logical axes are (B, H, S, D): windows or samples, heads, positions, channels of a head; strides are free except that
channels are contiguous. cuDNN's `stats` are our `lse`: logarithms of sums of exponentials of the scaled and biased
scores, float32, here packed as (B, H, S, 1). Its additive bias has the dtype of the arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..memory import packed_strides
from .frontend import Frontend
from .graphs import Arithmetic, GraphKey, Tensor

__all__ = [
    "ATTENTION_BACKWARD",
    "ATTENTION_FORWARD",
    "BIAS_MATRIX",
    "DBIAS_MATRIX",
    "DK",
    "DO",
    "DQ",
    "DV",
    "STATS",
    "AttentionKey",
    "K",
    "O",
    "Q",
    "V",
    "packed",
]

#: Numbers of the tensors in the graphs.
Q, K, V, O, STATS, BIAS_MATRIX, DO, DQ, DK, DV, DBIAS_MATRIX = range(1, 12)  # noqa: E741
_NAMES = dict(zip(range(1, 12), ("q", "k", "v", "o", "stats", "bias", "do", "dq", "dk", "dv", "dbias")))
ATTENTION_FORWARD, ATTENTION_BACKWARD = "attention forward", "attention backward"


def packed(*dims: int) -> Tensor:
    """Return the description of a packed array with these axes."""
    return Tensor(dims, packed_strides(dims))


@dataclass(frozen=True)
class AttentionKey(GraphKey):
    """Key of the plan of an attention.

    Parameters
    ----------
    direction
        `ATTENTION_FORWARD` or `ATTENTION_BACKWARD`.
    tensors
        The arrays by number: their extents (B, H, S, D) and strides.
    scale
        Factor of the scores.
    sm_version
        Compute capability as a number, 90 for 9.0. The frontend would otherwise read it through libcudart.
    """

    direction: str
    dtype: str
    tensors: tuple[tuple[int, Tensor], ...]
    scale: float
    sm_version: int
    arithmetic: Arithmetic
    workspace_limit: int | None = None
    tuned: bool = False

    @property
    def what(self) -> tuple[str, str]:  # type: ignore[override]
        return self.direction, "an attention"

    @property
    def uids(self) -> tuple[int, ...]:
        return tuple(uid for uid, _ in self.tensors)

    def describe(self) -> str:
        shapes = ", ".join(f"{_NAMES[uid]} {t.dims}" for uid, t in self.tensors if uid in (Q, K, V, BIAS_MATRIX))
        return f"{self.dtype} {shapes}"

    def graph(self, frontend: Frontend, where: Mapping[str, Any]) -> Any:
        io, sums = frontend.data_type(self.dtype), frontend.data_type("float32")
        graph = frontend.module.pygraph(
            io_data_type=io,
            intermediate_data_type=sums,
            compute_data_type=sums,
            sm_version=self.sm_version,
            **where,
        )
        tensors = dict(self.tensors)

        def tensor(uid: int) -> Any:
            t = tensors.get(uid)
            kind = sums if uid == STATS else io
            # None for an array that this graph lacks: the frontend takes None for no bias.
            return t and graph.tensor(
                name=_NAMES[uid], dim=list(t.dims), stride=list(t.strides), data_type=kind, uid=uid
            )

        inputs = {"q": tensor(Q), "k": tensor(K), "v": tensor(V), "bias": tensor(BIAS_MATRIX), "attn_scale": self.scale}
        if self.direction == ATTENTION_FORWARD:
            outputs = dict(zip((O, STATS), graph.sdpa(generate_stats=True, **inputs)))
        else:
            inputs |= {"o": tensor(O), "dO": tensor(DO), "stats": tensor(STATS), "dBias": tensor(DBIAS_MATRIX)}
            # Otherwise the order of its sums may differ from run to run.
            deterministic = self.arithmetic.deterministic
            gradients = graph.sdpa_backward(use_deterministic_algorithm=deterministic, **inputs)
            outputs = dict(zip((DQ, DK, DV), gradients))
        for uid, out in outputs.items():
            t = tensors[uid]
            out.set_output(True).set_data_type(sums if uid == STATS else io)
            out.set_dim(list(t.dims)).set_stride(list(t.strides)).set_uid(uid)
        return graph
