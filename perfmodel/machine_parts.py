"""Parts of a machine: links, efficiencies, and overheads of the library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

__all__ = ["FOLDER", "LEVELS", "MACHINES", "Efficiency", "GroupStage", "Link", "Overheads"]

FOLDER = Path(__file__).parent / "machines"
#: Names of the shipped machines.
MACHINES = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))

#: Link levels, nearest first: the same device, the same node, the same switch, anywhere.
LEVELS = ("device", "node", "switch", "across")


@dataclass(frozen=True)
class Link:
    """Link on which one message of n bytes takes ``alpha + beta * n`` [s] (Hockney's model).

    Parameters
    ----------
    alpha
        Start-up time of one message [s].
    beta
        Time per byte [s/B].
    note
        Text on the link: the transport, the kind of cable, the error of a fit.
    shared
        Whether the link is memory that ranks share: there is no time to compute while a message travels.
    emulated
        Whether the link is the emulated network: messages travel independently of each other.
    """

    alpha: float
    beta: float
    note: str = field(default="", compare=False)
    shared: bool = field(default=False, compare=False)
    emulated: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if not (self.alpha >= 0 and self.beta >= 0):
            raise ValueError(f"link: expected alpha >= 0 s and beta >= 0 s/B, got {self.alpha} and {self.beta}")

    @property
    def bandwidth(self) -> float:
        """Bandwidth of long messages [B/s]; infinite if a byte costs nothing."""
        return 1 / self.beta if self.beta else float("inf")

    def seconds(self, nbytes: float) -> float:
        """Return the time of one message of `nbytes` [B], in [s]."""
        return self.alpha + self.beta * nbytes


class GroupStage(NamedTuple):
    """One level of a group of ranks: `size` members joined by `link`, which belongs to `level`.

    `sharing` is the number of members that share one link when all of them send to the next level.
    """

    level: str
    size: int
    link: Link
    sharing: int = 1


@dataclass(frozen=True)
class Efficiency:
    """Fractions of its peak rates that a device reaches.

    A kernel of f flops runs at ``peak * compute * max(1 / (1 + (half / f) ** exponent), least)`` [flop/s]. With an
    exponent of 1 this is Hockney's half-performance curve ``f / (f + half)``. A smaller exponent lets the rate decrease
    more slowly over more decades, as observed when tiles, waves and algorithms change with the size. Because of the
    lower limit, the few operations of an elementwise kernel do not have the rate of a nearly empty device.

    Parameters
    ----------
    compute
        Fraction of the peak that the largest kernels reach, in (0, 1].
    half
        Operations at which a kernel reaches half of `compute` [flop].
    exponent
        Steepness, in (0, 1]; with at most 1, a larger kernel never takes less time.
    least
        Lower limit of the curve, as a fraction of `compute`, in [0, 1].
    memory
        Fraction of the memory bandwidth that streaming kernels reach, in (0, 1].
    """

    compute: float = 1.0
    half: float = 0.0
    exponent: float = 1.0
    least: float = 0.0
    memory: float = 1.0

    def curve(self, flops: float) -> float:
        """Return the fraction of the peak that a kernel of `flops` > 0 [flop] reaches."""
        return self.compute * max(1 / (1 + (self.half / flops) ** self.exponent), self.least)


@dataclass(frozen=True)
class Overheads:
    """Overheads of the library itself, measured on a machine; by default they are unknown.

    Parameters
    ----------
    update
        Time of the optimizer, SGD with momentum, per byte of parameters [s/B]; 0: computed from the memory bandwidth.
    layer, step
        Time that the executor adds to each forward or backward of a layer, and to a step [s].
    packed
        Whether the times of the links include packing and unpacking.
    sums
        Number of ranks of a node -> time of their all-reduce; unmeasured ones use the formulas of the collectives.
    work
        Number of ranks -> the part of this time that computation cannot hide: additions made while waiting for the sum.
    synchronize
        Time that the start of a gradient sum waits for the device in the middle of backward [s]: ``t_as`` of Le et al.
        2018, Section 3.2.
    """

    update: float = 0.0
    layer: float = 0.0
    step: float = 0.0
    packed: bool = False
    sums: Mapping[int, Link] = field(default_factory=dict)
    work: Mapping[int, Link] = field(default_factory=dict)
    synchronize: float = 0.0
