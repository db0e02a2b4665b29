"""Program of each rank of :mod:`benchmarks.gradient_reduction`: one network under many schemes, in turn. Collective."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from mpi4py import MPI

from benchmarks.paced_executor import Clock, PacedCommunicator, PacedExecutor
from benchmarks.paper_machines import PAPERS, Part
from halograd.kernels import get_backend
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy
from halograd.perfmodel.cost import count_step
from halograd.training.auto_reduction import ChunkSearch
from halograd.training.store import Bucket
from halograd.training.timeline import Timeline, overlap_ratio

__all__ = ["EmulatedMachine", "PlanCandidate", "main"]

#: Kinds of communication with gradients, or with data that replace them.
KINDS = ("allreduce", "reduce_scatter", "all_gather", "replicated_dense")
#: Further counters.
COUNTED = (*KINDS, "node", "loss")


class EmulatedMachine:
    """Executor on an emulated network, under one scheme at a time. Collective.

    Parameters
    ----------
    part
        Ranks that represent a machine.
    scheme
        First scheme; later schemes must have the same payload and the same replicated layers.
    node
        Ranks per node of the emulated network.
    """

    def __init__(self, part: Part, scheme: Scheme, node: int = 1) -> None:
        self.part, self.scheme, self.node = part, scheme, node
        self.clock = Clock()
        self.comm = PacedCommunicator(MPI.COMM_WORLD, part.transport(node), self.clock)
        self.timeline = self.comm.instruments.recorder = Timeline(self.comm.rank)
        strategy = Strategy({"sample": part.ranks}, bucket_bytes=part.bucket_bytes, reduction=scheme)
        backend: Any = get_backend("numpy", threads=1)
        arguments = part.network, self.comm, backend, part.batch, strategy
        self.executor = PacedExecutor(part.pace, part.whole, self.clock, *arguments)
        self._bind()

    def use(self, scheme: Scheme) -> None:
        """Continue to train under another scheme. Collective."""
        if scheme != self.scheme:
            self.executor.reduce_by(scheme)
            self.scheme = scheme
            self._bind()

    def _bind(self) -> None:
        assert self.executor.reducer is not None
        self.reducer = self.executor.reducer
        self.reducer.update = self._update
        # Sums that start when the device is idle need not wait for it.
        pause = self.part.setting.slow * self.part.setting.synchronize
        self.comm.synchronize = 0.0 if self.scheme.kind.waits else pause

    def _update(self, bucket: Bucket) -> None:
        own = self.executor.store.owned(bucket)
        self.clock.compute((own.stop - own.start) * bucket.params.itemsize * self.part.update)

    def step(self) -> None:
        """Run one training step; its sums may continue afterwards."""
        self.executor.forward()
        self.executor.backward()

    def run(self, count: int) -> list[float]:
        """Run consecutive steps in the steady state; return the times of all but the first on the slowest rank [s]."""
        self.comm.barrier()
        self.clock.reset()
        taken = []
        for i in range(count):
            if i == 1:
                self.timeline.clear()
                self.comm.exposed = 0.0
            before = self.clock.done
            self.step()
            taken.append(self.clock.done - before)
        everywhere = self.comm.allgather_objects(taken[1:])
        return [max(column) for column in zip(*everywhere)]

    def close(self) -> None:
        """Free all resources. Collective."""
        self.executor.close()
        self.comm.close()


class PlanCandidate:
    """Scheme with its measurements. Collective."""

    def __init__(self, machine: EmulatedMachine, scheme: Scheme) -> None:
        self.machine, self.scheme = machine, scheme
        self.steps: list[float] = []
        self.communication = self.blocked = self.exposed = 0.0

    def run(self, count: int) -> None:
        """Run some steps, of which the first does not count."""
        machine = self.machine
        machine.use(self.scheme)
        self.steps += machine.run(count)
        self.communication += sum(machine.timeline.seconds("communication", kind) for kind in KINDS)
        self.blocked += sum(machine.timeline.seconds("wait", kind) for kind in KINDS)
        self.exposed += machine.comm.exposed

    def count(self) -> dict[str, list[int]]:
        """Count messages and bytes of one more step, by kind [B]."""
        machine = self.machine
        machine.use(self.scheme)
        machine.reducer.finish()
        machine.comm.counters.reset()
        machine.step()
        machine.reducer.finish()
        traffic = machine.comm.counters.snapshot()
        return {k: [v.messages, v.bytes] for k, v in traffic.items() if k in COUNTED}

    def counts_as_predicted(self, counted: dict[str, list[int]]) -> bool:
        """Return whether the cost model predicts the counted messages and bytes of every rank. Collective."""
        part, comm = self.machine.part, self.machine.comm
        strategy = Strategy({"sample": part.ranks}, bucket_bytes=part.bucket_bytes, reduction=self.scheme)
        predicted = count_step(part.network, strategy, part.batch, comm.size, per_node=self.machine.node)
        numbers = {k: [int(t.messages[comm.rank]), int(t.bytes[comm.rank])] for k, t in predicted.items()}
        own = {k: pair for k, pair in numbers.items() if pair[0] and k in COUNTED}
        return all(comm.allgather_objects(own == counted))

    def record(self) -> dict[str, Any]:
        """Return measurements and predictions on rank 0; times in [s], bytes in [B]. Collective."""
        part, node = self.machine.part, self.machine.node
        counted = self.count()
        as_predicted = self.counts_as_predicted(counted)
        if self.machine.comm.rank:
            return {}
        model = part.simulation(node).with_reduction(self.scheme).prediction(account=False)
        return {
            "scheme": str(self.scheme),
            "settings": asdict(self.scheme),
            "node": node,
            "step": statistics.median(self.steps),
            "spread": [min(self.steps), max(self.steps)],
            "steps": len(self.steps),
            "predicted": model.step_seconds,
            "predicted_exposed": model.allreduce_exposed,
            "exposed": self.exposed / len(self.steps),
            "communication": self.communication / len(self.steps),
            "overlap": overlap_ratio(self.communication, self.blocked),
            "traffic": counted,
            "as_predicted": as_predicted,
            "bytes": self._bytes(),
        }

    def _bytes(self) -> int:
        """Return the bytes that the most loaded rank of the paper's machine sends per step of the whole network [B]."""
        paper = self.machine.part.paper
        strategy = Strategy({"sample": paper.ranks}, bucket_bytes=16 << 20, reduction=self.scheme)
        traffic = count_step(paper.network, strategy, paper.batch, per_node=self.machine.node)
        sent: Any = sum(t.bytes for kind, t in traffic.items() if kind in COUNTED)
        return int(sent.max())


def candidates_of(part: Part, schemes: Sequence[dict[str, Any]]) -> list[PlanCandidate]:
    """Return one :class:`PlanCandidate` per scheme; compatible schemes share an executor. Collective."""
    machines: dict[tuple, EmulatedMachine] = {}
    candidates = []
    for entry in schemes:
        scheme, node = Scheme.of(entry["scheme"]), entry["node"]
        key = node, scheme.payload, scheme.replicated_dense
        if key not in machines:
            machines[key] = EmulatedMachine(part, scheme, node)
        candidates.append(PlanCandidate(machines[key], scheme))
    return candidates


class Rounds:
    """Rounds until the time is over, with a minimum number; every second round is in reverse order. Collective."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.seconds, self.least, self.steps = spec["seconds"], spec["rounds"], spec["steps"]

    def of(self, items: Sequence[Any]) -> Iterator[Any]:
        """Yield the items in each round."""
        end, done = time.perf_counter() + self.seconds, 0
        while done < self.least or MPI.COMM_WORLD.bcast(time.perf_counter() < end):
            yield from items if done % 2 == 0 else reversed(items)
            done += 1


def search(machine: EmulatedMachine, layers: int, interval: int) -> ChunkSearch:
    """Run Algorithm 1 of Le et al. on the emulated machine, with the times of the slowest rank. Collective."""
    chunk_search = ChunkSearch(layers)
    while not chunk_search.done:
        machine.use(Scheme("host_accumulate", chunk=chunk_search.chunk))
        chunk_search.observe(statistics.median(machine.run(interval)))
    return chunk_search


def searched(part: Part, spec: dict[str, Any], rounds: Rounds) -> dict[str, Any]:
    """Return the choice of the search, and times of all chunk sizes, measured in turn. Collective."""
    layers = sum("w" in n.layer.parameters(*(i.shape for i in n.inputs)) for n in part.network.layers.values())
    machine = EmulatedMachine(part, Scheme("host_accumulate"))
    chunk_search = search(machine, layers, spec["interval"])
    sizes = sorted({n for n in spec["sizes"] if n < layers} | {chunk_search.chunk})
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for size in rounds.of(sizes):
        machine.use(Scheme("host_accumulate", chunk=size))
        times[size] += machine.run(rounds.steps)
    machine.close()
    model = part.simulation()
    predicted = {n: model.with_reduction(Scheme("host_accumulate", chunk=n)).step_seconds for n in sizes}
    return {
        "layers": layers,
        "intervals": len(chunk_search.times),
        "chosen": chunk_search.chunk,
        "tried": {str(k): v for k, v in chunk_search.times.items()},
        "fixed": {str(k): statistics.median(v) for k, v in times.items()},
        "predicted": {str(k): v for k, v in predicted.items()},
    }


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure one network. Collective."""
    part, rounds = Part(PAPERS[spec["network"]], MPI.COMM_WORLD.size), Rounds(spec)
    candidates = candidates_of(part, spec["schemes"])
    for candidate in rounds.of(candidates):
        candidate.run(rounds.steps)
    rows = [candidate.record() for candidate in candidates]
    for machine in {id(c.machine): c.machine for c in candidates}.values():
        machine.close()
    own = sum(time.total for time in part.pace.values())
    result: dict[str, Any] = {"network": spec["network"], "setting": asdict(part.setting), "schemes": rows}
    result |= {"compute": own, "alone": part.alone, "ranks": part.ranks, "links": part.links, "narrow": part.shrunk}
    if spec["search"]:
        result["search"] = searched(part, spec, rounds)
    return result


if __name__ == "__main__":
    measured = main(json.loads(sys.argv[1]))
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(measured))
