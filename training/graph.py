"""The forward and backward pass of a step as one graph: recorded once, then launched at once.

A step enqueues hundreds of kernels, each of which costs the host some microseconds; on small blocks that is longer than
the kernels take. A graph repeats exactly what was enqueued while it was recorded, so nothing in it may depend on the
step but by what lies on the device (the batch, the parameters, the state of dropout), and nothing may wait.
"""

from __future__ import annotations

from collections.abc import Callable

from halograd.comm import Communicator
from halograd.device import Device
from halograd.errors import UserError
from halograd.program.operations import Run
from halograd.program.program import Program

__all__ = ["GraphedPass", "check_graph"]


def check_graph(program: Program, comm: Communicator, device: Device) -> None:
    """Refuse what cannot be in a graph. Local, alike on all ranks.

    Raises
    ------
    UserError
        Naming what stands in the way.
    """
    if device.is_host:
        raise UserError('backend.graph: expected kernels = "cudnn" with it; remove graph')
    if comm.size > 1:
        raise UserError(
            f"backend.graph: expected one rank, got {comm.size}: messages pass through the host, which a graph cannot "
            "wait for; remove graph"
        )
    if comm.recorder is not None and not getattr(comm.recorder, "paused", False):
        raise UserError(
            "backend.graph: expected no timeline, which times every layer by events that nobody may ask in a graph; "
            "remove graph or output.timeline"
        )
    for run in (operation for operation in program if isinstance(operation, Run)):
        if not run.kernel.recordable:
            raise UserError(
                f"backend.graph: expected layers whose kernels do the same in every step, got layer {run.layer!r}, "
                "which makes its arrays or numbers anew; remove graph"
            )


class GraphedPass:
    """Runs something twice as it is, the third time recording it, from then on as a graph. Local.

    What runs first compiles kernels and makes buffers, which a recording must not. `prepare` is called before it.
    """

    WARM = 2

    def __init__(self, device: Device, run: Callable[[], None], prepare: Callable[[], None] | None = None) -> None:
        self._device, self._run, self._prepare, self._count = device, run, prepare, 0
        self._launch: Callable[[], None] | None = None

    @property
    def recorded(self) -> bool:
        """Whether a graph is launched."""
        return self._launch is not None

    def __call__(self) -> None:
        if self._launch is None:
            if self._count < self.WARM:
                self._count += 1
                self._run()
                return
            if self._prepare is not None:
                self._prepare()
            self._launch = self._device.capture(self._run)
        self._launch()
