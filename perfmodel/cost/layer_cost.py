"""What one layer costs under one cut: kernels, halos, statistics, on the rank that has most to do.

All times in [s]. Terms are those of Dryden et al. 2019, Section V-A: forward ``C``, backward ``Cx`` and ``Cw``, halos
``SR``; what hides behind what follows the runtime (`docs/architecture.md`)::

    pad        forward   pack | halo of x | unpack | kernel
    overlap    forward   pack | max(halo of x, kernel) | unpack | boundary strips again
    both       backward  pack | max(halo of dy, filter gradient) | unpack | data gradient
    channels   forward   pack | x | unpack | kernel | sum of y
               backward  dy | data gradient | max(sum of dx, filter gradient)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from halograd.dtensor import Blocks, Box, input_box, intervals
from halograd.layers import Conv, Redistribute
from halograd.layers.strips import boundary_boxes
from halograd.perfmodel.cost.moves import Moves, contracts, moves_of, windows_of
from halograd.perfmodel.cost.stages import Stage
from halograd.perfmodel.cost.sums import Sums, sums_of
from halograd.perfmodel.cost.wires import Wires
from halograd.perfmodel.kernel_times import KernelTimes, LayerTime

__all__ = ["LayerCost", "Pricing", "layer_cost"]


@dataclass(frozen=True)
class LayerCost:
    """Times of one layer in one step [s].

    Attributes
    ----------
    forward, backward_data, backward_filter
        Kernels.
    halo_forward, halo_backward
        From the start of the halo exchange until the last rank has it, packing left out. Where channels are cut,
        with the input channels that other ranks own, and the sums of their gradients.
    channel_forward, channel_backward
        Partial sums of `y` to their owners, and `dy` from there.
    redistribution_forward, redistribution_backward
        The same of changes of layout (`Redistribute`, `Flatten`, `GlobalAveragePool`).
    packing_forward, packing_backward
        Into and out of messages.
    strips
        The boundary computed again, if the halo of `x` is overlapped.
    statistics_forward, statistics_backward
        Sums that are waited for.
    overlaps
        Whether the halo of `x` travels behind the kernel.
    hides
        Whether the halo of `dy` travels behind the filter gradient.
    """

    forward: float = 0.0
    backward_data: float = 0.0
    backward_filter: float = 0.0
    halo_forward: float = 0.0
    halo_backward: float = 0.0
    channel_forward: float = 0.0
    channel_backward: float = 0.0
    redistribution_forward: float = 0.0
    redistribution_backward: float = 0.0
    packing_forward: float = 0.0
    packing_backward: float = 0.0
    strips: float = 0.0
    statistics_forward: float = 0.0
    statistics_backward: float = 0.0
    overlaps: bool = False
    hides: bool = False

    @property
    def compute(self) -> float:
        """All kernels."""
        return self.forward + self.backward_data + self.backward_filter + self.strips * self.overlaps

    @property
    def exposed_forward(self) -> float:
        """Of the halo of `x`, what nothing hides."""
        return max(0.0, self.halo_forward - self.forward) if self.overlaps else self.halo_forward

    @property
    def exposed_backward(self) -> float:
        """Of the backward halo, what nothing hides."""
        return max(0.0, self.halo_backward - self.backward_filter) if self.hides else self.halo_backward

    @property
    def forward_seconds(self) -> float:
        """From the layer's start to its end, forward."""
        beside = self.packing_forward + self.channel_forward + self.redistribution_forward + self.statistics_forward
        return self.forward + self.strips * self.overlaps + self.exposed_forward + beside

    @property
    def backward_seconds(self) -> float:
        """The same, backward."""
        beside = self.packing_backward + self.channel_backward + self.redistribution_backward + self.statistics_backward
        return self.backward_data + self.backward_filter + self.exposed_backward + beside

    @property
    def seconds(self) -> float:
        """Both; all-reduces of parameters not included."""
        return self.forward_seconds + self.backward_seconds

    def with_halo(self, algorithm: str) -> LayerCost:
        """With the halo algorithm ``"pad"`` or ``"overlap"``."""
        return replace(self, overlaps=algorithm == "overlap" and self.strips > 0)


class Pricing:
    """What prices layers: links and kernels of a machine. Remembers what it was asked.

    Parameters
    ----------
    wires
        Times of communication.
    times
        Times of kernels.
    dtype
        Of the computation.
    best_halo
        What ``halo = "auto"`` means: the cheaper algorithm (True, for planning), or that of the runtime: overlapped
        where messages cross a network (False).
    """

    def __init__(self, wires: Wires, times: KernelTimes, dtype: str = "float32", best_halo: bool = False) -> None:
        self.wires, self.times, self.dtype, self.best_halo = wires, times, dtype, best_halo

    def layer_time(self, stage: Stage, train: bool = True) -> LayerTime:
        """Kernels of a stage on the fullest rank."""
        if isinstance(stage.layer, Redistribute):
            return LayerTime(0.0)
        inputs = [_local(value.blocks) for value in stage.inputs]
        filters = None
        if contracts(stage):
            channels, inner = stage.parts[4:]
            inputs[0] = (*inputs[0][:-1], intervals(stage.inputs[0].shape[-1], inner)[0][1])
            filters = intervals(stage.output.shape[-1], channels * inner)[inner - 1][1]
        return self.times.time(
            stage.layer,
            inputs,
            self.dtype,
            train and stage.backward,
            input_gradient=any(value.trainable for value in stage.inputs),
            filters=filters,
            outputs=_local(stage.output.blocks)[1:-1] or None,
            ranks=stage.output.blocks.placed,
            options=stage.options,
        )


def layer_cost(
    stage: Stage, pricing: Pricing, ranks: int, gathered: set | None = None, train: bool = True
) -> LayerCost:
    """The cost of one stage.

    Parameters
    ----------
    ranks
        Of the communicator.
    gathered
        What stages before have gathered already, see `moves_of`.
    train
        Whether there is a backward pass.
    """
    time = pricing.layer_time(stage, train)
    fresh = moves_of(stage, gathered)
    moves = Moves(fresh.forward, fresh.backward if train else ())
    wires = pricing.wires
    terms = _communication(moves, wires) | _statistics(sums_of(stage, ranks), wires, train)
    more = wires.machine.runtime.layer
    data, filter_ = (time.backward_data + more, time.backward_filter) if train and stage.backward else (0.0, 0.0)
    hides = isinstance(stage.layer, Conv) or contracts(stage)
    cost = LayerCost(time.forward + more, data, filter_, hides=hides, **terms)  # type: ignore[arg-type]
    if not isinstance(stage.layer, Conv) or contracts(stage) or not cost.halo_forward:
        return cost
    cost = replace(cost, strips=_strips(stage, pricing))
    return _with_algorithm(cost, stage.options.get("halo", "auto"), pricing)


def _with_algorithm(cost: LayerCost, asked: str, pricing: Pricing) -> LayerCost:
    if asked != "auto":
        return cost.with_halo(asked)
    if pricing.best_halo:
        return min((cost.with_halo("pad"), cost.with_halo("overlap")), key=lambda c: c.forward_seconds)
    return cost.with_halo("overlap" if pricing.wires.waits_for_network else "pad")


def _local(blocks: Blocks) -> tuple[int, ...]:
    """Shape of the fullest block."""
    return tuple(int(e.max()) for e in blocks.extents)


def _communication(moves: Moves, wires: Wires) -> dict[str, float]:
    terms: dict[str, float] = {}
    for way, some in (("forward", moves.forward), ("backward", moves.backward)):
        for kind, term in (("halo", "halo"), ("channel", "channel"), ("redistribute", "redistribution")):
            terms[f"{term}_{way}"] = sum(wires.exchange(m) for m in some if m.kind == kind)
        terms[f"packing_{way}"] = sum(wires.packing(m) for m in some)
    return terms


def _statistics(sums: Sums, wires: Wires, train: bool) -> dict[str, float]:
    backward = sums.backward if train else ()
    return {
        "statistics_forward": sum(wires.sum(*s.largest) for s in sums.forward),
        "statistics_backward": sum(wires.sum(*s.largest) for s in backward),
    }


def _strips(stage: Stage, pricing: Pricing) -> float:
    """Kernels of the boundary strips of the rank in the middle [s]."""
    out, value = stage.output.blocks, stage.inputs[0]
    rank = 0
    for parts in out.grid:
        rank = rank * parts + parts // 2
    box, whole = out.box(rank), Box.of_shape(value.shape)
    if not box.size:
        return 0.0
    windows = windows_of(stage.layer, stage.shapes[0])
    total = 0.0
    for strip in boundary_boxes(windows, box, value.blocks.box(rank), value.shape):
        need = input_box(windows, strip, value.shape[-1]) & whole
        time = pricing.times.time(stage.layer, [need.shape], pricing.dtype, False, outputs=strip.shape[1:-1])
        total += time.forward
    return total
