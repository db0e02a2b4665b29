"""A pass as graphs of a device, which are captured once and then replayed.

A step enqueues hundreds of kernels, each of which costs the host some microseconds; on small blocks the kernels
themselves take less. A graph replays exactly the kernels of its capture. So its kernels may depend on the step only
through device memory (the batch, the parameters, the state of dropout), and none of its calls may wait. Calls that wait
run between two graphs (:mod:`halograd.program.recording`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from halograd.errors import UserError

from ..comm import Communicator
from ..device import Device, DeviceGraph
from ..kernels import Backend
from ..program.recording import Item, Section, sections, separate_pairs

__all__ = ["GraphedPass", "Graphs", "check_graph", "graphed_pass"]

_log = logging.getLogger(__name__)

#: When passes are replayed as graphs: always, never, or if a measurement shows that this saves time.
Graphs = bool | Literal["auto"]

#: Time of the host to enqueue what graphs would replay, relative to that of the device to run the pass, from which
#: graphs are used. Where the host is slower the device waits; a host that also reads batches and writes checkpoints
#: needs some time in reserve, and pauses between kernels are shorter in a graph: on an H200, ResNet-50 with batch 64
#: took 4 % less at a share of 0.41, mesh-2K nothing at 0.13.
PAYS = 0.3


def check_graph(comm: Communicator, device: Device, graph: Graphs) -> bool:
    """Return whether training passes may be graphs. Local, the same on all ranks.

    Raises
    ------
    UserError
        If they are not possible, but requested; the message gives the reason.
    """
    if graph is not True:
        # With "auto", graphs are used only where they are possible: no error.
        timed = comm.instruments.recorder is not None and not getattr(comm.instruments.recorder, "paused", False)
        return bool(graph) and device.captures and not timed
    if device.is_host:
        raise UserError('backend.graph: expected kernels = "cudnn" with it; remove graph')
    if comm.instruments.recorder is not None and not getattr(comm.instruments.recorder, "paused", False):
        raise UserError(
            "backend.graph: expected no timeline, whose events cannot be read in a graph; remove graph or "
            "output.timeline"
        )
    return True


class GraphedPass:
    """A pass that runs twice without graphs, captures graphs the third time, and replays them afterwards. Collective.

    The first two runs compile kernels and allocate buffers, which a capture must not do. `prepare` is called before the
    capture.

    If `measures`, the second run is measured, and the capture is put off to the fifth, before which all ranks decide
    whether graphs pay; if not, there are none. The device has long reached the end of the second run by then, so that
    nothing waits. A fault of the capture of a section without messages is then a warning, and the rank goes on without
    that graph.

    Parameters
    ----------
    measures
        Whether a measurement decides if graphs are used.
    items
        The calls of the pass.
    enter
        Function that is called with the name of the first layer of each section.
    """

    WARM, DECIDES = 2, 4

    def __init__(
        self,
        comm: Communicator,
        device: Device,
        items: Sequence[Item],
        enter: Callable[[str], None],
        prepare: Callable[[], None] | None = None,
        measures: bool = False,
    ) -> None:
        self._comm, self._device, self._enter, self._prepare, self._count = comm, device, enter, prepare, 0
        self.measures = measures
        # Passes count from 0: this is the fifth or the third one.
        self._captured_at = self.DECIDES if measures else self.WARM
        self._measured: Any = None
        self.sections = sections(items, _separate_anywhere(comm, items))
        self._launches: list[Callable[[], object]] = []
        self._recordings: list[DeviceGraph] = []
        self._launched = comm.devices.launched("a graph with messages")

    @property
    def graphs(self) -> int:
        """Number of sections that graphs replay; 0 before the capture, or if no graphs are used."""
        return len(self._recordings)

    def __call__(self) -> None:
        if self._launches:
            for section, launch in zip(self.sections, self._launches):
                self._enter(section.items[0].layer)
                launch()
            return
        measuring = self.measures and self._count == self.WARM - 1
        recording = self._count == self._captured_at and (not self.measures or self._pays())
        if recording and self._prepare is not None:
            self._prepare()
        first, enqueuing = self._device.timestamp() if measuring else None, 0.0
        launches = []
        for section in self.sections:
            self._enter(section.items[0].layer)
            launches.append(self._recorded(section) if recording else section.run)
            begin = time.perf_counter()
            # A capture records kernels without running them, so the pass itself runs by this launch.
            launches[-1]()
            if section.graph:  # other calls may wait for messages, with graphs too
                enqueuing += time.perf_counter() - begin
        if measuring:
            self._measured = enqueuing, first, self._device.timestamp(), self._device.mark()
        self._count += 1
        if recording:
            self._launches = launches

    def _pays(self) -> bool:
        """Return whether the host takes so long to enqueue graphed sections, on any rank, that graphs save time.
        Collective.
        """
        host, first, last, event = self._measured
        event.wait()
        # The maximum: all ranks use graphs or none does, because messages must be in the same order everywhere.
        share = self._comm.allreduce_scalar(host / max(self._device.seconds(first, last), 1e-9), "max")
        pays, self._measured = share >= PAYS, None
        if self._comm.rank == 0:
            text = "a pass from layer %s takes the host up to %.0f %% of the device's time to enqueue: %s graphs"
            _log.info(text, self.sections[0].items[0].layer, 100 * share, "with" if pays else "without")
        return pays

    def _recorded(self, section: Section) -> Callable[[], object]:
        if not section.graph:  # as it will be called in every step: a single call without the loop around it
            return section.run if len(section.items) > 1 else section.items[0].call
        try:
            graph = self._device.capture(section.run)
        except Exception as error:
            # Messages of a graph and those of another rank's calls could be in different orders: without them a rank
            # may go on alone.
            if not self.measures or section.communicates:
                raise
            _log.warning("backend.graph: a pass cannot be captured (%s): it runs without graphs", error)
            return section.run
        self._recordings.append(graph)
        return partial(_each_of, graph, self._launched) if section.communicates else graph

    def close(self) -> None:
        """Free the graphs. Call it before the messages that they contain are freed."""
        for graph in self._recordings:
            graph.drop()
        self._recordings.clear()
        self._launches.clear()


def _each_of(*calls: Callable[[], object]) -> None:
    for call in calls:
        call()


def _separate_anywhere(comm: Communicator, items: Sequence[Item]) -> set[int]:
    """Return the numbers (`Item.pair`) of the exchanges and sums that a graph of some rank cannot contain, the same on
    all ranks. Collective.
    """
    comm.agree(None)  # a rank with a fault in the set-up does not come here
    # What is separate on one rank may separate more on another: repeat until no rank changes.
    separate = separate_pairs(items)
    while True:
        everyone = set().union(*comm.allgather_objects(sorted(separate)))
        more = separate_pairs(items, everyone)
        unchanged = comm.allgather_objects(more == everyone)
        separate = more
        if all(unchanged):
            return separate


def graphed_pass(
    comm: Communicator,
    kernels: Backend,
    items: Sequence[Item],
    phase: str,
    enter: Callable[[str, str], None],
    measures: bool = False,
) -> GraphedPass:
    """Return a training pass as graphs, with operations on gradients between them. Collective.

    A single rank sends nothing: these operations then come before forward or after backward, and the pass is one graph.
    """
    if comm.size == 1:
        # A stable sort: the order within operations on gradients, and within the others, stays.
        items = sorted(items, key=lambda item: item.on_gradients != (phase == "forward"))
    prepare = getattr(kernels, "before_capture", None)
    return GraphedPass(comm, kernels.device, items, partial(enter, phase), prepare, measures)
