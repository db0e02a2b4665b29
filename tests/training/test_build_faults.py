"""Tests that an error of one rank during building is raised on all ranks, wherever it occurs."""

import os
from contextlib import nullcontext

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.comm.transports.host_links import HostLinks
from halograd.dtensor import Exchange
from halograd.kernels import get_backend
from halograd.kernels.onednn import OnednnBackend
from halograd.layers import convolution as convolution_module
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy
from halograd.lowering.context import Context
from halograd.lowering.views import Value
from halograd.program import program as program_module
from halograd.program.runner import Runner
from halograd.training import executor as executor_module
from halograd.training import train as train_run
from halograd.training.evaluation import Evaluation
from halograd.training.executor import Executor
from halograd.training.memory import Memory
from halograd.training.optimizers import SGD
from halograd.training.reduction import Reducer
from halograd.training.schedules import Constant
from halograd.training.store import ParameterStore
from halograd.training.trainer import Trainer
from tests.support.inject import AtCall, Injected, raising
from tests.training.steps import fill

#: Faults per case of `test_a_fault_anywhere`, of some 12000 calls of a build: for a campaign set it to thousands.
ANYWHERE = int(os.environ.get("HALOGRAD_TEST_FAULTS", "4"))
EMULATED = "emulated:alpha=1e-6,beta=1e-10,node=2"
LIMIT = 120  # [s], against deadlock: a build takes some 0.2 s


def network() -> hg.Network:
    """Return a network with halos in both directions, groups of ranks, redistributions, and summed gradients."""
    x = hg.Input((12, 10, 3), "x")
    y = hg.Conv(4, 3, padding=1, activation="relu", name="conv1")(x)
    y = hg.BatchNorm(statistics="sample", name="batch_norm")(y)
    y = hg.MaxPool(3, 2, padding=1, name="pool")(y)
    y = hg.GroupNorm(2, name="group_norm")(y)
    y = hg.Conv(4, 5, padding=2, name="conv2")(y)
    y = hg.ConvTranspose(3, 2, 2, name="up")(y)
    y = hg.GlobalAveragePool(name="average")(y)
    y = hg.Dense(4, name="dense2")(hg.Dense(8, name="dense1")(y))
    return hg.Network({"loss": hg.MeanSquaredError(name="loss")(y, hg.Input((4,), "target"))}, name="net")


def strategy(size: int, kind: str) -> Strategy:
    """Return a strategy with a scheme of gradient reduction, or a cut of channels."""
    schemes = {
        "channels": Scheme("bucketed"),
        "replicated": Scheme("bucketed", replicated_dense=1),
        "rounded": Scheme("bucketed", payload="bfloat16"),
    }
    layers = {
        "conv2": {"channel": 2, "height": size // 2},
        "dense1": {"channel": 2, "sample": size // 2},
        "dense2": {"sample": 1},
    }
    return Strategy(
        {"height": 2, "sample": size // 2},
        layers if kind == "channels" else {},
        {"halo": "overlap"},
        256,
        schemes.get(kind) or Scheme(kind),
    )


def build_and_step(comm, kind="bucketed", steps=1) -> float:
    """Build an executor and train; return the loss of the last step. Collective."""
    with (
        get_backend("onednn") as kernels,
        Executor(network(), comm, kernels, 4, strategy(comm.size, kind), seed=1) as executor,
    ):
        trainer = Trainer(executor, SGD(executor.store, momentum=0.5), Constant(0.01), clip_norm=1.0)
        Evaluation(executor)
        loss = float("nan")
        for _ in range(steps):
            fill(executor, 0)
            loss = trainer.step()
        return loss


def errors(comm, call) -> list[str]:
    """Return the errors of `call` on all ranks, empty texts for none. Collective."""
    try:
        call()
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        assert error.agreed == comm.size, told
    else:
        told = ""
    return comm.allgather_objects(told)


STAGES = {
    "validation": (Strategy, "validate", 1),
    "precision": (executor_module, "check_dtype", 1),
    "store": (ParameterStore, "__post_init__", 1),
    "compilation": (executor_module, "compile_program", 1),
    "storage": (Value, "choose_storage", 5),
    "lowering": (Context, "gather", 3),
    "arena": (program_module, "placement_of", 1),
    "memory": (Memory, "keep", 1),
    "views": (Runner, "view", 6),
    "forward kernel": (OnednnBackend, "_conv_forward", 2),
    "kernel of a boundary strip": (OnednnBackend, "_conv_forward", 4),
    "pooling kernel": (OnednnBackend, "_max_pool", 1),
    "norm kernel": (OnednnBackend, "_batch_norm", 2),
    "dense kernel": (OnednnBackend, "_dense_forward", 1),
    "filter gradient": (OnednnBackend, "_conv_backward_filter", 1),
    "data gradient": (OnednnBackend, "_conv_backward_data", 2),
    "strips": (convolution_module, "boundary_boxes", 1),
    "exchange": (Exchange, "_set_up", 2),
    "views of an exchange": (Exchange, "_bind", 3),
    "channel": (Communicator, "channels", 1),
    "channel of the transport": (HostLinks, "channels", 1),
    "group": (Communicator, "split", 1),
    "reduction": (Communicator, "reductions", 1),
    "reductions of the transport": (HostLinks, "plans", 1),
    "plan of a sum": (HostLinks, "_plan", 2),
    "binding": (Runner, "_bind", 9),
    "sum of gradients": (Value, "close_gradient", 3),
    "reducer": (executor_module, "Reducer", 1),
    "sums of buckets": (Reducer, "_open", 1),
}


@pytest.mark.ranks(2, 4)
@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_of_one_rank_is_raised_on_all(comm, stage):
    """An error of one rank in any stage of building is raised on all ranks; then the communicator can be used again."""
    culprit = comm.size - 1
    owner, name, number = STAGES[stage]
    kind = "channels" if stage == "group" else "bucketed"  # two ranks that share no filters
    with Communicator(comm) as ranks:

        def call():
            if ranks.rank == culprit:
                with raising(owner, name, number):
                    build_and_step(ranks, kind)
            else:
                build_and_step(ranks, kind)

        assert errors(ranks, call) == [f"Injected: rank {culprit}: {name} failed"] * comm.size
        assert np.isfinite(build_and_step(ranks, steps=2))


CASES = [
    ("bucketed", "mpi"),
    ("bucketed", EMULATED),
    ("sharded", "auto"),
    ("host_accumulate", EMULATED),
    ("replicated", "auto"),
    ("rounded", "auto"),
    ("channels", "auto"),
    ("channels", "mpi"),
]


@pytest.mark.ranks(2, 4)
@pytest.mark.timeout(LIMIT + ANYWHERE)
@pytest.mark.parametrize(("kind", "transport"), CASES, ids=lambda text: text.partition(":")[0])
def test_a_fault_anywhere(comm, kind, transport):
    """Errors at random calls of library functions during building are raised on all ranks."""
    rng = np.random.default_rng([comm.size, CASES.index((kind, transport))])
    for _ in range(2):  # the second time what is cached is there, as it is below
        with Communicator(comm, transport) as ranks, AtCall() as counted:
            build_and_step(ranks, kind, steps=0)
    calls = min(comm.allgather(counted.count))
    for number in sorted(rng.choice(calls, min(ANYWHERE, calls), replace=False) + 1):
        culprit = int(rng.integers(comm.size))
        fault = AtCall(int(number))
        with Communicator(comm, transport) as ranks:

            def call(fault=fault, culprit=culprit, ranks=ranks):
                with ranks.agreement(), fault if ranks.rank == culprit else nullcontext():
                    build_and_step(ranks, kind, steps=0)

            found = errors(ranks, call)
        # The last calls are of what is freed at times: there may have been none of this number.
        wanted = f"Injected: rank {culprit}: a call failed" if comm.bcast(fault.where, culprit) else ""
        assert found == [wanted] * comm.size, (number, fault.where)
        assert wanted or number > 0.99 * calls


WHOLE_RUNS = {
    "network": ("halograd.training.session", "make_network"),
    "strategy": ("halograd.training.session", "make_strategy"),
    "data set": ("halograd.training.samples", "split"),
    "executor": ("halograd.training.session", "Executor"),
    "loader": ("halograd.training.session", "Loader"),
    "optimizer": ("halograd.training.run", "make_optimizer"),
    "trainer": ("halograd.training.run", "Trainer"),
    "evaluation": ("halograd.training.run", "Evaluation"),
    "checkpoints": ("halograd.training.run", "Checkpoints"),
}


@pytest.mark.ranks(2, 4)
@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("stage", WHOLE_RUNS)
def test_a_run_that_cannot_begin_on_one_rank_ends_on_all(comm, config, stage, monkeypatch):
    module, name = WHOLE_RUNS[stage]
    culprit = comm.size - 1
    if comm.rank == culprit:

        def fail(*args, **options):
            raise Injected(f"{name} failed")

        monkeypatch.setattr(f"{module}.{name}", fail)
    with pytest.raises(Injected, match=f"^rank {culprit}: {name} failed$"):
        train_run(config, comm=MPI.COMM_WORLD)
