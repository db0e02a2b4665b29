"""The operations of a forward pass that lead to some of its results, so that these can be computed alone."""

from __future__ import annotations

from collections.abc import Collection

from ..lowering.operations import Operation, Run, Total, Transfer
from ..lowering.views import Buffer
from .program import Program

__all__ = ["operations_before"]


def operations_before(program: Program, wanted: Collection[Operation]) -> tuple[set[Operation], set[Buffer]]:
    """Return operations of the forward pass with all operations that write what they read. Local.

    Returns
    -------
    The operations, `wanted` included, and the buffers that they read, those of inputs among them.
    """
    found, read = set[Operation](), set[Buffer]()
    for operation in reversed([o for segment in program.forward for o in segment.operations]):
        if isinstance(operation, Run):
            views = operation.kernel.views
            written = [views[name] for name in operation.access.results(views)]
            if operation in wanted or any(view is not None and view.buffer in read for view in written):
                found.add(operation)
                read |= {view.buffer for name in operation.access.read(views) if (view := views[name]) is not None}
        elif isinstance(operation, Transfer) and operation.exchange.target.buffer in read:
            found.add(operation)
            read.add(operation.exchange.source.buffer)
        elif isinstance(operation, Total) and operation.sum.view.buffer in read:
            found.add(operation)
    return found, read
