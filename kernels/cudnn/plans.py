"""Plans by key: built once, kept in memory and on disk, replaced if the device refuses one, and chosen by measurement
if the user requests it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from halograd.documents import one_line

from ..kernel import Kernel
from .frontend import AddressTable, Frontend, Handles, Workspaces
from .graphs import Built, Candidates, GraphKey
from .store import Entry, PlanStore

__all__ = ["CudnnPlan", "EventTimer", "Plans", "fastest"]


_ROUNDS = 5
_ENOUGH = 2e-3  # [s] per round: a launch takes some microseconds and would dominate a shorter round

#: A call that takes this multiple of the best time is not timed any further.
_HOPELESS = 3.0

Timer = Callable[[Callable[[], Any], float], float]


class EventTimer:
    """Timer by events on the current stream.

    Parameters
    ----------
    cuda
        ``cupy.cuda``, or a double with its ``Event`` and ``get_elapsed_time``.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda

    def __call__(self, run: Callable[[], Any], best: float) -> float:
        """Return the shortest mean time of a call over a few rounds [s], after two warm-up calls.

        If the second call already takes much longer than `best` [s], its time is returned.
        """
        # The first call may load the code of the plan, so it is not timed.
        run()
        once = self._round(run, 1)
        if once > _HOPELESS * best:
            return once
        # At least one call, also of a long kernel; at most 100, as events resolve a round of short ones well enough.
        calls = max(1, min(100, int(_ENOUGH / max(once, 1e-7))))
        # Other work on the GPU and the host only adds time: the shortest round is the least disturbed.
        return min(self._round(run, calls) for _ in range(_ROUNDS))

    def _round(self, run: Callable[[], Any], calls: int) -> float:
        start, stop = self._cuda.Event(), self._cuda.Event()
        start.record()
        for _ in range(calls):
            run()
        stop.record()
        stop.synchronize()
        return float(self._cuda.get_elapsed_time(start, stop)) / 1e3 / calls


def fastest(
    candidates: Candidates, trial: Callable[[Built], Callable[[], Any]], timer: Timer
) -> tuple[Built, dict[str, float]]:
    """Return the fastest of the measured candidates, and the times of all that ran [s], in order of time.

    These are the first in cuDNN's order, one of each other engine, and then more of the fastest engine
    (`GraphKey.compared`).

    Parameters
    ----------
    trial
        Function that returns, for a candidate, a function that launches it on the arrays of the kernel. Outputs are
        overwritten, inputs are not.

    Raises
    ------
    KernelError
        If no candidate can be built and launched.
    """
    times: dict[int, tuple[float, str]] = {}
    reason = ""

    def measure(index: int) -> bool:
        """Measure a candidate; return whether it can be built."""
        nonlocal reason
        built = candidates.build(index)
        if built is None:
            return False
        best = min((seconds for seconds, _ in times.values()), default=math.inf)
        try:
            times[index] = (timer(trial(built), best), built.name)
        except Exception as error:  # cuDNN refuses the launch, or the workspace does not fit
            reason = one_line(error)
        return True

    first, further = candidates.key.compared
    # "eng62_k2=.." is engine 62 with its settings.
    engines = [candidates.name(index).split("_", 1)[0] for index in range(len(candidates))]
    tried, counted = set[int](), 0
    while len(tried) < len(engines) and counted < first:
        # Plans that cannot be built do not count.
        counted += measure(len(tried))
        tried.add(len(tried))
    seen = {engines[index] for index in times}
    for index in range(len(tried), len(engines)):
        # If a plan of an engine cannot be built, its next one is tried.
        if engines[index] not in seen:
            tried.add(index)
            if measure(index):
                seen.add(engines[index])
    if times:
        winner = engines[min(times, key=lambda index: times[index])]
        more = [index for index, engine in enumerate(engines) if engine == winner and index not in tried]
        for index in more[:further]:
            measure(index)
    # The graph launches what was built last, so the winner is built again.
    for index, (_, _) in sorted(times.items(), key=lambda item: item[1]):
        chosen = candidates.build(index)
        if chosen is not None:
            return chosen, {name: seconds for seconds, name in sorted(times.values())}
    raise candidates.none(reason)


_log = logging.getLogger("halograd.kernels")


class CudnnPlan:
    """A cuDNN plan, shared by all kernels of its key.

    A plan that could be built may still be refused when it is launched. Until the plan has run once, a refusal is
    logged and the next candidate replaces it, as in PyTorch.

    Parameters
    ----------
    propose
        Function that returns new candidates; called if a plan without `candidates` is refused.
    """

    def __init__(
        self, key: GraphKey, built: Built, candidates: Candidates | None, propose: Callable[[], Candidates]
    ) -> None:
        self.key = key
        self._built, self._candidates, self._propose = built, candidates, propose
        self._refused: set[str] = set()
        self._proven = False

    @property
    def name(self) -> str:
        """Engine and settings of the plan."""
        return self._built.name

    @property
    def workspace_bytes(self) -> int:
        """Workspace of a run [B]."""
        return self._built.workspace_bytes

    def run(self, table: AddressTable, handle: Any, stream: int, workspaces: Workspaces) -> None:
        """Launch the plan on the arrays of `table`; `handle` is set to `stream`, the current one.

        Raises
        ------
        KernelError
            If the device accepts no candidate.
        """
        if not self._proven:
            self._prove(table, handle, stream, workspaces)
            return
        self._built.launch(table, workspaces.address(stream, self._built.workspace_bytes), handle)

    def _prove(self, table: AddressTable, handle: Any, stream: int, workspaces: Workspaces) -> None:
        while not self._proven:
            workspace = workspaces.address(stream, self._built.workspace_bytes)
            try:
                self._built.launch(table, workspace, handle)
                self._proven = True
            except Exception as error:  # the exception type differs between versions of the frontend
                self._replace(one_line(error))

    def _replace(self, reason: str) -> None:
        self._refused.add(self.name)
        # A restored plan, or one chosen by measurement, has come without its candidates.
        if self._candidates is None:
            self._candidates = self._propose()
        for built in self._candidates.all():
            if built.name not in self._refused:
                text = "kernels: cuDNN refused plan %s of %s (%s); taking %s"
                _log.warning(text, self.name, self.key.what[0], reason, built.name)
                self._built = built
                return
        raise self._candidates.none(f"all launches failed, the last one with: {reason}")


def _comparison(keys: Sequence[GraphKey]) -> str:
    """Return the key under which the times of these plans and of the kernel that competes with them are stored."""
    return " ".join(("fastest of", *(key.text for key in keys)))


class Plans:
    """The plans of one backend. Local.

    Parameters
    ----------
    allocate
        Function that returns the workspace for a measurement: an array of a number of bytes on the current stream.
    release
        Function that returns the pool's free memory to the device; some candidates take a gigabyte.

    Attributes
    ----------
    times
        For each key whose plan was chosen by measurement, the times of the candidates, and of our own kernels that were
        compared with the plan [s]; the chosen one first.
    """

    def __init__(
        self,
        frontend: Frontend,
        handles: Handles,
        store: PlanStore,
        allocate: Callable[[int], Any],
        release: Callable[[], Any],
        timer: Timer,
    ) -> None:
        self._frontend, self._handles, self._store = frontend, handles, store
        self._allocate, self._release, self._timer = allocate, release, timer
        self._known: dict[GraphKey, CudnnPlan] = {}
        self.times: dict[GraphKey, dict[str, float]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: GraphKey, table: AddressTable) -> CudnnPlan:
        """Return the plan of a key. A choice by measurement runs on the arrays of `table` and overwrites its output.

        Raises
        ------
        KernelError
            If cuDNN has no plan.
        """
        plan = self._known.get(key)
        if plan is None:
            plan = self._known[key] = self._kept(key) or self._new(key, table)
        return plan

    def faster(self, keys: Sequence[GraphKey], kernel: Kernel, other: Kernel) -> bool:
        """Return whether `other` is faster than `kernel`, which runs the plans of these keys.

        The times are measured if none are stored, and then stored.
        """
        text = _comparison(keys)
        entry = self._store.get(text)
        if entry is None or other.impl not in entry.seconds:  # another version may have named its kernel differently
            seconds = {"cudnn": self._timer(kernel, math.inf)}
            seconds[other.impl] = self._timer(other, seconds["cudnn"])
            entry = Entry(min(seconds, key=lambda name: seconds[name]), 0, None, seconds)
            self._store.put(text, entry)
        is_faster = entry.name == other.impl
        for key in keys:
            # The dict is in order of preference: `autotuned` shows the chosen kernel first.
            ours, plans = {other.impl: entry.seconds[other.impl]}, self.times.get(key, {})
            self.times[key] = {**ours, **plans} if is_faster else {**plans, **ours}
        return is_faster

    def known_slower(self, keys: Sequence[GraphKey], other: str) -> bool:
        """Return whether the kernel `other` is faster than one with these plans, by a stored measurement."""
        entry = self._store.get(_comparison(keys))
        return entry is not None and entry.name == other

    def _propose(self, key: GraphKey) -> Candidates:
        handle, _ = self._handles.current()
        return Candidates(self._frontend, key, {"handle": handle})

    def _plan(self, key: GraphKey, built: Built, candidates: Candidates | None) -> CudnnPlan:
        return CudnnPlan(key, built, candidates, lambda: self._propose(key))

    def _kept(self, key: GraphKey) -> CudnnPlan | None:
        """Return the plan stored on disk; None if there is none, or if this library cannot build it."""
        entry = self._store.get(key.text)
        if entry is None:
            return None
        if entry.seconds:
            self.times[key] = dict(sorted(entry.seconds.items(), key=lambda item: item[1]))
        if entry.blob is not None:
            restored = self._restore(key, entry, entry.blob)
            if restored is not None:
                return self._plan(key, restored, None)
        candidates = self._propose(key)
        built = candidates.named(entry.name)
        # Without a plan of this name the caller plans and measures again.
        return None if built is None else self._plan(key, built, candidates)

    def _restore(self, key: GraphKey, entry: Entry, blob: bytes) -> Built | None:
        handle, _ = self._handles.current()
        try:
            graph = self._frontend.restored(blob, handle)
            launch = self._frontend.launcher(graph, key.uids)
        except Exception as error:  # another build of the same version or a damaged file: plan again
            _log.debug("kernels: ignoring a stored cuDNN plan: %s", one_line(error))
            return None
        return Built(-1, entry.name, entry.workspace_bytes, launch, graph, compiled=True)

    def _new(self, key: GraphKey, table: AddressTable) -> CudnnPlan:
        candidates: Candidates | None = self._propose(key)
        assert candidates is not None
        seconds: dict[str, float] = {}
        if key.tuned:
            try:
                built, seconds = fastest(candidates, lambda trial: self._trial(trial, table), self._timer)
            finally:
                self._release()
            self.times[key] = seconds
            # A graph keeps everything that was built from it, device code included. Continue with a graph of this plan
            # alone.
            built, candidates = self._propose(key).named(built.name) or built, None
        else:
            first = next(candidates.all(), None)
            if first is None:
                raise candidates.none()
            built = first
        # cuDNN proposes any other plan again in a millisecond.
        if seconds or built.compiled:
            self._store.put(key.text, Entry(built.name, built.workspace_bytes, self._blob(built), seconds))
        return self._plan(key, built, candidates)

    def _trial(self, built: Built, table: AddressTable) -> Callable[[], Any]:
        """Return a function that launches a candidate on its own workspace, which is freed with the function."""
        handle, _ = self._handles.current()
        # Not the shared arena: a candidate that is not taken may need much more than the plans that are.
        space = self._allocate(built.workspace_bytes) if built.workspace_bytes else None
        address = 0 if space is None else int(space.data.ptr)

        def run(keep: Any = space) -> None:
            built.launch(table, address, handle)

        return run

    def _blob(self, built: Built) -> bytes | None:
        if not built.compiled:
            return None
        try:
            return self._frontend.saved(built.graph)
        except Exception as error:  # some engines cannot be saved
            _log.debug("kernels: plan %s cannot be saved: %s", built.name, one_line(error))
            return None

    def close(self) -> None:
        """Free all plans; kernels built on them can no longer run. `close` may be called twice."""
        self._known.clear()
