"""Random planning problems: networks of several families, slow and fast machines, with and without memory limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import halograd as hg
from halograd.perfmodel.machine import LEVELS, Efficiency, Link, Machine, Topology, Variation

FAMILIES = ("strip", "image", "volume", "branches", "dilated", "convnext", "unet", "scales")


@dataclass
class Drawing:
    """Random settings of a network, drawn in a fixed order, so that it can be built again with its axes reversed."""

    family: str
    seed: int
    turned: bool = False
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([14, self.seed])

    def whole(self, low: int, high: int) -> int:
        """Draw an integer in ``low .. high``."""
        return int(self.rng.integers(low, high + 1))

    def one_of(self, *some: Any) -> Any:
        """Draw one of the arguments."""
        return some[int(self.rng.integers(len(some)))]

    def along(self, *values: Any) -> Any:
        """Return one value per spatial axis, in the given order, or reversed if `turned`."""
        return values[::-1] if self.turned else values

    def extents(self) -> tuple[int, ...]:
        """Return the spatial extents of a sample."""
        if self.family == "strip":
            return self.along(2 ** self.whole(3, 5), 2 ** self.whole(8, 12))
        if self.family == "volume":
            return self.along(*(2 ** self.whole(3, 6) for _ in range(3)))
        return self.along(*(16 * self.whole(2, 16) for _ in range(2)))

    def network(self) -> hg.Network:
        """Build the network of these settings."""
        start = hg.Input((*self.extents(), self.whole(1, 8)))
        return hg.Network({"loss": self.end(getattr(self, self.family)(start))})

    def end(self, y: Any) -> Any:
        """Return one of two kinds of loss of a value."""
        if self.rng.random() < 0.5:
            return hg.MeanSquaredError()(y, hg.Input(y.shape, name="target"))
        classes = 2 ** self.whole(3, 10)
        y = hg.Flatten()(y) if np.prod(y.shape) <= 2**16 and self.rng.random() < 0.5 else hg.GlobalAveragePool()(y)
        return hg.SoftmaxCrossEntropy()(hg.Dense(classes)(y), hg.Input((1,), name="target"))

    def conv(self, y: Any, **options: Any) -> Any:
        """Return a convolution of a value that keeps its extents; the kernel is not always square."""
        kernel = self.along(*(self.one_of(1, 3, 3, 5) for _ in y.shape[:-1]))
        return hg.Conv(2 ** self.whole(2, 6), kernel, padding=tuple(k // 2 for k in kernel), **options)(y)

    def strip(self, y: Any) -> Any:
        """Return a chain of convolutions."""
        for _ in range(self.whole(2, 5)):
            y = self.conv(y, activation="relu")
        return y

    volume = strip

    def image(self, y: Any) -> Any:
        """Return a chain of convolutions, norms and poolings."""
        for _ in range(self.whole(2, 4)):
            y = hg.BatchNorm(activation="relu")(self.conv(y, bias=False))
            y = hg.MaxPool(2)(y) if min(y.shape[:-1]) >= 16 and self.rng.random() < 0.7 else y
        return y

    def branches(self, y: Any) -> Any:
        """Return two or three branches that are joined again, once or twice."""
        for _ in range(self.whole(1, 2)):
            ways = [self.conv(y, activation="relu") for _ in range(self.whole(2, 3))]
            joined = hg.Concat()(*ways)
            y = hg.Conv(joined.shape[-1], 1)(joined)
            y = hg.ReLU()(hg.Add()(y, joined))
        return y

    def dilated(self, y: Any) -> Any:
        """Return a chain of dilated convolutions with growing halos."""
        for i in range(self.whole(2, 4)):
            y = hg.Conv(2 ** self.whole(2, 5), 3, padding=2**i, dilation=2**i, activation="relu")(y)
        return y

    def convnext(self, y: Any) -> Any:
        """Return residual blocks of depthwise convolutions, layer norms and 1 x 1 convolutions."""
        y = hg.Conv(16, 4, stride=4)(y)
        for _ in range(self.whole(1, 2)):
            z = hg.LayerNorm()(hg.Conv(16, 7, padding=3, groups=16)(y))
            y = hg.Add()(y, hg.Conv(16, 1)(hg.Conv(64, 1, activation="relu")(z)))
        return y

    def unet(self, y: Any) -> Any:
        """Return a U-Net with one skip connection."""
        top = self.conv(y, activation="relu")
        down = self.conv(hg.MaxPool(2)(top), activation="relu")
        return self.conv(hg.Concat()(top, hg.Resize(2)(down)))

    def scales(self, y: Any) -> Any:
        """Return a shared convolution that is called at two scales, three times in all."""
        kernel, channels = self.along(3, self.one_of(1, 3)), 2 ** self.whole(3, 6)
        head = hg.Conv(channels, kernel, padding=tuple(k // 2 for k in kernel), activation="relu")
        y = self.conv(y)
        y = hg.Conv(channels, 1)(y)
        again = head(hg.MaxPool(2)(head(y)))
        return head(hg.Add()(y, hg.Resize(2)(again)))


@dataclass(frozen=True)
class PlanningProblem:
    """Settings of a problem: network, batch, ranks and machine."""

    family: str
    seed: int
    batch: int
    ranks: int
    machine: Machine

    def network(self, turned: bool = False) -> hg.Network:
        """Build the network; with `turned`, the order of its spatial axes is reversed."""
        return Drawing(self.family, self.seed, turned).network()


def random_problem(seed: int) -> PlanningProblem:
    """Return the problem with this number."""
    rng = np.random.default_rng([1415, seed])
    family = FAMILIES[seed % len(FAMILIES)]
    batch, ranks = int(rng.choice([1, 1, 2, 4, 8])), int(rng.choice([2, 3, 4, 4, 6, 8, 16]))
    return PlanningProblem(family, seed, batch, ranks, random_machine(rng, seed))


def random_machine(rng: np.random.Generator, seed: int) -> Machine:
    """Draw a machine: slow and fast links, flat and steep hierarchies."""
    peak = 10 ** rng.uniform(10.5, 14)
    bandwidth = peak / 10 ** rng.uniform(0.5, 2)
    steep = 10 ** rng.uniform(0, 1.5) if rng.random() < 0.6 else 1.0
    alpha, beta = 10 ** rng.uniform(-6.5, -3.5), 10 ** rng.uniform(-11.5, -8)
    links = {level: Link(alpha * steep**i, beta * steep**i) for i, level in enumerate(LEVELS)}
    per_node = int(rng.choice([1, 2, 4, 8])) if steep > 1 else 1
    efficiency = Efficiency(compute=0.6, half=peak * 10 ** rng.uniform(-6, -4), memory=0.8)
    launch = float(10 ** rng.uniform(-7, -5))
    return Machine(
        f"random-{seed}",
        "drawn",
        per_node,
        4,
        {"float32": float(peak)},
        float(bandwidth),
        1 << 40,
        launch,
        links,
        efficiency,
    )


def contended(machine: Machine, seed: int) -> Machine:
    """Return the machine with links that messages share, a tapered tree and devices of different speeds."""
    rng = np.random.default_rng(seed)
    outside = machine.links["switch"].bandwidth
    topology = Topology(int(rng.choice([0, 1, 2])), outside * rng.uniform(1, 4), outside * rng.uniform(0.25, 2))
    variation = Variation(rng.uniform(0, 0.05), rng.uniform(0, 0.2))
    return replace(machine, nodes_per_switch=2, topology=topology, variation=variation)


def faster(
    machine: Machine, factor: float = 2.0, what: Callable[[str], bool] = lambda level: level != "device"
) -> Machine:
    """Return the machine with links that are `factor` times as fast."""
    links = {
        level: Link(link.alpha / factor, link.beta / factor) if what(level) else link
        for level, link in machine.links.items()
    }
    topology = machine.topology
    if topology is not None:
        topology = replace(topology, network=topology.network * factor, uplink=topology.uplink * factor)
    return replace(machine, links=links, topology=topology)


def stronger(machine: Machine, factor: float = 2.0) -> Machine:
    """Return the machine with devices that compute and access memory `factor` times as fast."""
    peaks = {dtype: peak * factor for dtype, peak in machine.peak_flops.items()}
    return replace(
        machine, peak_flops=peaks, memory_bandwidth=machine.memory_bandwidth * factor, launch=machine.launch / factor
    )
