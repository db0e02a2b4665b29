"""Gradient reduction by name: which scheme sums the gradients, and how. Plain data, saved with the strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from halograd.errors import UserError
from halograd.schema import STRICT, Count, Whole, build, check_fields

__all__ = ["NAMES", "Name", "Payload", "Scheme"]

#: Schemes: when which gradients are summed over which ranks.
Name = Literal["blocking", "per_layer", "bucketed", "two_chunks", "host_accumulate", "hierarchical", "sharded", "auto"]
#: What gradients travel as.
Payload = Literal["float32", "bfloat16"]

NAMES: tuple[Name, ...] = get_args(Name)

_CHUNKED = ("blocking", "per_layer", "bucketed", "two_chunks")


@dataclass(frozen=True)
class Scheme:
    """How parameter gradients are summed over the ranks.

    Attributes
    ----------
    name
        ``"blocking"``
            One sum after backward, waited for at once: the baseline of the papers.
        ``"per_layer"``
            One sum per layer, started when backward has passed it.
        ``"bucketed"``
            One sum per `Strategy.bucket_bytes` of gradients.
        ``"two_chunks"``
            One sum for the `first_layers` layers that backward reaches first, one for the rest (Lee et al. 2017,
            Algorithm 2).
        ``"host_accumulate"``
            The ranks of a node add up `chunk` layers at a time in its memory (Le et al. 2018, Section 4).
        ``"hierarchical"``
            Buckets, within the node first, then across nodes.
        ``"sharded"``
            Buckets, reduce-scatter; each rank updates its share of the parameters; all-gather.
        ``"auto"``
            Chosen at run time.
    first_layers
        `k` of two_chunks. Counted are convolutions, dense layers and pooling, as Lee et al. do; 0 for other schemes.
    chunk
        Layers with weights per chunk of host_accumulate.
    replicated_dense
        `f`: the first so many dense layers compute the gradient of the whole batch on every rank instead of summing it
        (Lee et al. 2017, Section III-B2).
    payload
        ``"float32"``: gradients travel as they were computed (float64 where the training is). ``"bfloat16"``: rounded,
        with half the bytes, and added up in float32.
    error_feedback
        With bfloat16: what rounding took away is added to the gradient of the next step.
    deterministic
        Gradients are added in the order of the ranks, so that sums have the same bits under every transport and
        scheme.

    Raises
    ------
    UserError
        Unknown names, counts that cannot be meant, settings that the scheme does not have.
    """

    __pydantic_config__ = STRICT

    name: Name = "bucketed"
    first_layers: Whole = 0
    chunk: Count = 1
    replicated_dense: Whole = 0
    payload: Payload = "float32"
    error_feedback: bool = True
    deterministic: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "reduction")
        self._check_together()

    def _check_together(self) -> None:
        if self.name == "two_chunks" and not self.first_layers:
            raise UserError(
                "reduction.first_layers: expected the number of layers in the first chunk (>= 1) with two_chunks, got 0"
            )
        if self.name != "two_chunks" and self.first_layers:
            raise UserError(
                f'reduction.first_layers: expected name = "two_chunks" with it, got {self.name!r}; remove one of them'
            )
        if self.name != "host_accumulate" and self.chunk != 1:
            raise UserError(
                f'reduction.chunk: expected name = "host_accumulate" with it, got {self.name!r}; remove one of them'
            )
        if self.name == "auto" and self.replicated_dense:
            raise UserError(
                'reduction.replicated_dense: expected none with name = "auto", which chooses it, got '
                f"{self.replicated_dense}; remove it, or choose a scheme"
            )
        for key, plain in (("payload", self.payload == "float32"), ("deterministic", not self.deterministic)):
            if not plain and self.name not in _CHUNKED:
                raise UserError(
                    f"reduction.{key}: expected one of the schemes {', '.join(_CHUNKED)} with {getattr(self, key)!r}, "
                    f"got {self.name!r}; choose one of them, or leave {key} out"
                )

    @property
    def has_buckets(self) -> bool:
        """Whether `Strategy.bucket_bytes` matters."""
        return self.name in ("bucketed", "hierarchical", "sharded", "auto")

    @classmethod
    def of(cls, data: Scheme | Mapping[str, Any]) -> Scheme:
        """From what JSON or TOML gave.

        Raises
        ------
        UserError
            In one line: unknown keys, and what the constructor refuses.
        """
        if isinstance(data, Scheme):
            return data
        return build(cls, data, at="reduction")

    def __str__(self) -> str:
        """In words, for headlines and logs: ``two_chunks(9) + replicated_dense(2), bfloat16``."""
        count = {"two_chunks": self.first_layers, "host_accumulate": self.chunk}.get(self.name)
        text = self.name if count is None else f"{self.name}({count})"
        if self.replicated_dense:
            text += f" + replicated_dense({self.replicated_dense})"
        if self.payload != "float32":
            text += f", {self.payload}" + ("" if self.error_feedback else " without error feedback")
        return text + (", deterministic" if self.deterministic else "")
