"""halograd as a contestant, and the sum of its kernels' times."""

from __future__ import annotations

import inspect
import time
from dataclasses import fields, replace
from typing import Any

from mpi4py import MPI

from benchmarks.problems import PROBLEMS
from benchmarks.recompute import strategies
from halograd.comm import Communicator
from halograd.kernels import BatchNormKernels, Kernel, get_backend
from halograd.layers.strategy import Strategy
from halograd.perfmodel.small import suit_small_layers
from halograd.program.keeping import Keeping
from halograd.program.program import Target
from halograd.training.executor import Executor
from halograd.training.optimizers import SGD
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer

__all__ = ["HalogradSubject", "RawSubject", "TimedBackend"]


class HalogradSubject:
    """Network under a cut along the height, one part per rank. Collective.

    Parameters
    ----------
    spec
        ``problem``, ``threads`` per rank, ``dtype``, ``options`` of the strategy, and ``small`` as in ``[strategy]``;
        on one rank ``recompute``, the rule of the outputs that are computed again, or ``arena``, the bytes of an arena
        in which as little as possible is.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        problem = PROBLEMS[spec["problem"]]
        network = problem.make()
        self.comm = Communicator(MPI.COMM_WORLD)
        self.backend = self._backend(spec)
        parts = {"height": self.comm.size}
        strategy = Strategy(parts, options=spec.get("options", {}))
        if self.comm.size > 1 and spec.get("small", "auto") == "auto":  # as the configuration `height = 2`
            strategy = suit_small_layers(network, strategy, problem.batch, self.comm.size).strategy
        if "recompute" in spec:
            strategy = strategies(network)[spec["recompute"]]
        if "arena" in spec:
            keeping = Keeping(network, strategy, Target(problem.batch))
            strategy = keeping.within(spec["arena"]) or keeping.fewest()
        dtype = spec.get("dtype", "float32")
        self.executor = Executor(network, self.comm, self.backend, problem.batch, strategy, dtype, seed=0)
        self.trainer = Trainer(self.executor, SGD(self.executor.store), Constant(problem.rate))
        for name, array in problem.data(network).items():
            self.executor.set_input(name, array)
        self.about = f"halograd {self.backend.name} {self.backend.version}"
        # The other backends have no choice of instruction sets.
        if instruction_set := getattr(self.backend, "instruction_set", ""):
            self.about += f" on {instruction_set}"
        self.about += f", {self.comm.size} x {spec['threads']} threads"

    def _backend(self, spec: dict[str, Any]) -> Any:
        backend = get_backend(spec.get("backend", "onednn"), threads=spec["threads"])
        backend.emulate = True  # the caller leaves out what is emulated
        return backend

    def step(self) -> float:
        return float(self.trainer.step())

    def clock(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        self.trainer.synchronize()

    def close(self) -> None:
        self.executor.close()
        self.comm.close()


class RawSubject(HalogradSubject):
    """Network of one rank, timed by a clock that runs only during the backend's kernels.

    So the time of a step is the sum of the times of its kernels, on the step's own arrays and in its order, without
    messages, copies, loss and update, and without the library's own code.
    """

    def _backend(self, spec: dict[str, Any]) -> Any:
        return TimedBackend(super()._backend(spec))

    def clock(self) -> float:
        return self.backend.seconds


class TimedBackend:
    """Backend that sums up the time in its kernels.

    Attributes
    ----------
    seconds
        Wall time in kernels so far [s].
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._backend, name)
        if not inspect.ismethod(attribute):
            return attribute
        return lambda *args, **kwargs: self._timed(attribute(*args, **kwargs))

    def _timed(self, result: Any) -> Any:
        if isinstance(result, Kernel):
            return _TimedKernel(result, self)
        if isinstance(result, BatchNormKernels):
            return replace(result, **{f.name: self._timed(getattr(result, f.name)) for f in fields(result)})
        return tuple(self._timed(k) for k in result) if isinstance(result, tuple) else result


class _TimedKernel:
    def __init__(self, kernel: Kernel, backend: TimedBackend) -> None:
        self._kernel, self._backend = kernel, backend

    def __call__(self) -> None:
        before = time.perf_counter()
        self._kernel()
        self._backend.seconds += time.perf_counter() - before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)
