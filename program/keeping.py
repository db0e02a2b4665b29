"""Choice of the outputs that are kept for the backward pass; the others are computed again.

A choice splits the layers, in the order of computation, into kept outputs and runs of outputs that are computed again
together, before the backward pass of the layer after the run. While the backward pass is in a run, memory holds::

    kept outputs of earlier layers | outputs of the run that are still needed | arrays of this layer's backward pass

and, while the run is repeated, also outputs that only layers of the run read.

An output of a run that a layer beyond the one after the run reads is kept, too. :class:`Keeping` estimates these
sizes, and the time of the repeated layers, from the program in which nothing is computed again. Given a limit, it finds
the fastest choice by dynamic programming over kept layers; a state is a pair of time and kept bytes that no other pair
dominates. The estimate is exact for chains, up to the layout of the arena; callers compile the choice to learn its
size.

References
----------
Beaumont et al. 2019, "Optimal checkpointing for heterogeneous chains": the dynamic program for chains. Here, every
layer is repeated at most once, and other graphs are treated as chains of their layers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from ..layers import Network
from ..layers.strategy import Strategy
from ..lowering.context import copying
from ..lowering.operations import Run, Transfer
from ..lowering.views import Buffer
from .arena import aligned, lifetimes
from .compiler import compile_program, lower_program
from .program import Step, Target
from .recompute import Recomputation

__all__ = ["Keeping", "keep_few"]

#: Largest number of states per layer.
STATES = 48
#: Capacities for which the smallest arena is searched, as multiples of the smallest estimate.
CAPACITIES = (1.0, 1.01, 1.03, 1.06, 1.1, 1.15, 1.25)
#: Ratio of consecutive estimates for which choices are compiled.
RATIO = 0.995
#: Largest number of other choices that are compiled if none of these fits.
OTHERS = 8
#: Part of the capacity by which the first of these estimates exceeds it, times the number of layers.
MARGIN = 1.2
#: Time of a costly layer per byte of its output, relative to that of a pointwise layer, if times are not given.
COSTLY = 20.0

_Floats = NDArray[np.float64]


def keep_few(network: Network, strategy: Strategy, target: Target) -> Strategy:
    """Return the strategy that computes outputs again, with the smallest arena that was found; `strategy` itself if
    none is smaller than without recomputation. Local.

    Chosen layers get the option ``recompute``; options ``"none"`` of single layers stay. The cuts are those of
    `strategy`; `target` gives batch and rank.
    """
    return Keeping(network, strategy, target).fewest()


class Keeping:
    """Choices of kept outputs for one cut of a network, with estimates of memory and time. Local.

    Parameters
    ----------
    strategy
        Strategy whose cuts are used. Of its options ``recompute``, only ``"none"`` of single layers counts.
    target
        Batch and rank.
    seconds
        Time to repeat each layer, by name [s]; None: in proportion to the output's size, more for costly layers.
    kinds
        Values of `Layer.recomputation` of the layers that may be repeated.

    Attributes
    ----------
    most, least
        Size of the arena with all outputs kept, and smallest estimate of such a size [B].
    """

    def __init__(
        self,
        network: Network,
        strategy: Strategy,
        target: Target,
        seconds: Mapping[str, float] | None = None,
        kinds: Collection[str] = ("pointwise", "block"),
    ) -> None:
        self._network, self._strategy, self._target, self._kinds = network, strategy, target, kinds
        everything = replace(strategy, options={**strategy.options, "recompute": "block"})
        program = lower_program(network, everything, target)
        self._steps = program.steps
        count = len(self._steps)
        number = {step.name: i for i, step in enumerate(self._steps)}
        chosen = {step.name: step for step in self._steps if self._may(step)}
        repeats = Recomputation(program, chosen)
        owners = {buffer: number[name] for buffer, name in _owners(self._steps, repeats).items()}

        self._fixed = np.array([step.name not in chosen for step in self._steps], bool)
        held, whole = np.zeros(count), np.zeros(count)  # output's bytes that backward reads, and all its bytes
        last = np.arange(count)  # last layer whose forward pass reads the output
        for buffer, maker in owners.items():
            whole[maker] += aligned(buffer.nbytes)
            held[maker] += aligned(buffer.nbytes) * (buffer in repeats.read_later)
        for operation in repeats.operations:
            for buffer in operation.buffers():
                if buffer in owners and operation.layer in number:
                    last[owners[buffer]] = max(last[owners[buffer]], number[operation.layer])
        self._held, self._last = held, last
        steps_by_output = {step.output: i for i, step in enumerate(self._steps)}
        #: Pairs of layers: the second reads the output of the first.
        self._reads = [
            (steps_by_output[v], i)
            for i, step in enumerate(self._steps)
            for v in dict.fromkeys(step.inputs)
            if v in steps_by_output
        ]

        # Arrays in use during each operation of the program without recomputation.
        operations, spans = list(program), lifetimes(list(program), program.kept)
        # Number of operations of the forward pass; those of the backward pass follow.
        begin = sum(len(s.before) + len(s.operations) + len(s.after) for s in program.forward)
        #: Layer of each operation of the backward pass, in the order of the pass.
        # The gradient of an input is complete after the backward pass of the first layer.
        self._positions = np.repeat(
            [number.get(program.layer_of(s), 0) for s in program.backward],
            [len(s.before) + len(s.operations) + len(s.after) for s in program.backward],
        )
        here = len(self._positions)
        #: Last layer whose backward pass reads each output; -1: there is none.
        self._readers = np.full(count, -1)
        for segment in program.backward:
            position = number.get(program.layer_of(segment), 0)
            for buffer in (b for o in segment.operations for b in o.buffers() if b in owners):
                self._readers[owners[buffer]] = max(self._readers[owners[buffer]], position)
        #: Bytes of each output during each operation of the backward pass, and bytes of all other arrays: during the
        #: operation, and before it.
        self._alive, (others, between, early) = np.zeros((count, here)), np.zeros((3, len(operations) + 1))
        ends = {buffer: at for at, operation in enumerate(operations[:begin]) for buffer in operation.buffers()}
        for buffer, intervals in spans.items():
            mine = owners.get(buffer) if buffer in repeats.read_later else None
            for start, stop in intervals:
                if mine is None:
                    others[start] += aligned(buffer.nbytes)
                    between[start + 1] += aligned(buffer.nbytes)
                    others[stop + 1] -= aligned(buffer.nbytes)
                    between[stop + 1] -= aligned(buffer.nbytes)
                else:
                    self._alive[mine, : max(0, stop + 1 - begin)] += aligned(buffer.nbytes)
                    # If it is computed again, the forward pass holds it until its last reader.
                    early[start] += aligned(buffer.nbytes)
                    early[min(stop, ends.get(buffer, stop)) + 1] -= aligned(buffer.nbytes)
        kept = sum(program.placement.kept.values())
        # Largest memory in the forward pass if all outputs that may be computed again are [B].
        forward = float(np.cumsum(others + early)[:begin].max(initial=0.0)) + kept
        self._others, self._between = np.cumsum([others, between], axis=1)[:, begin : begin + here] + kept
        #: Bytes of each output during each operation of the forward pass when that is repeated: until the last one that
        #: reads it, or to the end if the backward pass reads it; and the layer of each operation.
        self._repeated = np.zeros((count, len(repeats.operations)))
        self._repeats = np.zeros(len(repeats.operations), np.intp)
        stops: dict[Buffer, int] = {}
        for at, operation in enumerate(repeats.operations):
            stops.update(dict.fromkeys(operation.buffers(), at + 1))
            self._repeats[at] = number.get(operation.layer, 0)
        for buffer, maker in owners.items():
            stop = len(repeats.operations) if buffer in repeats.read_later else stops[buffer]
            self._repeated[maker, repeats.makers[buffer][0] : stop] += aligned(buffer.nbytes)

        if seconds is None:
            weight = [COSTLY if step.layer.recomputation == "block" else 1.0 for step in self._steps]
            self._seconds = np.array(weight) * np.maximum(whole, 1)
        else:
            self._seconds = np.array([seconds.get(step.name, 0.0) for step in self._steps])
        self._prepare(whole)
        self._arenas: dict[frozenset[str], int] = {}  # by the layers that are computed again [B]
        self.most = self.arena(strategy)
        self.least = max(self._least(), forward)

    def _may(self, step: Step) -> bool:
        own = self._strategy.layers.get(step.name, {})
        return step.layer.recomputation in self._kinds and own.get("recompute") != "none"

    def _prepare(self, whole: _Floats) -> None:
        """Compute, for all pairs of consecutive kept layers, terms of memory and time of the run between them.

        Row ``i + 1`` stands for layer `i`: row 0 is the beginning.
        """
        n, held, last = len(self._steps), self._held, self._last
        layer, after, positions = np.arange(n), np.arange(n + 1), self._positions
        # total[i]: bytes of the outputs of layers 0 .. i - 1, per operation of the backward pass.
        total = np.vstack([np.zeros(len(positions)), np.cumsum(self._alive, axis=0)])
        # First operation of the backward pass of each layer: of several assignments, the last one counts.
        first = np.zeros(n, np.intp)
        first[positions[::-1]] = np.arange(len(positions))[::-1]
        inside = layer[:, None] < after  # [output, kept layer after the run]
        read = (last[:, None] > after) & (held[:, None] > 0)  # by a layer after the run: these outputs are kept
        kept = _sums_from(held[:, None] * (inside & read))
        again = _sums_from(self._seconds[:, None] * (inside & ~read))
        #: Memory of a run, time to repeat it, kept bytes of its outputs, each [beginning + 1, kept layer after it].
        self._need = np.full((n + 1, n + 1), np.inf)
        for row in range(n + 1):
            ends = np.minimum(after[row:] + 1, n)
            rows = total[ends] - total[row]
            # A run is repeated before the backward pass of the last layer that reads one of its outputs.
            since = np.maximum.accumulate(np.append(-1, self._readers[row:]))
            rows = np.where(positions > since[:, None], total[ends] - total[after[row:]], rows) + self._others
            rows += self._alive[row - 1] if row else 0.0  # the output that is kept before the run
            rows = np.where((positions >= row) & (positions <= after[row:, None]), rows, 0.0)
            self._need[row, row:] = rows.max(axis=1, initial=0.0)
            when = since[: n + 1 - row]
            if when.max() < 0:
                continue
            repeated = np.zeros(n + 1)
            np.maximum.at(repeated, self._repeats + 1, self._repeated[row:].sum(axis=0))
            # Up to each end, only operations of layers of the run are repeated.
            repeated = np.maximum.accumulate(np.where(after > row, repeated, 0.0))[row:] + self._between[first[when]]
            repeated += self._alive[row - 1, first[when]] if row else 0.0
            self._need[row, row:] = np.maximum(self._need[row, row:], np.where(when >= 0, repeated, 0.0))
        self._extra, self._again = kept, again
        # Bytes of earlier outputs that are kept only because layers of the run read them.
        self._more = np.zeros((n + 1, n + 1))
        for row in range(n + 1):
            more = np.zeros(n)
            for source, reader in self._reads:
                if source < row <= reader:
                    more[reader] += whole[source] - held[source]
            self._more[row] = more @ (inside & ~read)
        # A run ends before a layer that cannot be repeated.
        self._end = np.full(n + 1, n)
        for row in range(n - 1, -1, -1):
            self._end[row] = row if self._fixed[row] else self._end[row + 1]

    def _least(self) -> float:
        """Return the smallest estimate of an arena [B]."""
        finite = np.where(np.isfinite(self._need), self._need + self._more + self._extra, 0.0)
        high = float(finite.max(initial=0.0) + self._held.sum() + self._more.sum(axis=1).max(initial=0.0))
        low = float(self._others.max(initial=0.0))
        # Bisection: with one state per layer, that of the fewest bytes, the search only decides whether a choice fits.
        while high - low > 1e-5 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if any(self._search(middle, 1)) else (middle, high)
        return high

    def estimate(self, capacity: float) -> float:
        """Return the time [s] of recomputation by the fastest choice within `capacity` [B]; infinity if none fits."""
        return next((seconds for seconds, _ in self._search(capacity)), math.inf)

    def fewest(self) -> Strategy:
        """Return the strategy with the smallest arena that was found."""
        chosen = dict[frozenset[str], None]()
        for capacity in CAPACITIES:
            # The fastest choice and that which keeps least: their arenas differ in gaps between arrays, too.
            found = [again for _, again in self._search(capacity * self.least)]
            chosen.update(dict.fromkeys((*found[:1], *found[-1:])))
        # The first one if several arenas are equal.
        best = min((*chosen, *self._rules()), key=self._compiled)
        return self.strategy(best) if self._compiled(best) < self.most else self._strategy

    def within(self, capacity: float) -> Strategy | None:
        """Return the strategy with the fastest choice found that fits an arena of `capacity` [B]; None if none fits.

        The choices that are compiled first do not depend on the capacity. So a choice is found again if its arena is
        the capacity, and a larger capacity does not give a slower one of them. If none of them fits, some are compiled
        that keep less than the fastest of the same estimate, those that repeat all layers of a kind, and that with the
        smallest arena.
        """
        limit, chosen = self._first_estimate(capacity), list[frozenset[str]]()
        while limit > self.least * RATIO:
            for _, again in islice(self._search(max(limit, self.least)), 1):
                chosen.append(again)
                if self._compiled(again) <= capacity:
                    return self.strategy(again)
            # No choice of this estimate fits when it is compiled: try a smaller estimate.
            limit *= RATIO
        others = list[frozenset[str]]()
        if chosen:
            # An array has the same offset whenever it is computed, so that an arena may exceed its estimate: by an
            # output that is kept, above all.
            others = [again for _, again in self._search(max(capacity, self.least))]
        for again in (*others[:: -(1 + len(others) // OTHERS)][::-1], *self._rules()):
            if self._compiled(again) <= capacity:
                return self.strategy(again)
        fewest = self.fewest()
        return fewest if self.arena(fewest) <= capacity else None

    def _rules(self) -> list[frozenset[str]]:
        """Return the choices that repeat all pointwise layers, and all that may be repeated."""
        layers = [step for step, fixed in zip(self._steps, self._fixed) if not fixed]
        return [
            frozenset(step.name for step in layers if step.layer.recomputation in kinds)
            for kinds in (("pointwise",), ("pointwise", "block"))
        ]

    def _compiled(self, again: frozenset[str]) -> int:
        """Return the size of the arena of a choice [B], compiled at the first call."""
        if again not in self._arenas:
            self._arenas[again] = self.arena(self.strategy(again))
        return self._arenas[again]

    def may_fit(self, capacity: float) -> bool:
        """Return whether :meth:`within` compiles choices of estimates that do not depend on the capacity [B]."""
        return self._first_estimate(capacity) > self.least * RATIO

    def _first_estimate(self, capacity: float) -> float:
        """Return the largest estimate for which a choice is compiled [B]: `most` times a power of `RATIO`."""
        # An arena may be smaller than its estimate, by a tenth in networks of some ten layers.
        first = (1 + MARGIN / max(1, len(self._steps))) * max(capacity, 1.0)
        return self.most * RATIO ** math.ceil(math.log(first / max(self.most, 1.0), RATIO))

    def arena(self, strategy: Strategy) -> int:
        """Return the size of the arena under a strategy with the same cuts [B]."""
        return compile_program(self._network, strategy, self._target).placement.size

    def strategy(self, again: frozenset[str]) -> Strategy:
        """Return the strategy that computes the outputs of these layers again."""
        layers = dict(self._strategy.layers)
        for step in self._steps:
            if step.name in again and step.name in self._network.layers:
                layers[step.name] = {**layers.get(step.name, {}), "recompute": step.layer.recomputation}
        return replace(self._strategy, layers=layers)

    def _search(self, capacity: float, most: int = STATES) -> Iterator[tuple[float, frozenset[str]]]:
        """Yield the time of recomputation [s] and the repeated layers of choices within a capacity [B].

        The fastest choice comes first, then slower ones that keep less.

        Row ``i + 1`` of the states stands for kept layer `i`, row 0 for the beginning. At most `most` states per row
        are used; with one, that with the fewest bytes.
        """
        n = len(self._steps)
        seconds, nbytes = np.full((n + 2, most), np.inf), np.full((n + 2, most), np.inf)
        before = np.zeros((n + 2, most), np.intp)  # flat index of the state of the layer that is kept before
        seconds[0, 0] = nbytes[0, 0] = 0.0
        held = np.append(0.0, self._held)[:, None]  # by row: the output that is kept there
        for after in range(n + 1):
            rows = slice(0, after + 1)
            # For each state: bytes of kept outputs, and of those that are kept only because the run reads them.
            kept = nbytes[rows] + self._more[rows, after, None]
            fits = kept + self._need[rows, after, None] <= capacity
            fits &= (self._end[rows] >= after)[:, None]
            at = np.flatnonzero(fits)
            if not len(at):
                continue
            time = (seconds[rows] + self._again[rows, after, None]).reshape(-1)[at]
            kept = (kept + self._extra[rows, after, None] + held[rows]).reshape(-1)[at]
            chosen = _undominated(time, kept, most)
            count = len(chosen)
            seconds[after + 1, :count], nbytes[after + 1, :count] = time[chosen], kept[chosen]
            before[after + 1, :count] = at[chosen]
        for last in np.flatnonzero(np.isfinite(seconds[n + 1])):
            runs, row, state = dict[int, int](), n + 1, int(last)  # layers, with the kept layer after their run
            # Back from the end, along the states from which this one was reached.
            while row:
                after = row - 1
                row, state = divmod(int(before[row, state]), most)
                runs.update((i, after) for i in range(row, after) if self._last[i] <= after or not self._held[i])
            # What a later run reads is kept.
            for source, reader in self._reads:
                if runs.get(source, n + 1) < reader and reader in runs:
                    del runs[source]
            yield float(seconds[n + 1, last]), frozenset(self._steps[i].name for i in runs)


def _sums_from(terms: _Floats) -> _Floats:
    """Return, in row `i`, the sums of the rows from `i` on; the last row is zero."""
    return np.vstack([np.cumsum(terms[::-1], axis=0)[::-1], np.zeros(terms.shape[1])])


def _owners(steps: Sequence[Step], repeats: Recomputation) -> dict[Buffer, str]:
    """Return the layer to which each repeatable buffer belongs; a copy of an output belongs to the output's layer."""
    outputs = {step.output.region.view.buffer: step.name for step in steps if step.output.region is not None}
    owners: dict[Buffer, str] = {}
    # In the order of computation, so that the owner of a buffer is known before its copies are visited.
    for buffer in sorted(repeats.again, key=lambda b: repeats.makers[b][0]):
        operation = repeats.operations[repeats.makers[buffer][0]]
        source = None
        if buffer not in outputs and isinstance(operation, Transfer):
            source = operation.exchange.source.buffer
        elif buffer not in outputs and isinstance(operation, Run) and operation.kernel.make is copying:
            source = next((b for b in operation.buffers() if b is not buffer), None)
        own = outputs.get(buffer, operation.layer)
        owners[buffer] = own if source is None else owners.get(source, outputs.get(source, own))
    return owners


def _undominated(seconds: _Floats, nbytes: _Floats, most: int) -> NDArray[np.intp]:
    """Return the states that no other state dominates (not slower, and keeping no more), the fastest first.

    If there are more than `most`, some are chosen evenly, among them the fastest and that with the fewest bytes; if
    `most` is 1, only the latter.
    """
    # By time, then by bytes: a state counts only if it keeps fewer bytes than all faster ones.
    order = np.lexsort((nbytes, seconds))
    least = np.minimum.accumulate(nbytes[order])
    better = np.append(True, least[1:] < least[:-1])
    kept = order[better]
    if len(kept) > most:
        kept = kept[np.linspace(0 if most > 1 else len(kept) - 1, len(kept) - 1, most).round().astype(np.intp)]
    return kept
