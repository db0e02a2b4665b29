"""Training steps of halograd and torch, timed in turn on one GPU."""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.gpu.subjects import MOMENTUM, RATE, Subject
from benchmarks.gpu.torch_process import TorchError, TorchProcess
from halograd.kernels import Backend
from halograd.layers.strategy import Strategy
from halograd.training.executor import Executor
from halograd.training.optimizers import SGD
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer

__all__ = ["COMPILED", "DTYPES", "LIMITS", "Ours", "contest", "contest_compiled", "rounds"]

Outcome = tuple[str, Mapping[str, float]]

#: Dtype of activations by name of the precision; the backend computes float32 in TF32.
DTYPES = {"bf16": "bfloat16", "tf32": "float32"}
#: Largest relative difference of the first losses, which shows that network and data are the same.
LIMITS = {"bf16": 0.05, "tf32": 0.01}
ROUNDS, ROUND_SECONDS, MOST_STEPS = 5, 0.25, 50
EAGER_PATIENCE, COMPILE_PATIENCE, STEPS_PATIENCE = 60.0, 100.0, 60.0  # [s]
#: Passes of our steps as graphs; with "fork" gradients of filters are on a second stream.
GRAPHED: dict[str, tuple[str, ...]] = {"ours, graph": (), "ours, graph, fork": ("fork",)}
#: Contestants of torch by name: whether the network is compiled, and whether a step is one CUDA graph.
TORCH = {
    "eager": (False, False),
    "eager, graph": (False, True),
    "compiled": (True, False),
    "compiled, graph": (True, True),
}
COMPILED = tuple(name for name, (compiled, _) in TORCH.items() if compiled)


class Ours:
    """Training steps of a subject in halograd. Collective over `comm`."""

    def __init__(
        self,
        kernels: Backend,
        comm: Any,
        subject: Subject,
        dtype: str,
        graph: bool = False,
        parts: Mapping[str, int] | None = None,
        passes: tuple[str, ...] = (),
    ) -> None:
        network = subject.network()
        strategy = Strategy(dict(parts or {"sample": 1}), passes=passes)
        self._device = kernels.device
        self.executor = Executor(network, comm, kernels, subject.batch, strategy, dtype, graph=graph)
        self.trainer = Trainer(self.executor, SGD(self.executor.store, momentum=MOMENTUM), Constant(RATE))
        for name, array in subject.data(network).items():
            self.executor.set_input(name, array)

    def warm_up(self) -> float:
        """Run some steps, in which graphs are captured too; return the loss of the first step."""
        loss = float(self.trainer.step())
        for _ in range(3):
            self.trainer.step()
        self._device.synchronize()
        return loss

    def seconds(self, count: int) -> float:
        """Return the mean device time of consecutive steps, without waits between them [s]."""
        first = self._device.timestamp()
        for _ in range(count):
            self.trainer.step()
        second = self._device.timestamp()
        self._device.synchronize()
        return self._device.seconds(first, second) / count

    def host_seconds(self, count: int) -> float:
        """Return the median time in which the host enqueues a step [s].

        Each step follows a synchronization, because a step waits for the loss of the previous one. If this time is
        longer than that of the device, the host limits the speed.
        """
        times = []
        for _ in range(count):
            self._device.synchronize()
            begin = time.perf_counter()
            self.trainer.step()
            times.append(time.perf_counter() - begin)
        self._device.synchronize()
        return statistics.median(times)

    def launches(self) -> int | None:
        """Return the number of graph nodes (kernels, copies, fills) of forward and backward; None without graphs."""
        capture = getattr(self._device, "_captured", None)
        if capture is None:
            return None
        prepare = self.executor.kernels.before_capture
        if prepare is not None:
            prepare()
        sections = [section for graphed in self.executor.graphs for section in graphed.sections if section.graph]
        return sum(_nodes(capture(section.run)) for section in sections)

    def update(self) -> None:
        """Enqueue one update of all parameters."""
        for bucket in self.executor.store.buckets:
            self.trainer.optimizer.update(bucket)

    def close(self) -> None:
        """Free all resources."""
        self.trainer.synchronize()
        self.executor.close()
        del self.trainer, self.executor
        gc.collect()


def rounds(contestants: Mapping[str, Callable[[int], float]], count: int = ROUNDS) -> dict[str, list[float]]:
    """Return the step time of each contestant per round [s]; every second round is in reverse order."""
    steps = {}
    for name, run in contestants.items():
        steps[name] = max(3, min(MOST_STEPS, math.ceil(ROUND_SECONDS / max(run(2), 1e-6))))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(count):
        for name in list(contestants)[:: 1 if i % 2 == 0 else -1]:
            times[name].append(contestants[name](steps[name]))
    return times


def _nodes(graph: Any) -> int:
    """Return the number of nodes of a CuPy graph, by a call of the driver."""
    count = ctypes.c_size_t()
    status = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(ctypes.c_void_p(graph.graph), None, ctypes.byref(count))
    if status:
        raise RuntimeError(f"cuGraphGetNodes: {status}")
    return count.value


def contest(kernels: Backend, comm: Any, subject: Subject, precision: str, torch: TorchProcess | None) -> Outcome:
    """Time steps of halograd and of torch's eager mode, both without and with graphs; medians [s].

    Before that, halograd alone: memory compared with the prediction, launches, and time of the host.
    """
    numbers: dict[str, float] = {}
    notes: list[str] = []
    device, before = kernels.device, kernels.device.memory()
    plain = Ours(kernels, comm, subject, DTYPES[precision])
    opened = [plain]
    try:
        numbers["loss"] = plain.warm_up()
        numbers["predicted_bytes"] = sum(plain.executor.predicted_bytes.values())
        after = device.memory()
        if before is not None and after is not None:
            numbers["device_bytes"] = after.used - before.used
        numbers["host"] = plain.host_seconds(5)
        contestants: dict[str, Callable[[int], float]] = {"ours": plain.seconds}
        try:
            for name, passes in GRAPHED.items():
                graphed = Ours(kernels, comm, subject, DTYPES[precision], graph=True, passes=passes)
                opened.append(graphed)
                graphed.warm_up()
                contestants[name] = graphed.seconds
                launches = graphed.launches()
                if launches is not None:
                    numbers["launches"] = launches
        except Exception as error:
            notes.append("no graph: " + " ".join(str(error).split())[:120])
        if torch is None:
            notes.append("no torch")
        else:
            contestants["eager"] = _torch(torch, subject, precision, "eager", numbers)
            try:
                contestants["eager, graph"] = _torch(torch, subject, precision, "eager, graph", numbers)
            except AssertionError as error:
                notes.append(str(error)[:120])
        times = rounds(contestants)
    finally:
        for ours in reversed(opened):
            ours.close()
    _keep(numbers, times)
    return _text(numbers, notes, times), numbers


def contest_compiled(
    kernels: Backend, comm: Any, subject: Subject, precision: str, torch: TorchProcess, mode: str = "compiled"
) -> Outcome:
    """Time torch's compiled network, and halograd's graph. The compilation takes a minute."""
    numbers: dict[str, float] = {}
    ours = Ours(kernels, comm, subject, DTYPES[precision], graph=True)
    try:
        numbers["loss"] = ours.warm_up()
        compiled = _torch(torch, subject, precision, mode, numbers)
        times = rounds({"ours, graph": ours.seconds, mode: compiled})
    finally:
        ours.close()
    _keep(numbers, times)
    return _text(numbers, [], times), numbers


def _torch(
    torch: TorchProcess, subject: Subject, precision: str, name: str, numbers: dict[str, float]
) -> Callable[[int], float]:
    """Build torch's network, and check that its first loss is that of halograd; return a function that times its steps.

    Raises
    ------
    AssertionError
        If the losses differ.
    """
    compiled, graph = TORCH[name]
    patience = COMPILE_PATIENCE if compiled else EAGER_PATIENCE
    options = {"name": name, "subject": asdict(subject), "precision": precision, "compiled": compiled, "graph": graph}
    try:
        first = torch.request(patience, do="build", **options)
    except TorchError as error:
        raise AssertionError(f"torch, {name}: {error}") from error
    difference = abs(first["loss"] - numbers["loss"]) / max(abs(first["loss"]), 1e-6)
    if not difference <= LIMITS[precision]:
        raise AssertionError(f"the first loss is {numbers['loss']:.5f}, torch's {first['loss']:.5f}")
    numbers[f"{name} bytes"] = first["bytes"]
    return lambda count: float(torch.request(STEPS_PATIENCE, do="steps", name=name, count=count)["seconds"])


def _keep(numbers: dict[str, float], times: Mapping[str, list[float]]) -> None:
    for name, seconds in times.items():
        numbers[name] = statistics.median(seconds)
        numbers[f"{name}, fastest"] = min(seconds)


def _text(numbers: Mapping[str, float], notes: list[str], times: Mapping[str, list[float]]) -> str:
    """Return a text of milliseconds per step and memory."""
    parts = [f"{name} {1e3 * numbers[name]:.2f}" for name in times]
    text = f"ms/step: {', '.join(parts)}"
    if "host" in numbers:
        text += f"; the host takes {1e3 * numbers['host']:.2f}"
    if "launches" in numbers:
        text += f" for {numbers['launches']:.0f} launches forward and backward"
    if "device_bytes" in numbers:
        share = numbers["device_bytes"] / max(1, numbers["predicted_bytes"]) - 1
        text += f"; {numbers['device_bytes'] / 2**20:.0f} MiB, {100 * share:+.1f} % of the prediction"
    return "; ".join([text, *notes])
