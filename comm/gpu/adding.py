"""Sums of a few arrays of a device in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from halograd.device import Device

__all__ = ["add_up", "both"]


def add_up(device: Device, summands: Sequence[Any], total: Any) -> Callable[[], None]:
    """What enqueues, on the current stream, ``total = summands[0] + summands[1] + ...`` in this order. Local.

    `total` may be one of the summands; if it is not the first, the first is overwritten.
    """
    first, *others = summands
    at = next((i for i, summand in enumerate(summands) if summand is total), None)
    if at == 0:
        return device.sums([(total, other) for other in others])
    if at is None:
        copy, sums = device.copies([(total, first)]), device.sums([(total, other) for other in others])
        return both(copy, sums)
    return both(device.sums([(first, other) for other in others]), device.copies([(total, first)]))


def both(one: Callable[[], None], two: Callable[[], None]) -> Callable[[], None]:
    """One, then the other."""

    def run() -> None:
        one()
        two()

    return run
