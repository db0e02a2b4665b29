"""Machines of the papers on gradient reduction, represented by a few ranks on one machine.

A network is narrowed to a fraction `w` of its width, so its weights shrink by ``w**2``. The few ranks train ``w * N``
samples where the paper's nodes train `N`, so that the rows of replicated dense layers shrink by the same factor. The
emulated network is so slow that all gradients of the narrow network take as long as those of the whole network on the
paper's machine. Layers take the time of the whole network's layers on the paper's machine, for one node's share of the
batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from halograd.layers import Network, Strategy
from halograd.models import build
from halograd.perfmodel.cost.network_model import NetworkModel
from halograd.perfmodel.cost.pricing import Pricing
from halograd.perfmodel.cost.simulate import Simulation, Training
from halograd.perfmodel.kernel_times import KernelTimes, LayerTime, LayerWork, RooflineTimes
from halograd.perfmodel.machine import Machine, Overheads

__all__ = ["PAPERS", "Part", "Setting"]

#: Fraction of the width of the networks.
NARROW = 1 / 16


@dataclass(frozen=True)
class Setting:
    """Network and machine of a paper's training.

    Attributes
    ----------
    paper
        First author of the paper.
    network
        Name of the model.
    machine
        Name of a machine file, for layers and links.
    nodes
        Devices that share the batch.
    batch
        Global number of samples.
    alone
        Time of one device for its share of the batch, if the paper gives it [s]; all layers are scaled to it.
    beta
        Time per byte to sum gradients over all devices, if the paper gives it [s/B].
    synchronize
        Time that the start of a sum waits for the device [s].
    slots
        Number of arrays of the parameters' size in the optimizer: 1 with momentum, else 0.
    slow
        Factor by which everything is slowed down, so that the host's own work takes as small a share as on a machine
        with a core for each rank.
    """

    paper: str
    network: str
    machine: str
    nodes: int
    batch: int
    alone: float | None = None
    beta: float | None = None
    synchronize: float = 0.0
    slots: int = 1
    slow: float = 1.0


# Le et al.: one POWER8 node with four P100. Their Table 2 gives what one GPU takes, and what four take with plain data
# parallelism: 45.5, 23.4 and 100 ms more for AlexNet, GoogLeNet and VGG-16, which is 0.18 ns per byte of gradients and
# 0.3 ms per layer with weights; 64 layers with 7 million parameters cost 15.8 ms by their own method, 0.25 ms each, so
# about as much. Of ResNet-152 they show 3.5 s for ten steps of one GPU (Figure 5).
_LE: dict[str, Any] = {"machine": "p100-cluster", "nodes": 4, "beta": 0.18e-9, "synchronize": 3e-4, "slow": 1.0}
PAPERS: dict[str, Setting] = {
    "vgg_a": Setting("Lee", "vgg_a", "cori-haswell", nodes=128, batch=256, slots=0, slow=3.0),
    "alexnet": Setting("Le", "alexnet", batch=4 * 256, alone=0.1572, **_LE),
    "googlenet": Setting("Le", "googlenet", batch=4 * 64, alone=0.1400, **_LE),
    "vgg16": Setting("Le", "vgg16", batch=4 * 32, alone=0.3456, **_LE),
    "resnet152": Setting("Le", "resnet152", batch=4 * 12, alone=0.35, **_LE),
}


class _Scaled(KernelTimes):
    """Kernel times of a setting for its narrow network: those of the whole network, by the name of the layer."""

    def __init__(self, times: Mapping[str, LayerTime], whole: Mapping[str, float], rows: int) -> None:
        super().__init__()
        self._times, self._whole, self._rows = times, whole, rows

    def of_work(self, work: LayerWork) -> LayerTime:
        """Return the time of a layer. More rows than those of one rank mean the gradient from the rows of all ranks."""
        name = work.layer.name or ""
        if name in self._whole and work.samples > self._rows:
            return LayerTime(0.0, 0.0, self._whole[name])
        return self._times.get(name, LayerTime(0.0))


@dataclass(frozen=True)
class Part:
    """Ranks that represent the nodes of a setting. Pure arithmetic, the same on all ranks."""

    setting: Setting
    ranks: int

    @cached_property
    def network(self) -> Network:
        """The narrow network."""
        name = self.setting.network
        width: dict[str, Any] = {"width": NARROW, "classes": round(1000 * NARROW)}
        if name == "resnet152":
            width |= {"width": round(64 * NARROW), "statistics": "local"}
        return build(name, **width)

    @cached_property
    def batch(self) -> int:
        """Global batch size of the narrow network, a multiple of the number of ranks."""
        return max(1, round(self.setting.batch * NARROW / self.ranks)) * self.ranks

    @cached_property
    def paper(self) -> Simulation:
        """Simulation of the whole network on the paper's machine, at the speed of the cost model."""
        s = self.setting
        machine = Machine.load(s.machine)
        options = {"statistics": "local"} if s.network == "resnet152" else {}
        pricing = Pricing(NetworkModel(machine), RooflineTimes(machine))
        strategy = Strategy({"sample": s.nodes})
        return Simulation(build(s.network, **options), strategy, s.batch, pricing, Training(slots=s.slots), s.nodes)

    @cached_property
    def scale(self) -> float:
        """Ratio of the emulated device's time of a layer to that of the cost model."""
        s = self.setting
        if s.alone is None:
            return s.slow
        own = sum(cost.forward_seconds + cost.backward_seconds for cost in self.paper.costs.values())
        return s.slow * s.alone / own

    @cached_property
    def alone(self) -> float:
        """Time of a step of the whole batch on one device, at the paper's speed, by the cost model [s]."""
        s, paper = self.setting, self.paper
        simulation = Simulation(paper.network, Strategy(), s.batch, paper.pricing, paper.training, 1)
        return simulation.step_seconds * self.scale / s.slow

    @cached_property
    def pace(self) -> dict[str, LayerTime]:
        """Time of each layer on the emulated device [s]."""
        costs, times = self.paper.costs, {}
        for name in self.paper.steps:
            forward, data, filters = (costs[name].terms.get(phase, 0.0) for phase in LayerTime._fields)
            if f"{name} (sum)" in costs:
                data += costs[f"{name} (sum)"].seconds
            times[name] = LayerTime(self.scale * forward, self.scale * data, self.scale * filters)
        return times

    @cached_property
    def whole(self) -> dict[str, float]:
        """Time of each dense layer's gradient of the whole batch on the emulated device [s]."""
        times, seconds = self.paper.pricing.times, {}
        for step in self.paper.steps.values():
            if step.layer.kind == "Dense":
                rows = [(self.setting.batch, *step.inputs[0].layout.shape[1:])]
                seconds[step.name] = self.scale * times.time(step.layer, rows).backward_filter
        return seconds

    @cached_property
    def links(self) -> tuple[float, float]:
        """Latency [s] and inverse bandwidth [s/B] of the emulated network, with which sums take the paper's time."""
        s, ratio, ranks = self.setting, self.shrunk, self.ranks
        network_model, members = self.paper.pricing.network_model, range(s.nodes)
        small, large = 1 << 20, 1 << 29
        beta = (network_model.sum(large, members) - network_model.sum(small, members)) / (large - small)
        alpha = max(0.0, network_model.sum(small, members) - beta * small)
        beta = beta if s.beta is None else s.beta
        return s.slow * alpha / (2 * (ranks - 1)), s.slow * beta / ratio / (2 * (ranks - 1) / ranks)

    @cached_property
    def shrunk(self) -> float:
        """Ratio of the narrow network's bytes of gradients to those of the whole network."""
        return self._gradient_bytes(self.network) / self._gradient_bytes(self.paper.network)

    @staticmethod
    def _gradient_bytes(network: Network) -> int:
        return sum(-(-spec.size * 4 // 64) * 64 for spec in network.parameters().values())

    @cached_property
    def update(self) -> float:
        """Time of the optimizer per byte of the narrow network's parameters [s/B]."""
        whole = self.paper.pricing.network_model.update(1 << 29, self.setting.slots) / (1 << 29)
        return self.setting.slow * whole / self.shrunk

    def transport(self, node: int = 1) -> str:
        """Return the name of the transport that emulates the network."""
        alpha, beta = self.links
        return f"emulated:alpha={alpha:.9g},beta={beta:.9g}" + (f",node={node}" if node > 1 else "")

    def simulation(self, node: int = 1) -> Simulation:
        """Return the simulation of this run (narrow network, these ranks, emulated network); cached."""
        if node not in self._simulations:
            self._simulations[node] = self._simulation(node)
        return self._simulations[node]

    @cached_property
    def _simulations(self) -> dict[int, Simulation]:
        return {}

    def _simulation(self, node: int) -> Simulation:
        base = Machine.load(self.setting.machine)
        alpha, beta = self.links
        arrays = 3 + 2 * self.setting.slots
        runtime = Overheads(update=self.update * 5 / arrays, synchronize=self.setting.slow * self.setting.synchronize)
        machine = replace(base, launch=0.0, runtime=runtime, memory_bandwidth=1e10, devices_per_node=1)
        machine = machine.emulated(alpha, beta, node=node)
        times = _Scaled(self.pace, self.whole, self.batch // self.ranks)
        strategy = Strategy({"sample": self.ranks}, bucket_bytes=self.bucket_bytes)
        pricing = Pricing(NetworkModel(machine), times)
        return Simulation(self.network, strategy, self.batch, pricing, Training(slots=self.setting.slots), self.ranks)

    @property
    def bucket_bytes(self) -> int:
        """Bucket size of the narrow network that corresponds to 16 MiB of the whole one [B]."""
        return max(1, round((16 << 20) * self.shrunk))
