"""Figures of the pages that the library computes: memory and predicted times of the models."""

from __future__ import annotations

from halograd import models
from halograd.layers import Strategy
from halograd.perfmodel.cost import NetworkModel, Pricing, simulate
from halograd.perfmodel.kernel_times import RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.program.compiler import compile_program
from halograd.program.keeping import keep_few
from halograd.program.program import Target

__all__ = ["memory_by_ranks", "recomputation"]

#: Networks with a resolution, as in the benchmark `recompute.py`.
NETWORKS = {"mesh_2k": 2048, "resnet50": 2048, "unet3d": 128}


def memory_by_ranks() -> str:
    """Return the predicted memory per rank of one sample that is cut along the height."""
    network, pricing = models.build("mesh_2k"), _pricing()
    rows = ["| ranks | memory per rank |", "|---|---|"]
    for ranks in (1, 2, 4, 8):
        prediction = simulate(network, Strategy({"height": ranks}), 1, pricing, ranks=ranks)
        rows.append(f"| {ranks} | {sum(prediction.memory.values()) / 2**30:.1f} GiB |")
    return "\n".join(rows)


def recomputation() -> str:
    """Return the memory of the arrays of one step under each rule of recomputation, and the predicted time."""
    rows = ['| network, one sample | kept | `"pointwise"` | `"block"` |', "|---|---|---|---|"]
    for name, resolution in NETWORKS.items():
        network = models.build(name, resolution=resolution)
        pointwise = Strategy({}, options={"recompute": "pointwise"})
        cells, kept = list[str](), 0.0
        for strategy in (Strategy({}), pointwise, keep_few(network, Strategy({}), Target(1))):
            size = compile_program(network, strategy, Target(1)).placement.size
            seconds = simulate(network, strategy, 1, _pricing(), ranks=1, account=False).step_seconds
            kept = kept or seconds
            more = f", time {100 * (seconds / kept - 1):+.0f} %" if cells else ""
            cells.append(f"{size / 2**20:,.0f} MiB{more}")
        shape = " x ".join([str(resolution)] * (len(network.inputs["x"].shape) - 1))
        rows.append(f"| `{name}`, {shape} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _pricing() -> Pricing:
    machine = Machine.load("lassen")
    return Pricing(NetworkModel(machine), RooflineTimes(machine))
