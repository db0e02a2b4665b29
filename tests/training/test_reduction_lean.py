"""Every scheme of chunks sends exactly the bytes of the formula, and a step of it allocates nothing."""

import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers.parameter_blocks import parameter_blocks
from halograd.layers.reduction_chunks import chunks_of, gradient_layers
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy
from halograd.models import lenet5
from halograd.training.executor import Executor
from tests.support.lean import check_allocations
from tests.training.reductions import BUCKET, advance, build, trainer_of

NAMES = {"blocking": 0, "per_layer": 0, "bucketed": 0, "two_chunks": 3}
KINDS = {
    "plain": {},
    "deterministic": {"deterministic": True},
    "bfloat16": {"payload": "bfloat16"},
    "bfloat16 alone": {"payload": "bfloat16", "error_feedback": False},
}
LINE = 64  # [B]: parameters begin at multiples of it


def strategy_of(size, name, kind):
    return Strategy({"sample": size}, bucket_bytes=BUCKET, reduction=Scheme(name, NAMES[name], **KINDS[kind]))


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("transport", ["mpi", "auto"])
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "plain") for name in NAMES), *(("two_chunks", kind) for kind in KINDS)]
)
def test_bytes_and_messages_of_a_step_are_those_of_the_formula(name, kind, transport):
    """One message per chunk, of its parameters in whole lines; half of it in bfloat16."""
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        strategy = strategy_of(comm.size, name, kind)
        network = lenet5(classes=4, resolution=28)
        layers = gradient_layers(network, parameter_blocks(network, strategy, comm.size))
        chunks = chunks_of(layers, strategy.reduction, BUCKET, 4)
        lines = sum(-(-4 * gradient.size // LINE) for chunk in chunks for gradient in chunk.gradients)
        per_line = LINE // 2 if kind.startswith("bfloat16") else LINE
        several = int(comm.size > 1)
        with build("lenet", comm, strategy) as executor:
            trainer = trainer_of(executor)
            advance(trainer, [0])
            trainer.settle()
            comm.counters.reset()
            advance(trainer, [1, 2])
            found = comm.counters["allreduce"]
            assert found.messages == 2 * len(chunks) * several
            assert found.bytes == 2 * lines * per_line * several


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("transport", ["mpi", "auto"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("blocking", "plain"),
        ("per_layer", "plain"),
        ("two_chunks", "plain"),
        ("bucketed", "deterministic"),
        ("bucketed", "bfloat16"),
        ("blocking", "bfloat16 alone"),
    ],
)
def test_a_step_allocates_no_array(name, kind, transport):
    """Gradients have 400 KiB: any temporary of a quarter of them would be seen."""
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        strategy = strategy_of(comm.size, name, kind)
        network = lenet5(classes=4, resolution=36)
        with Executor(network, comm, get_backend("onednn"), 4, strategy) as executor:
            assert sum(b.grads.nbytes for b in executor.store.buckets) > 400 << 10
            trainer = trainer_of(executor)
            advance(trainer, [0, 1])
            check_allocations(comm, lambda: advance(trainer, [2, 3]), 96 * 1024)


@pytest.mark.mpi(min_size=1)
def test_error_feedback_takes_the_memory_of_the_gradients():
    with Communicator(MPI.COMM_WORLD) as comm:
        with build("lenet", comm, strategy_of(comm.size, "bucketed", "bfloat16")) as executor:
            held = executor.memory.bytes
            assert held["gradient error"] == held["parameter gradient"]
        for kind in ("plain", "bfloat16 alone"):
            with build("lenet", comm, strategy_of(comm.size, "bucketed", kind)) as executor:
                assert "gradient error" not in executor.memory.bytes
