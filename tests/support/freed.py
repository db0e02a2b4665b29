"""Function that overwrites memory which no operation declares, so that a read of it gives a wrong result."""

from functools import partial
from weakref import WeakKeyDictionary

from halograd.program.runner import Runner

__all__ = ["overwrite"]


def overwrite(monkeypatch):
    """In every step, overwrite each host buffer before its first declared use and after its last one."""
    made, uses = Runner._call, WeakKeyDictionary()

    def called(self, operation):
        call = made(self, operation)
        if not self.kernels.device.is_host:
            return call
        if self.program not in uses:
            uses[self.program] = _first_and_last_uses(self.program)
        before, after = (
            [
                self.arena[at : at + buffer.nbytes]
                for buffer in buffers
                for at in [self.program.placement.offsets[buffer]]
            ]
            for buffers in (ends.get(operation, ()) for ends in uses[self.program])
        )
        return partial(_between, before, call, after) if before or after else call

    monkeypatch.setattr(Runner, "_call", called)


def _between(before, call, after):
    for memory in before:
        memory.fill(0xFF)  # NaN, or -1
    result = call()
    for memory in after:
        memory.fill(0xFF)
    return result


def _first_and_last_uses(program):
    """Return the buffers in the shared arena that each operation uses first, and those that it uses last."""
    values = (v for v in program.values.values() if v.read or v.kept)
    gradients = (program.values[name].gradient for name in program.target.probed)
    always = {v.region.view.buffer for v in values} | {g.view.buffer for g in gradients if g is not None}
    first, last = {}, {}
    for operation in program:
        for buffer in operation.buffers():
            if buffer.location is None and not buffer.kept and buffer not in always:
                first.setdefault(buffer, operation)
                last[buffer] = operation
    return tuple(_by_operation(found) for found in (first, last))


def _by_operation(found):
    made = {}
    for buffer, operation in found.items():
        made.setdefault(operation, []).append(buffer)
    return made
