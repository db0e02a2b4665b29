"""Tests of guard bytes, which detect writes outside of arrays and scratch memory, and of oneDNN's kernels with them."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from halograd.kernels import Geometry, Kernel, KernelError
from halograd.kernels.guards import GUARDS, SIDE, GuardError, Guards, guarded_bytes
from halograd.kernels.kernel import ScratchKernel
from halograd.kernels.memory import Scratch, aligned_empty
from halograd.kernels.onednn import conv, faults
from halograd.kernels.onednn.program import ReferenceOnly
from tests.harness.limits import scaled

from . import reference
from .conftest import Arrays, assert_close
from .random_geometries import examine


def outside(array: np.ndarray, offset: int) -> np.ndarray:
    """Return a view of the byte at an offset from the beginning of an array."""
    raw = array
    while isinstance(raw.base, np.ndarray):
        raw = raw.base
    at = array.__array_interface__["data"][0] - raw.__array_interface__["data"][0] + offset
    return raw[at : at + 1]


@pytest.mark.parametrize("offset, where", [(-1, "in front of an array of 36 B"), (36, "after an array of 36 B")])
def test_a_write_outside_of_an_array_is_found_after_the_kernel(offset, where):
    array = aligned_empty((3, 3), np.float32)
    assert array.__array_interface__["data"][0] % 64 == 0
    array.fill(1)
    GUARDS.check()
    byte = outside(array, offset)
    kernel = Kernel(lambda: byte.fill(7), "vendor:fast")
    GUARDS.each_kernel = True
    GUARDS.operation = "layer 'a'"
    kernel()
    with pytest.raises(GuardError, match=f"layer 'a': vendor:fast wrote .*: 1 bytes {where}"):
        GUARDS.check()
    GUARDS.check()  # the guard bytes are restored


def test_a_write_after_scratch_memory_is_found_although_it_is_shared():
    scratch = Scratch(aligned_empty)
    scratch.reserve(1 << 20)
    first = ScratchKernel(lambda: lambda: scratch.view((1,), np.uint8, 100).fill(7), scratch, 100, "vendor:first")
    other = ScratchKernel(lambda: lambda: scratch.view((200,), np.uint8).fill(7), scratch, 200, "vendor:other")
    other()
    GUARDS.check()
    first()
    with pytest.raises(GuardError, match=r"vendor:first .*: 1 bytes after its scratch memory of 100 B, the first 0 B"):
        GUARDS.check()


def test_nothing_is_guarded_outside_of_the_context():
    guards = Guards()
    assert not guards.active
    with guards, guards:
        assert guards.active
    assert not guards.active
    assert guarded_bytes(1) > SIDE


def thin(backend, channels: int, extents=(64, 64), stride=(2, 2)):
    """Build a kernel for the weight gradient of a strided 1 x 1 convolution."""
    outputs = tuple(n // s for n, s in zip(extents, stride))
    geometry = Geometry((1,) * len(extents), stride, (1,) * len(extents), ((0, 0),) * len(extents))
    x, dy, dw = ((1, *extents, channels), (1, *outputs, 8), (8, *(1,) * len(extents), channels))
    made = [backend.zeros(shape, np.float32) for shape in (x, dy, dw)]
    return backend.conv_backward_filter(*made, None, geometry)


@pytest.mark.parametrize("case", [((64, 64), (2, 2)), ((64, 64), (1, 2)), ((64, 64), (2, 1)), ((4096,), (2,))], ids=str)
def test_the_implementation_that_overruns_is_refused_exactly_where_it_does(onednn, case, monkeypatch):
    """An implementation that overruns is rejected for few channels; without this rule, the guards detect its writes."""
    kernel = thin(onednn, 3, *case)
    kernel()
    GUARDS.check()
    assert kernel.impl.startswith("onednn:") and "ref" not in kernel.impl and "jit_1x1" not in kernel.impl
    full = thin(onednn, 16, *case)
    full()
    GUARDS.check()
    monkeypatch.setattr(faults, "FAULTS", ())
    overrunning = thin(onednn, 3, *case)
    if "jit_1x1" not in overrunning.impl:
        pytest.skip(f"needs a processor on which oneDNN takes jit_1x1, got {overrunning.impl}")
    assert overrunning.impl == full.impl
    overrunning()
    with pytest.raises(GuardError, match=r"onednn:jit_1x1:\w+ wrote outside .*: \d+ bytes after a scratchpad"):
        GUARDS.check()


@pytest.mark.parametrize("impl, lanes", [("jit_1x1:avx2", 8), ("jit_1x1:avx512_core", 16)])
def test_the_refusal_is_for_channels_below_a_vector(impl, lanes):
    def gradient(channels: int, stride=(2, 2), channels_last=True, impl=impl) -> faults.Candidate:
        geometry = Geometry((1, 1), stride, (1, 1), ((0, 0), (0, 0)))
        return faults.Candidate(faults.GRADIENT, impl, channels, (8, 8), (4, 4), geometry, channels_last)

    assert [bool(faults.reason(gradient(c))) for c in (1, lanes - 1, lanes, lanes + 1)] == [True, True, False, False]
    assert not faults.reason(gradient(1, stride=(1, 1)))
    assert not faults.reason(gradient(1, channels_last=False))
    assert not faults.reason(gradient(1, impl="jit:avx2"))
    assert faults.margin_of(gradient(lanes)) == 4 * lanes * 16 and faults.margin_of(gradient(1, stride=(1, 1))) == 0


@pytest.mark.parametrize("filters", [1, 33])
@pytest.mark.parametrize("channels, dtype", [(1, "float32"), (1, "bfloat16"), (16, "bfloat16")])
def test_a_single_column_of_outputs_is_right(onednn, channels, dtype, filters):
    """Convolutions with one column of outputs are right; an implementation of oneDNN 3.7.1 is not."""
    a = Arrays(onednn, dtype)
    for stride in (1, 2, 3):
        geometry = Geometry((3, 4), (1, stride), (1, 1), ((1, 0), (0, 0)))
        x, w, y = a.draw(3, 12, 4, channels), a.draw(filters, 3, 4, channels), a.poisoned(3, 11, 1, filters)
        try:
            kernel = onednn.conv_forward(x, w, None, y, geometry)
        except KernelError as error:
            pytest.skip(f"needs a CPU with AVX-512 for bfloat16: {error}")
        kernel()
        assert_close(y, reference.conv(x, w, None, geometry, y.shape), 1 if dtype == "bfloat16" else 12 * channels)


def test_the_next_implementation_is_taken(onednn, monkeypatch):
    """Rejected implementations are skipped one by one; if all are rejected, the message has the reason."""
    x, dy, dw = (onednn.zeros(shape, np.float32) for shape in ((1, 8, 8, 24), (1, 4, 4, 8), (8, 1, 1, 24)))
    args = (onednn._engine, x, dy, dw, None, Geometry.of((1, 1), 2))
    names = []
    monkeypatch.setattr(conv, "reason", lambda candidate: names.append(candidate.impl) or "for a test")
    with pytest.raises(ReferenceOnly, match="is refused: for a test"):
        conv.backward_filter(*args)
    assert names
    for at, name in enumerate(names):
        refused = set(names[:at])
        if name not in refused:
            monkeypatch.setattr(conv, "reason", lambda c, refused=refused: "for a test" if c.impl in refused else "")
            assert conv.backward_filter(*args).impls == [name]
    monkeypatch.setattr(conv, "reason", lambda candidate: "for a test")
    onednn.take_substitutes()
    dw = onednn.zeros((8, 1, 1, 12), np.float32)  # of two groups, which products by taps do not compute
    kernel = onednn.conv_backward_filter(x, dy, dw, None, Geometry.of((1, 1), 2, groups=2))
    assert kernel.impl.startswith("numpy:")
    (substitute,) = onednn.take_substitutes()
    assert "is refused: for a test" in substitute.reason


def test_random_geometries_stay_within_their_memory():
    """Random geometries write only their own memory and are right; HALOGRAD_GEOMETRIES sets their number."""
    try:
        counts = examine(int(os.environ.get("HALOGRAD_GEOMETRIES", "210")))
    except KernelError as error:
        pytest.skip(f"needs oneDNN: {error}")
    assert not counts.overruns and not counts.wrong
    assert len(counts.kinds) == 5 and min(counts.kinds.values()) > 0


PROGRAM = """
import sys
import numpy as np
import halograd as hg
from mpi4py import MPI

channels, extents = int(sys.argv[1]), [int(n) for n in sys.argv[2:]]
with hg.Communicator(MPI.COMM_WORLD) as comm:
    for extent in extents:
        for name in ("numpy", "onednn"):
            x, t = hg.Input((extent, extent, channels), name="x"), hg.Input((extent // 2, extent // 2, 4), name="t")
            a = hg.Conv(4, 3, 2, 1, name="main", activation="relu")(x)
            a = hg.Conv(4, 3, 1, 1, name="main2")(a)
            y = a + hg.Conv(4, 1, stride=2, name="shortcut")(x)
            network = hg.Network({"prediction": y, "loss": hg.MeanSquaredError()(y, t)})
            with hg.get_backend(name) as kernels, hg.Executor(network, comm, kernels, batch=1) as executor:
                trainer = hg.Trainer(executor, hg.SGD(executor.store), hg.Constant(0.05))
                draw = np.random.default_rng(0)
                executor.set_input("x", draw.standard_normal((1, extent, extent, channels)))
                executor.set_input("t", draw.standard_normal((1, extent // 2, extent // 2, 4)))
                print(name, extent, *(trainer.step() for _ in range(5)), flush=True)
"""


@pytest.mark.parametrize("channels", [1, 3, 6])
def test_training_with_a_thin_strided_convolution(onednn, channels):
    """Training with a thin strided convolution works, in a separate process; an overrun once ended the process."""
    extents = ("64", "96", "128")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(channels), *extents], capture_output=True, text=True, timeout=scaled(120)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    losses = {tuple(line.split()[:2]): [float(v) for v in line.split()[2:]] for line in done.stdout.splitlines()}
    assert len(losses) == 2 * len(extents)
    for extent in extents:
        # Sums of up to 4,096 products in float32, in another order.
        np.testing.assert_allclose(losses["onednn", extent], losses["numpy", extent], rtol=1e-5)
