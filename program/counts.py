"""The reader that counts: messages and bytes that every rank sends in one training step, by kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from .operations import Operation, Run, Sum, Total, Transfer
from .program import Program
from .traffic import ExchangeTraffic, GroupSum, Move

__all__ = ["Ledger", "Sender", "messages_of", "sums_of"]


class Sender(Protocol):
    """Messages under one kind."""

    @property
    def kind(self) -> str: ...
    def sent(self, ranks: int) -> ExchangeTraffic: ...


class Ledger:
    """Adds up what ranks send, by kind."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._kinds: dict[str, ExchangeTraffic] = {}

    def book(self, items: Iterable[Sender]) -> None:
        for item in items:
            sent = item.sent(self.ranks)
            if item.kind not in self._kinds:
                zero = np.zeros(self.ranks, np.int64)
                self._kinds[item.kind] = ExchangeTraffic(zero, zero.copy())
            total = self._kinds[item.kind]
            total.messages[:] += sent.messages
            total.bytes[:] += sent.bytes

    @property
    def kinds(self) -> dict[str, ExchangeTraffic]:
        """Those under which anything is sent."""
        return {kind: total for kind, total in self._kinds.items() if total.messages.any()}


def messages_of(program: Program) -> Iterator[Sender]:
    """What the operations of a training step send, on all ranks.

    As `comm.counters` books it: an exchange is one message per peer, a reduction one message of its buffer, an
    all-gather one of the rank's part. Not known beforehand is what is guarded: the second sum of statistics whose
    variance would cancel. Sums of gradients are no part of a program.
    """
    for operation in program:
        yield from _sent(operation)
    yield from map(_summed, dict.fromkeys(_within_kernels(program)))


def sums_of(program: Program) -> list[Sum]:
    """All sums of a program, each once."""
    alone = (operation.sum for operation in program if isinstance(operation, Total))
    return list(dict.fromkeys((*alone, *_within_kernels(program))))


def _within_kernels(program: Program) -> Iterator[Sum]:
    """What kernels sum by themselves."""
    for operation in program:
        if isinstance(operation, Run):
            yield from (total for total in operation.kernel.sums.values() if total is not None)


def _sent(operation: Operation) -> Iterator[Sender]:
    if operation.when == "evaluation":
        return
    if isinstance(operation, Transfer) and operation.end == "start":
        made = operation.exchange
        yield Move(made.sources, made.targets, made.itemsize, made.kind)
    elif isinstance(operation, Total) and operation.end == "start":
        yield _summed(operation.sum)


def _summed(total: Sum) -> GroupSum:
    return GroupSum.of(total.kind, total.groups, total.sizes)
