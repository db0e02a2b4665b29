"""A pass as graphs of a device, which are captured once and then replayed.

A step enqueues hundreds of kernels, each of which costs the host some microseconds; on small blocks the kernels
themselves take less. A graph replays exactly the kernels of its capture. So its kernels may depend on the step only
through device memory (the batch, the parameters, the state of dropout), and none of its calls may wait. Calls that wait
run between two graphs (:mod:`halograd.program.recording`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from halograd.errors import UserError

from ..comm import Communicator
from ..device import Device, DeviceGraph
from ..kernels import Backend
from ..program.recording import Item, Section, apart, sections

__all__ = ["GraphedPass", "check_graph", "graphed_pass"]


def check_graph(comm: Communicator, device: Device) -> None:
    """Validate that graphs are possible. Local, the same on all ranks.

    Raises
    ------
    UserError
        If they are not; the message gives the reason.
    """
    if device.is_host:
        raise UserError('backend.graph: expected kernels = "cudnn" with it; remove graph')
    if comm.instruments.recorder is not None and not getattr(comm.instruments.recorder, "paused", False):
        raise UserError(
            "backend.graph: expected no timeline, whose events cannot be read in a graph; remove graph or "
            "output.timeline"
        )


class GraphedPass:
    """A pass that runs twice without graphs, captures graphs the third time, and replays them afterwards. Collective.

    The first runs compile kernels and allocate buffers, which a capture must not do. `prepare` is called before the
    capture.

    Parameters
    ----------
    items
        The calls of the pass.
    enter
        Function that is called with the name of the first layer of each section.
    """

    WARM = 2

    def __init__(
        self,
        comm: Communicator,
        device: Device,
        items: Sequence[Item],
        enter: Callable[[str], None],
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._device, self._enter, self._prepare, self._count = device, enter, prepare, 0
        self.sections = sections(items, _apart_anywhere(comm, items))
        self._launches: list[Callable[[], object]] = []
        self._recordings: list[DeviceGraph] = []
        self._launched = comm.devices.launched("a graph with messages")

    @property
    def graphs(self) -> int:
        """Number of replayed graphs."""
        return sum(section.graph for section in self.sections) if self._launches else 0

    def __call__(self) -> None:
        if self._launches:
            for section, launch in zip(self.sections, self._launches):
                self._enter(section.items[0].layer)
                launch()
            return
        recording = self._count == self.WARM
        if recording and self._prepare is not None:
            self._prepare()
        launches = []
        for section in self.sections:
            self._enter(section.items[0].layer)
            launches.append(self._recorded(section) if recording else section.run)
            launches[-1]()
        self._count += 1
        if recording:
            self._launches = launches

    def _recorded(self, section: Section) -> Callable[[], object]:
        if not section.graph:
            return section.run if len(section.items) > 1 else section.items[0].call
        graph = self._device.capture(section.run)
        self._recordings.append(graph)
        return partial(_each_of, graph, self._launched) if section.communicates else graph

    def close(self) -> None:
        """Free the graphs, before the messages that they contain."""
        for graph in self._recordings:
            graph.drop()
        self._recordings.clear()
        self._launches.clear()


def _each_of(*calls: Callable[[], object]) -> None:
    for call in calls:
        call()


def _apart_anywhere(comm: Communicator, items: Sequence[Item]) -> set[int]:
    """Return the exchanges and sums that a graph of some rank cannot contain, the same on all ranks. Collective."""
    comm.agree(None)  # a rank with a fault in the set-up does not come here
    found = apart(items)
    while True:
        everyone = set().union(*comm.allgather_objects(sorted(found)))
        more = apart(items, everyone)
        settled = comm.allgather_objects(more == everyone)
        found = more
        if all(settled):
            return found


def graphed_pass(
    comm: Communicator, kernels: Backend, items: Sequence[Item], phase: str, enter: Callable[[str, str], None]
) -> GraphedPass:
    """Return a training pass as graphs, with operations on gradients between them. Collective.

    A single rank sends nothing: these operations then come before forward or after backward, and the pass is one graph.
    """
    if comm.size == 1:
        items = sorted(items, key=lambda item: item.on_gradients != (phase == "forward"))
    return GraphedPass(comm, kernels.device, items, partial(enter, phase), getattr(kernels, "before_capture", None))
