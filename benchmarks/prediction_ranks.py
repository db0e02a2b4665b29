"""Program of each rank of :mod:`benchmarks.prediction`: measured and predicted steps under cuts. Collective."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parent.parent))

import numpy as np
from mpi4py import MPI

from benchmarks.machine import Load
from benchmarks.prediction_cases import CASES, Case, strategies
from halograd.auto import measure_steps
from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers import Strategy
from halograd.measuring import measure_overheads
from halograd.perfmodel.cost import NetworkModel, Pricing, Training, simulate
from halograd.perfmodel.kernel_times import LayerTime, LayerWork, MeasuredTimes
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.profile.cache import Conditions, Oversubscription, TimeCache
from halograd.perfmodel.profile.device import measure_machine
from halograd.perfmodel.profile.layers import LayerTimer, passing_bytes
from halograd.training.executor import Executor
from halograd.training.optimizers import SGD
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer

__all__ = ["Run", "run"]

ROUNDS = 2


class Run:
    """Trainer of one network under one strategy on one transport. Collective."""

    def __init__(self, case: Case, comm: Communicator, backend: Any, strategy: Strategy) -> None:
        network = case.make()
        self.comm = comm
        self.executor = Executor(network, comm, backend, case.batch, strategy, "float32", seed=0)
        self.trainer = Trainer(self.executor, SGD(self.executor.store, momentum=0.9), Constant(1e-7))
        draw = np.random.default_rng(comm.rank)
        for name, node in network.inputs.items():
            region = self.executor.input(name)
            if node.dtype == "compute":
                region.array[...] = draw.random(region.array.shape, np.float32)
        self.seconds: list[float] = []

    def steps(self, count: int) -> None:
        """Run steps and record their times, from the begin of one to the begin of the next [s]."""
        self.trainer.step()
        for _ in range(count):
            begin = time.perf_counter()
            self.trainer.step()
            self.seconds.append(time.perf_counter() - begin)

    def close(self) -> None:
        self.trainer.synchronize()
        self.executor.close()


class Predictor:
    """Predictor of steps on this machine with one transport. Collective.

    Layers are measured on request. Layers, messages and overheads are measured again between rounds of steps: on a
    virtual machine, the time of a sum in shared memory may change by a factor of two within a minute.
    """

    def __init__(self, world: Communicator, backend: Any) -> None:
        self.world, self.backend, self.cache = world, backend, TimeCache(None)
        self._machines = [self._measure_machine()]
        self._works: dict[tuple[Conditions, str], tuple[LayerTimer, LayerWork, list[LayerTime]]] = {}

    @property
    def machine(self) -> Machine:
        """Last measurement of the machine."""
        return self._machines[-1]

    def _measure_machine(self) -> Machine:
        profile = measure_machine(self.world, self.backend)
        overheads = measure_overheads(self.world, self.backend, profile.machine)
        return profile.with_overheads(*overheads).machine

    def times(self, case: Case) -> MeasuredTimes:
        """Return times of the layers of a network, measured with the cache state of its steps."""
        oversubscription = Oversubscription.of(self.world, self.backend)
        flush = passing_bytes(case.make(), case.batch, self.world.size)
        conditions = Conditions.here(self.backend, oversubscription, flush=flush)
        timer = LayerTimer(self.backend, self.world, conditions.flush, repeats=6)
        return MeasuredTimes(self.cache, conditions, measure=lambda work: self._measure(timer, conditions, work))

    def _measure(self, timer: LayerTimer, conditions: Conditions, work: LayerWork) -> LayerTime:
        layer_time = timer.measure(work)
        self._works[conditions, work.key] = (timer, work, [layer_time])
        return layer_time

    def sweep(self) -> None:
        """Measure all layers once more, and store the means; measure messages and overheads once more."""
        for key in self._works:
            self._again(key)
        self._machines.append(self._measure_machine())

    def again(self, keys: Iterable[str]) -> None:
        """Measure the layers with these keys once more."""
        texts = set(keys)
        for key in self._works:
            if key[1] in texts:
                self._again(key)

    def _again(self, key: tuple[Conditions, str]) -> None:
        timer, work, samples = self._works[key]
        samples.append(timer.measure(work))
        self.cache.put(*key, tuple(fmean(values) for values in zip(*samples)))

    def close_sweeps(self) -> None:
        """Forget the layers, and all but the last measurement of the machine, before the next network."""
        self._works.clear()
        del self._machines[:-1]

    def seconds(self, case: Case, strategy: Strategy, times: MeasuredTimes) -> dict[str, float]:
        """Return the step time and its parts, the means over all measurements of the machine [s]."""
        terms = ("forward", "backward", "halo_exposed", "channel", "statistics", "redistribution", "packing")
        simulated = []
        for machine in self._machines:
            pricing = Pricing(NetworkModel(machine), times)
            simulation = simulate(case.make(), strategy, case.batch, pricing, Training(slots=1))
            parts = {term: simulation.total(term) for term in terms}
            parts |= {
                "step": simulation.step_seconds,
                "allreduce_exposed": simulation.allreduce_exposed,
                "update": simulation.update_seconds,
            }
            simulated.append(parts)
        return {part: fmean(parts[part] for parts in simulated) for part in simulated[0]}


class Disturbance:
    """Meter of the CPU time of processes that are not ranks, on one node. Collective."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self._load = comm, Load()
        self._own, self._begin = time.process_time(), time.perf_counter()

    def cores(self) -> float:
        """Return how many cores other processes have used since the creation of this object, on average."""
        busy, _ = self._load.since()
        own = float(self.comm.allreduce_scalar(time.process_time() - self._own, "sum"))
        return max(0.0, busy - own) / (time.perf_counter() - self._begin)


def run(spec: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each network of `spec` on each of its transports, under all strategies of its kind. Collective.

    No network is begun when `spec["until"]` is past [s since the epoch].
    """
    backend = get_backend("onednn", threads=spec["threads"])
    for transport, names in spec["networks"].items():
        comm = Communicator(MPI.COMM_WORLD, transport)
        predictor = None
        for name in names:
            if comm.allreduce_scalar(time.time(), "max") > spec["until"]:
                break
            predictor = predictor or Predictor(comm, backend)
            case, rows, disturbance = CASES[name], [], Disturbance(comm)
            times = predictor.times(case)
            tried = partial(try_steps, case, comm, backend)
            chosen = strategies(case, comm.size, spec["kind"], predictor.machine, times, predictor.again, tried)
            for strategy in chosen.values():
                predictor.seconds(case, strategy, times)
            measured = measure(case, comm, backend, chosen, spec["seconds"], predictor.sweep)
            times.forget()
            others = disturbance.cores()
            for label, strategy in chosen.items():
                predicted = predictor.seconds(case, strategy, times)
                row = {"network": name, "ranks": comm.size, "transport": transport, "strategy": label, "others": others}
                rows.append(row | {"measured": measured[label], "predicted": predicted["step"], "parts": predicted})
                if comm.rank == 0:
                    print(_line(rows[-1]), file=sys.stderr, flush=True)
            predictor.close_sweeps()
            yield rows
        comm.close()
    backend.close()


def try_steps(case: Case, comm: Communicator, backend: Any, candidates: dict[str, Strategy]) -> dict[str, float]:
    """Return step times, measured like the trial steps of `halograd train` [s]. Collective."""
    seconds = measure_steps(comm, candidates, partial(stepping, case, comm, backend))
    if comm.rank == 0:
        times = ", ".join(f"{name} {1e3 * taken:.2f} ms" for name, taken in seconds.items())
        print(f"tried: {times}", file=sys.stderr, flush=True)
    return seconds


@contextmanager
def stepping(case: Case, comm: Communicator, backend: Any, strategy: Strategy) -> Iterator[Callable[[], object]]:
    """Yield a function that runs one step under a strategy. Collective."""
    run = Run(case, comm, backend, strategy)
    try:
        yield partial(run.steps, 0)
    finally:
        run.close()


def measure(
    case: Case,
    comm: Communicator,
    backend: Any,
    chosen: dict[str, Strategy],
    seconds: float,
    between: Callable[[], None],
) -> dict[str, float]:
    """Return the median step time of each strategy [s]; all run in turn for about `seconds` each.

    `between` runs between the rounds, so that its measurements are made at the same speed and with the same
    disturbances of the machine.
    """
    runs = {label: Run(case, comm, backend, strategy) for label, strategy in chosen.items()}
    for trained in runs.values():
        trained.steps(2)
    counts = {}
    for label, trained in runs.items():
        each = float(comm.allreduce_scalar(median(trained.seconds), "max"))
        counts[label] = max(2, min(40, int(seconds / ROUNDS / max(each, 1e-6))))
        trained.seconds.clear()
    for _ in range(ROUNDS):
        between()
        for label, trained in runs.items():
            comm.barrier()
            trained.steps(counts[label])
    medians = {label: float(comm.allreduce_scalar(median(trained.seconds), "max")) for label, trained in runs.items()}
    for trained in reversed(list(runs.values())):
        trained.close()
    return medians


def _line(row: dict[str, Any]) -> str:
    error = row["predicted"] / row["measured"] - 1
    return (
        f"{row['network']:>12} {row['ranks']} ranks {row['transport']:<34} {row['strategy']:<26} "
        f"measured {1e3 * row['measured']:9.2f} ms  predicted {1e3 * row['predicted']:9.2f} ms  {100 * error:+6.1f} %"
        f"  others {row['others']:.2f} cores"
    )


if __name__ == "__main__":
    for rows in run(json.loads(sys.argv[1])):
        if MPI.COMM_WORLD.rank == 0:
            print(json.dumps(rows), flush=True)
