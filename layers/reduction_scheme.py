"""Schemes of gradient reduction, by name. Plain data, saved with the strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from halograd.errors import UserError
from halograd.schema import STRICT, Count, Text, Whole, build, check_fields

from ..comm.codec import CODECS, Codec
from ..comm.sums import METHODS, Method, carrying

__all__ = ["BY_NODES", "KINDS", "NAMES", "Kind", "Name", "Scheme"]

#: Names of the schemes.
Name = Literal["blocking", "per_layer", "bucketed", "two_chunks", "host_accumulate", "hierarchical", "sharded", "auto"]

NAMES: tuple[Name, ...] = get_args(Name)


@dataclass(frozen=True)
class Kind:
    """Properties that all schemes of one name share; other code reads these, not the name.

    Attributes
    ----------
    chunks
        Rule that closes a chunk of gradients: ``"never"``, after every ``"layer"``, at a number of ``"bytes"``, after
        the ``"first"`` layers, or at a number of layers with ``"weights"``.
    method
        Method that sums a chunk, a name of `halograd.comm.sums.METHODS`.
    shards
        Whether each rank updates its shard of the parameters, after which the shards are gathered.
    waits
        Whether sums start when backward is over, and block.
    searches
        Whether the scheme is chosen during training.
    """

    chunks: str
    method: str = "allreduce"
    shards: bool = False
    waits: bool = False
    searches: bool = False

    @property
    def settable(self) -> bool:
        """Whether payload and order of the scheme's sums can be set."""
        return self.method == "allreduce" and not self.searches


KINDS: dict[Name, Kind] = {
    "blocking": Kind("never", waits=True),
    "per_layer": Kind("layer"),
    "bucketed": Kind("bytes"),
    "two_chunks": Kind("first"),
    "host_accumulate": Kind("weights", "accumulate"),
    "hierarchical": Kind("bytes", "hierarchical"),
    "sharded": Kind("bytes", "reduce_scatter", shards=True),
    "auto": Kind("bytes", searches=True),  # until a scheme is chosen
}
#: Hierarchical schemes, which sum in the memory of a node first.
BY_NODES: tuple[Name, ...] = tuple(name for name, kind in KINDS.items() if METHODS[kind.method].by_nodes)


@dataclass(frozen=True)
class Scheme:
    """Scheme by which the ranks sum parameter gradients.

    Attributes
    ----------
    name
        ``"blocking"``
            One blocking sum after backward: the baseline of the papers.
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
            Buckets, summed within each node first, then across nodes.
        ``"sharded"``
            Buckets, reduce-scatter; each rank updates its share of the parameters; all-gather.
        ``"auto"``
            The fastest scheme, chosen at run time.
    first_layers
        `k` of two_chunks. Convolutions, dense layers and pooling count, as in Lee et al.; 0 for other schemes.
    chunk
        Layers with weights per chunk of host_accumulate.
    replicated_dense
        `f`: the first `f` dense layers compute the gradient of the whole batch on every rank instead of summing it
        (Lee et al. 2017, Section III-B2).
    payload
        Codec of the messages, a name of `halograd.comm.codec.CODECS`. ``"float32"``: messages have the dtype of the
        gradients (float64 if training is in float64). ``"bfloat16"``: messages are rounded, with half the bytes;
        additions are in float32. ``"FILE.py:CLASS"``: a :class:`halograd.comm.codec.Codec` of the user; settings
        follow, as in ``"half.py:Half:scale=1024"``.
    error_feedback
        Whether the encoding error of a lossy payload is added to the gradient of the next step.
    deterministic
        Whether gradients are added in the order of the ranks, so that sums have the same bits under every transport
        and scheme.

    Raises
    ------
    UserError
        For unknown names, invalid counts, and settings that the scheme does not have.
    """

    __pydantic_config__ = STRICT

    name: Name = "bucketed"
    first_layers: Whole = 0
    chunk: Count = 1
    replicated_dense: Whole = 0
    payload: Text = "float32"
    error_feedback: bool = True
    deterministic: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "reduction")
        self._check_together()

    def _check_together(self) -> None:
        chunks = self.kind.chunks
        if chunks == "first" and not self.first_layers:
            raise UserError(
                "reduction.first_layers: expected the number of layers in the first chunk (>= 1) with two_chunks, got 0"
            )
        if chunks != "first" and self.first_layers:
            raise UserError(
                f'reduction.first_layers: expected name = "two_chunks" with it, got {self.name!r}; remove one of them'
            )
        if chunks != "weights" and self.chunk != 1:
            raise UserError(
                f'reduction.chunk: expected name = "host_accumulate" with it, got {self.name!r}; remove one of them'
            )
        if self.kind.searches and self.replicated_dense:
            raise UserError(
                'reduction.replicated_dense: expected none with name = "auto", which chooses it, got '
                f"{self.replicated_dense}; remove it, or choose a scheme"
            )
        settable = [name for name, kind in KINDS.items() if kind.settable]
        # A scheme that cannot set a key accepts its default (`plain`).
        for key, plain in (("payload", self.codec.identity), ("deterministic", not self.deterministic)):
            if not plain and not self.kind.settable:
                raise UserError(
                    f"reduction.{key}: expected one of the schemes {', '.join(settable)} with {getattr(self, key)!r}, "
                    f"got {self.name!r}; choose one of them, or leave {key} out"
                )

    @property
    def kind(self) -> Kind:
        """Properties of the scheme's name."""
        return KINDS[self.name]

    @cached_property
    def codec(self) -> Codec:
        """Codec of the messages with gradients."""
        return CODECS.make(self.payload)

    @property
    def sums(self) -> tuple[Method, ...]:
        """Reduction methods of one chunk in a step: for its gradients and, with shards, for its parameters."""
        gathers = (METHODS["all_gather"],) if self.kind.shards else ()
        return self.sum, *gathers

    @property
    def sum(self) -> Method:
        """Reduction method for the gradients of a chunk."""
        return carrying("ordered" if self.deterministic else self.kind.method, self.codec)

    @property
    def keeps_errors(self) -> bool:
        """Whether encoding errors are kept for the next step."""
        return self.codec.lossy and self.error_feedback

    @property
    def has_buckets(self) -> bool:
        """Whether `Strategy.bucket_bytes` is used."""
        return self.kind.chunks == "bytes"

    @classmethod
    def of(cls, data: Scheme | Mapping[str, Any]) -> Scheme:
        """Create a scheme from JSON or TOML data.

        Raises
        ------
        UserError
            One line, for unknown keys and for invalid values.
        """
        if isinstance(data, Scheme):
            return data
        return build(cls, data, at="reduction")

    def __str__(self) -> str:
        """Return a short text for headlines and logs: ``two_chunks(9) + replicated_dense(2), bfloat16``."""
        count = {"first": self.first_layers, "weights": self.chunk}.get(self.kind.chunks)
        text = self.name if count is None else f"{self.name}({count})"
        if self.replicated_dense:
            text += f" + replicated_dense({self.replicated_dense})"
        if not self.codec.identity:
            # `>`: lossy, and no error feedback.
            text += f", {self.payload}" + (" without error feedback" if self.codec.lossy > self.error_feedback else "")
        return text + (", deterministic" if self.deterministic else "")
