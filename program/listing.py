"""The reader that lists: a program as text, an operation per line."""

from __future__ import annotations

from collections.abc import Iterator

from .operations import Operation, Run, Total, Transfer
from .program import Program
from .views import View

__all__ = ["lines_of"]


def lines_of(program: Program, layers: frozenset[str] | None = None) -> Iterator[str]:
    """Operations in order, with the arrays that they use; of some layers only, if given.

    ::

        forward  conv1    start halo: [2x8x4x3] @0 -> [2x8x6x3] @4096
        forward  conv1    conv_forward(x [2x8x6x3] @4096, w [4x3x3x3] conv1/w, y [2x8x4x4] @512)
    """
    rank, target = program.target.rank, program.target
    total = program.placement.size
    kind = f"batch {target.batch}, {target.dtype.name}, arena of {total} B"
    yield f"program of {program.network}: rank {rank} of {target.size}, {kind}"
    for way, segments in (("forward", program.forward), ("backward", program.backward)):
        for operation in (o for segment in segments for o in segment.operations):
            if layers is None or operation.layer.partition(" (")[0] in layers:
                yield f"{way:8} {operation.layer:20} {_text(program, operation)}"


def _text(program: Program, operation: Operation) -> str:
    when = f" [{operation.when}]" if operation.when else ""
    if isinstance(operation, Transfer):
        made = operation.exchange
        return f"{operation.end} {made.kind}: {_view(program, made.source)} -> {_view(program, made.target)}{when}"
    if isinstance(operation, Total):
        one = operation.sum
        return f"{operation.end} sum of {one.kind}: {_view(program, one.view)}, {one.groups.members_each} ranks{when}"
    assert isinstance(operation, Run)
    kernel = operation.kernel
    make = getattr(kernel.make, "func", kernel.make)
    name = getattr(make, "__name__", str(make)).strip("_") + (f".{operation.method}" if operation.method else "")
    names = kernel.views if operation.uses is None else operation.uses
    used = [(k, v) for k, v in kernel.views.items() if v is not None and k in names]
    more = f", guards {len(operation.guarded)} operations" if operation.guarded else ""
    return f"{name}({', '.join(f'{k} {_view(program, v)}' for k, v in used)}){more}{when}"


def _view(program: Program, view: View) -> str:
    """Shape, and where it lies: an offset in the arena [B], or the name of a parameter."""
    shape = "x".join(map(str, view.shape))
    if view.buffer.place is not None:
        return f"[{shape}] {view.buffer.place[1]}"
    return f"[{shape}] @{program.placement.offsets.get(view.buffer, 0)}"
