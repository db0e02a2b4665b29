"""The test doubles have the functions of CuPy, with the same names and numbers of arguments. Needs CuPy, no GPU."""

import inspect

import pytest

from tests.support.fake_cuda import FakeCuda, FakeCupy, FakeEvent, FakeStream
from tests.support.fake_nccl import DTYPES, FakeCommunicator, FakeNccl
from tests.support.trace import Trace

cupy = pytest.importorskip("cupy", reason="needs CuPy (no GPU): pip install 'halograd[gpu]'")


@pytest.fixture(scope="module")
def nccl():
    from cupy.cuda import nccl

    if not nccl.available:
        pytest.skip("needs NCCL (no GPU): pip install nvidia-nccl-cu13 (300 MB)")
    return nccl


def arguments(doc):
    """Return the number of arguments in a Cython signature such as ``f(self, intptr_t a, int b)``."""
    return doc.splitlines()[0].partition("(")[2].partition(")")[0].count(",") + 1


CALLS = ["send", "recv", "allReduce", "reduceScatter", "reduce", "allGather", "broadcast"]


@pytest.mark.parametrize("name", [*CALLS, "commSplit", "abort", "destroy", "check_async_error"])
def test_calls_of_nccl(name, nccl):
    real = getattr(nccl.NcclCommunicator, name).__doc__
    ours = inspect.signature(getattr(FakeCommunicator, name)).parameters
    assert real is None or arguments(real) == len(ours), real


def test_constants_of_nccl(nccl):
    for name, (number, _) in DTYPES.items():
        assert getattr(nccl, name) == number
    assert nccl.NCCL_SUM == FakeNccl.NCCL_SUM
    for name in ("groupStart", "groupEnd", "get_unique_id", "get_version"):
        assert callable(getattr(nccl, name)) and callable(getattr(FakeNccl, name))
    assert nccl.NcclConfig(split_share=1).split_share == FakeNccl.NcclConfig(split_share=1).split_share
    assert len(nccl.get_unique_id()) == 128 and isinstance(nccl.get_unique_id(), bytes)


def test_the_runtime():
    double = FakeCupy(FakeCuda(Trace(0), lambda event: None, lambda: None))
    for name in vars(double.cuda.runtime):
        assert callable(getattr(cupy.cuda.runtime, name)), name
    for name in vars(double.cuda):
        assert hasattr(cupy.cuda, name), name


def test_streams_and_events():
    for double, real in ((FakeStream, cupy.cuda.Stream), (FakeEvent, cupy.cuda.Event)):
        own = {"enqueue", "run_to", "come_to"}  # of the double's inside
        names = {name for name, item in vars(double).items() if not name.startswith("_") and name not in own}
        assert all(hasattr(real, name) for name in names), names
    keywords = set(inspect.signature(cupy.cuda.Event.__init__).parameters)
    assert "disable_timing" in keywords
    assert {"non_blocking", "priority"} <= set(inspect.signature(cupy.cuda.Stream.__init__).parameters)
