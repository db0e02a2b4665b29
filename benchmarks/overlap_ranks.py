"""Program of each rank of :mod:`benchmarks.overlap`: one cut, on networks of several speeds. Collective."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parent.parent))

import numpy as np
from mpi4py import MPI

from benchmarks.paced import PacedBackend
from halograd.comm import Communicator
from halograd.comm.channel import ChannelSpec
from halograd.comm.reduction import ReductionSpec
from halograd.comm.sums import Method
from halograd.comm.transport import Emulated
from halograd.kernels import get_backend
from halograd.layers import Conv, Input, MeanSquaredError, Network, Node
from halograd.layers.strategy import Strategy
from halograd.training.executor import Executor

__all__ = ["Case", "CostedCommunicator", "chain", "halos", "reductions"]

IDEAL = (0.0, 0.0)
ONE_BUCKET = 1 << 40


class CostedCommunicator(Communicator):
    """Communicator over an emulated network that sums up the times that exchanges take without overlap.

    Attributes
    ----------
    alpha, beta
        Latency [s] and inverse bandwidth [s/B] of the network.
    seconds
        Sum over the exchanges started so far of the time of the longest message that this rank receives,
        and over reductions of the time of the ring, by kind [s].
    largest
        Largest message [B].
    """

    def __init__(self, mpi_comm: MPI.Intracomm, alpha: float, beta: float) -> None:
        self.alpha, self.beta = alpha, beta
        self.seconds: dict[str, float] = {}
        self.largest = 0
        super().__init__(mpi_comm, f"emulated:alpha={alpha:.9g},beta={beta:.9g}")

    def channels(self, specs: Sequence[ChannelSpec]) -> list[Any]:
        channels = super().channels(specs)
        longest = [max(channel.recv_counts.values(), default=0) * channel.dtype.itemsize for channel in channels]
        self.largest = max(self.largest, *longest)
        seconds = [self.alpha + self.beta * nbytes if nbytes else 0.0 for nbytes in longest]
        return [self._priced(channel, spec.kind, s) for channel, spec, s in zip(channels, specs, seconds)]

    def reductions(self, specs: Sequence[ReductionSpec]) -> list[Any]:
        network = Emulated(self.alpha, self.beta)
        seconds = [network.collective(Method(), self.size, spec.buffer.nbytes) for spec in specs]
        return [self._priced(total, spec.kind, s) for total, spec, s in zip(super().reductions(specs), specs, seconds)]

    def _priced(self, operation: Any, kind: str, seconds: float) -> Any:
        start = operation.start

        def priced() -> None:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds
            start()

        operation.start = priced
        return operation


def chain(extent: int, channels: int, layers: int) -> Network:
    """Return a chain of 3 x 3 convolutions, which has many halos, and computation to hide each of them.

    The first layer has few channels and parameters: its gradients come last and are needed first, so their sum cannot
    overlap with computation.
    """
    y: Node = Input((extent, extent, 2), name="x")
    for i in range(layers):
        y = Conv(channels, 3, padding=1, activation="relu", name=f"conv{i}")(y)
    target = Input(y.shape, name="target")
    return Network({"prediction": y, "loss": MeanSquaredError(name="mse")(y, target)}, name="chain")


class Case:
    """Executor of a network under one cut, halo algorithm and network speed. Collective."""

    def __init__(self, spec: Mapping[str, Any], parts: Mapping[str, int], halo: str, speed: tuple, bucket: int) -> None:
        self.comm = CostedCommunicator(MPI.COMM_WORLD, *speed)
        backend: Any = get_backend(spec["backend"], threads=1)
        if spec["rate"]:
            backend = PacedBackend(backend, spec["rate"])
        network = chain(spec["extent"], spec["channels"], spec["layers"])
        strategy = Strategy(dict(parts), options={"halo": halo}, bucket_bytes=bucket)
        self.executor = Executor(network, self.comm, backend, spec["batch"], strategy)
        assert self.executor.reducer is not None
        self.reducer = self.executor.reducer
        draw = np.random.default_rng(0)
        for name, node in network.inputs.items():
            self.executor.set_input(name, draw.standard_normal((spec["batch"], *node.shape), np.float32))

    def phase(self, run: Callable[[], None]) -> tuple[float, dict[str, float]]:
        """Run a phase from a common start; return the slowest rank's wall time and its communication by kind."""
        self.comm.seconds = dict.fromkeys(("halo", "allreduce"), 0.0)
        self.comm.barrier()
        begin = time.perf_counter()
        run()
        seconds = time.perf_counter() - begin
        costs = {k: self.comm.allreduce_scalar(self.comm.seconds[k], "max") for k in ("halo", "allreduce")}
        return self.comm.allreduce_scalar(seconds, "max"), costs

    def forward_and_backward(self) -> dict[str, tuple[float, dict[str, float]]]:
        """Run one step in two phases; the wait for the remaining sums of gradients comes after both."""
        phases = {"forward": self.phase(self.executor.forward)}
        self.executor.loss_value()
        phases["backward"] = self.phase(self.executor.backward)
        self.reducer.finish()
        return phases

    def steps(self, count: int) -> dict[str, tuple[float, dict[str, float]]]:
        """Run `count` consecutive steps in the steady state: sums of one step end within the next."""

        def run() -> None:
            for _ in range(count):
                self.executor.forward()
                self.executor.loss_value()
                self.executor.backward()

        run()
        seconds, costs = self.phase(run)
        self.reducer.finish()
        return {"step": (seconds / count, {k: v / count for k, v in costs.items()})}

    def close(self) -> None:
        """Free all resources. Collective."""
        self.executor.close()
        self.comm.close()


def speeds(case: Case, compute: float, spec: Mapping[str, Any], kind: str) -> tuple[float, float]:
    """Return alpha [s] and beta [s/B] with which communication takes the requested share of `compute` [s]."""
    requested = spec["share"] * compute
    if kind == "halo":
        nbytes = case.comm.allreduce_scalar(case.comm.largest, "max")
        return 0.5 * requested, 0.5 * requested / nbytes
    nbytes = sum(b.grads.nbytes for b in case.executor.store.buckets)
    return 1e-5, requested / Emulated(0.0, 1.0).collective(Method(), case.comm.size, nbytes)


def alternate(cases: Mapping[str, Case], run: Callable[[Case], dict], repeats: int) -> dict[str, dict]:
    """Return medians over repeats, in each of which all cases run: seconds and costs by case and phase."""
    measurements: dict[str, list[dict]] = {name: [] for name in cases}
    for repeat in range(-1, repeats):
        for name, case in cases.items():
            result = run(case)
            if repeat >= 0:
                measurements[name].append(result)
    return {
        name: {
            phase: {"seconds": statistics.median(r[phase][0] for r in results)} | results[0][phase][1]
            for phase in results[0]
        }
        for name, results in measurements.items()
    }


def halos(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Measure forward and backward of a spatial cut; one message after both phases sums all gradients."""
    parts = spec["parts"]
    ideal = {h: Case(spec, parts, h, IDEAL, ONE_BUCKET) for h in ("pad", "overlap")}
    first = alternate(ideal, Case.forward_and_backward, 2)
    per_layer = first["pad"]["forward"]["seconds"] / spec["layers"]
    speed = speeds(ideal["pad"], per_layer, spec, "halo")
    slow = {h: Case(spec, parts, h, speed, ONE_BUCKET) for h in ("pad", "overlap")}
    cases = {f"{h} ideal": c for h, c in ideal.items()} | {f"{h} slow": c for h, c in slow.items()}
    return {"speed": speed, "found": finish(cases, Case.forward_and_backward, spec["repeats"])}


def reductions(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Measure whole steps with cut samples: no halos, gradients summed layer by layer."""
    bucket = 9 * spec["channels"] ** 2 * 4
    ideal = Case(spec, spec["parts"], "pad", IDEAL, bucket)
    first = alternate({"ideal": ideal}, Case.forward_and_backward, 2)
    speed = speeds(ideal, first["ideal"]["backward"]["seconds"], spec, "allreduce")
    cases = {"overlap ideal": ideal, "overlap slow": Case(spec, spec["parts"], "pad", speed, bucket)}
    return {"speed": speed, "found": finish(cases, lambda case: case.steps(3), spec["repeats"])}


def finish(cases: Mapping[str, Case], run: Callable[[Case], dict], repeats: int) -> dict[str, dict]:
    """Measure the cases, then close them."""
    medians = alternate(cases, run, repeats)
    for case in cases.values():
        case.close()
    return medians


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    result = halos(request) if request["what"] == "halo" else reductions(request)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(result))
