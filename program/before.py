"""The operations of a forward pass that lead to some of its results, so that these can be computed alone."""

from __future__ import annotations

from collections.abc import Collection

from ..lowering.operations import Operation, Run, Total, Transfer
from ..lowering.views import Buffer
from .program import Program

__all__ = ["operations_before"]


def operations_before(program: Program, goals: Collection[Operation]) -> tuple[set[Operation], set[Buffer]]:
    """Return `goals` and all operations of the forward pass on which they depend. Local.

    Returns
    -------
    The operations, and the buffers that they read, including those of the inputs.
    """
    operations, read = set[Operation](), set[Buffer]()
    # Backwards, so that `read` contains what later operations need when their writers are visited.
    for operation in reversed([o for segment in program.forward for o in segment.operations]):
        if isinstance(operation, Run):
            views = operation.kernel.views
            written = [views[name] for name in operation.access.results(views)]
            if operation in goals or any(view is not None and view.buffer in read for view in written):
                operations.add(operation)
                read |= {view.buffer for name in operation.access.read(views) if (view := views[name]) is not None}
        elif isinstance(operation, Transfer) and operation.exchange.target.buffer in read:
            operations.add(operation)
            read.add(operation.exchange.source.buffer)
        # A sum is in place: the buffer that it reads is in `read` already.
        elif isinstance(operation, Total) and operation.sum.view.buffer in read:
            operations.add(operation)
    return operations, read
