"""Tests of memory: the sum of a rank, no allocation in a step, computing again, and messages where it is missing."""

import gc
import json
import math
import re

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers import BatchNorm, BinaryCrossEntropyWithLogits, Conv, Input, MaxPool, MeanSquaredError, Network
from halograd.layers.strategy import Strategy, parameter_blocks
from halograd.lowering.operations import Transfer
from halograd.models import mesh, resnet, unet
from halograd.perfmodel.cost import NetworkModel, Pricing, Training, count_step, memory_of, program_of, simulate
from halograd.perfmodel.kernel_times import RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.program.program import Target
from halograd.training import build, load_config, train
from halograd.training.executor import Executor
from halograd.training.step_times import StepTimes
from halograd.training.timeline import Timeline
from tests.launch import mpiexec
from tests.layers.norms import step
from tests.support.lean import check_allocations
from tests.training.steps import NETWORKS, fill


def test_plans_count_what_runs_count():
    network, strategy, machine = NETWORKS["mesh"](), Strategy(), Machine.load("lassen")
    pricing = Pricing(NetworkModel(machine), RooflineTimes(machine))
    plan = simulate(network, strategy, 4, pricing, Training(slots=2, ahead=3), 1).memory
    blocks = parameter_blocks(network, strategy, 1)
    program = program_of(network, strategy, Target(4, 1), blocks)
    assert plan == memory_of(program, blocks, 2, ahead=3)
    assert plan["batches read ahead"] == 3 * plan["input"] > 0
    assert plan["kernel workspace"] > 0
    assert plan["optimizer state"] == 2 * plan["parameter gradient"]
    made = memory_of(program, blocks, 2, ahead=3, workspace=12345)
    assert made == {**plan, "kernel workspace": 12345}


@pytest.mark.parametrize("extents", [(24, 24), (16, 16, 16)], ids=str)
def test_the_estimate_is_close_to_what_kernels_reserve(extents):
    """Convolutions of oneDNN: exact for AVX2, where 3-D ones copy their input; elsewhere these are at most so large."""
    backend = get_backend("onednn")
    x, target = Input((*extents, 64), "x"), Input((*extents, 32), "target")
    network = Network({"loss": MeanSquaredError()(Conv(32, 3, padding=1)(Conv(64, 3, padding=1)(x)), target)})
    with backend, Communicator(MPI.COMM_SELF) as comm, Executor(network, comm, backend, 1, Strategy()):
        held = backend.held_bytes
        blocks = parameter_blocks(network, Strategy(), 1)
        estimate = memory_of(program_of(network, Strategy(), Target(1, 1), blocks), blocks)["kernel workspace"]
        assert held < 1.2 * estimate
        if backend.instruction_set == "AVX2":
            assert held > 0.8 * estimate


@pytest.mark.parametrize("backend", ["numpy", "onednn"])
@pytest.mark.parametrize("kernel, nbytes", [(3, 1), (16, 4)])
def test_positions_of_maxima_are_planned_and_counted(backend, kernel, nbytes):
    """A plan counts what a run holds: one byte per output, or four for windows of more than 255 elements."""
    x, strategy = Input((35, 32, 8), "x"), Strategy()
    y = MaxPool(kernel, 1)(x)
    network = Network({"loss": MeanSquaredError()(y, Input(y.shape, "target"))})
    with get_backend(backend) as kernels, Communicator(MPI.COMM_SELF) as comm:
        blocks = parameter_blocks(network, strategy, 1)
        for trainable in (True, False):
            probed = ["x"] if trainable else []
            with Executor(network, comm, kernels, 2, strategy, "float32", trainable, probed=probed) as executor:
                positions = nbytes * 2 * math.prod(y.shape) * trainable
                found = executor.predicted_bytes["kernel workspace"]
                assert found == kernels.held_bytes == kernels.scratch.nbytes + positions
                assert memory_of(executor.program, blocks)["kernel workspace"] == positions
        kernels.scratch.release()
        gc.collect()
        assert kernels.held_bytes == 0


@pytest.mark.ranks(1, 2)
def test_workspaces_of_kernels_count_for_the_limit(config, shared, monkeypatch):
    """A run whose arrays fit only without the workspaces of its kernels is refused when the kernels are made."""
    found, by_node = [], build._memory_by_node

    def record(*args):
        nodes = by_node(*args)
        found.append(sum(sum(needs.values()) for _, mine in nodes for needs in mine))
        return nodes

    monkeypatch.setattr(build, "_memory_by_node", record)
    train(config, [f"output.directory={shared / 'fits'}"], comm=MPI.COMM_WORLD)
    before, made = found[:2]
    assert before < made
    monkeypatch.setattr(build, "memory_size", lambda ranks: made - 1)
    with pytest.raises(UserError, match="a network and a batch within"):
        train(config, [f"output.directory={shared / 'not'}"], comm=MPI.COMM_WORLD)


BIG = {
    "mesh": lambda: mesh(resolution=256, widths=(16, 16), convs=2),
    "resnet": lambda: resnet((1, 1), classes=5, resolution=192, width=16),
    "unet": lambda: unet((128, 128), channels=2, classes=3, width=16, levels=2),
}


def in_space(network, size, halo):
    """Return a strategy that cuts all layers along the width."""
    return Strategy({"width": size}, options={"halo": halo})


def in_channels(network, size, halo):
    """Return a strategy that cuts layers along channels; convolutions in turn along filters and input channels.

    The last layer is cut along the width, over one rank less.
    """
    layers, turn = {}, 0
    for name, node in network.layers.items():
        most = min(node.shape[-1], *(n.shape[-1] for n in node.inputs))
        if node.layer.cuts_channels == "no" or most < size:
            continue
        axes = {"channelwise": ["channel"], "contracts": ["channel", "input_channel"]}[node.layer.cuts_channels]
        layers[name] = {axes[turn % len(axes)]: size}
        turn += node.layer.cuts_channels == "contracts"
    layers[next(reversed(layers))] = {"width": max(1, size - 1)}
    return Strategy({"width": size}, layers, options={"halo": halo})


#: Cuts, each on some numbers of ranks: on one rank they are the same, 2 have one neighbor, 3 and 4 two.
CUTS = [
    pytest.param(in_space, "pad", marks=pytest.mark.ranks(1, 2, 4)),
    pytest.param(in_space, "overlap", marks=pytest.mark.ranks(2, 3)),
    pytest.param(in_channels, "pad", marks=pytest.mark.ranks(2, 3)),
]


@pytest.mark.parametrize(("cut", "halo"), CUTS)
@pytest.mark.parametrize(
    ("name", "backend"), [*((n, b) for n in BIG for b in ("numpy", "onednn")), ("unet", "bfloat16")]
)
def test_a_step_allocates_no_array(name, cut, halo, backend):
    """A step allocates no array: activations of every rank have at least 256 KiB, so a temporary would be detected.

    NumPy's casting buffers (8192 elements per operand, some 100 KiB) are transient and no arrays.
    """
    with Communicator(MPI.COMM_WORLD) as comm:
        network = BIG[name]()
        strategy = cut(network, comm.size, halo)
        low = backend == "bfloat16"
        kernels = get_backend("onednn" if low else backend)
        kernels.emulate = True
        with Executor(network, comm, kernels, 1, strategy, "bfloat16" if low else "float32") as executor:
            fill(executor, 0)
            for _ in range(2):
                step(executor)
            check_allocations(comm, lambda: [step(executor) for _ in range(2)], 192 * 1024)


def chain(rows, columns):
    """Return a network of three convolutions with halos that can be counted by hand: 5x5, 3x3 with stride 2, 3x3."""
    x = Input((rows, columns, 2), name="x")
    y = Conv(4, 5, padding=2, name="a")(x)
    y = BatchNorm(name="bn")(y)
    y = Conv(6, 3, 2, 1, name="b")(y)
    y = Conv(1, 3, padding=1, name="c")(y)
    target = Input(y.shape, name="target")
    return Network({"loss": BinaryCrossEntropyWithLogits(name="loss")(y, target)})


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("halo", ["pad", "overlap"])
def test_halo_messages_and_bytes_are_those_of_the_formula(halo):
    """Halo messages and bytes of a step are those of the formula, under a cut of the height.

    Each of `P` blocks has 8 rows. Forward, rows from above and below: b: 1 and 0 of 4 channels; c: 1 and 1 of 6; a
    reads its halo from disk. Backward, rows of dy: b: 0 and 1 of 6; c: 1 and 1 of 1.
    """
    with Communicator(MPI.COMM_WORLD) as comm:
        columns, batch, size = 10, 3, np.dtype("float32").itemsize
        executor = Executor(
            chain(8 * comm.size, columns),
            comm,
            get_backend("numpy"),
            batch,
            Strategy({"height": comm.size}, options={"halo": halo}),
        )
        with executor:
            fill(executor, 0)
            step(executor)
            comm.counters.reset()
            step(executor)
            above, below = comm.rank > 0, comm.rank < comm.size - 1
            # To the rank above goes what it wants from below, and the other way round.
            rows_up = {"fwd b": (0, 4, columns), "fwd c": (1, 6, 5), "bwd b": (1, 6, 5), "bwd c": (1, 1, 5)}
            rows_down = {"fwd b": (1, 4, columns), "fwd c": (1, 6, 5), "bwd b": (0, 6, 5), "bwd c": (1, 1, 5)}
            sent = [m for there, rows in ((above, rows_up), (below, rows_down)) if there for m in rows.values() if m[0]]
            nbytes = sum(r * c * w for r, c, w in sent) * batch * size
            found = comm.counters["halo"]
            with comm.agreement():
                assert (found.messages, found.bytes) == (len(sent), nbytes)
            statistics, gradients = comm.counters["statistics"], comm.counters["allreduce"]
            several = int(comm.size > 1)
            assert (statistics.messages, statistics.bytes) == (2 * several, 2 * 2 * 4 * 8 * several)
            buckets = executor.store.buckets
            assert gradients.messages == len(buckets) * several
            assert gradients.bytes == sum(b.grads.nbytes for b in buckets) * several


SCRIPT = """
import sys
import numpy as np
import halograd as hg
from halograd.comm import boot, ending
from halograd.kernels.numpy import NumpyBackend
from halograd.models import build
from halograd.training import samples, session
from halograd.training.optimizers import Optimizer
from halograd.training.trainer import Trainer

class OutOfMemoryError(MemoryError):  # as CuPy's
    def __init__(self, size, total):
        super().__init__(f"Out of memory allocating {{size:,}} bytes (allocated so far: {{total:,}} bytes).")

def numpy(*_, **__):
    return np.empty(1 << 60, np.uint8)

def cupy(*_, **__):
    raise OutOfMemoryError(1 << 60, 1 << 30)

world = boot()
if world.rank == 1:
    {fault}
network = build("mesh", resolution=32, widths=[4, 4])
data = {{name: np.zeros((4, *node.shape), np.float32) for name, node in network.inputs.items()}}
hg.fit(network, hg.data.ArrayDataset(data), {folder!r}, epochs=1, batch=2, backend={{"kernels": "numpy"}})
"""
ASKED = {"numpy": r"Unable to allocate 1\.00 EiB for an array", "cupy": r"Out of memory allocating 1,152,921,504,606"}


@pytest.mark.parametrize(
    "fault, kind",
    [
        ("NumpyBackend.zeros = numpy", "numpy"),  # parameters
        ("NumpyBackend.zeros = cupy", "cupy"),
        ("session.Loader = numpy", "numpy"),  # batches read ahead
        ("Optimizer.__init__ = cupy", "cupy"),
        ("Trainer.step = numpy", "numpy"),  # on rank 1 alone: rank 0 waits for its messages
    ],
)
def test_one_line_with_numbers_and_exit_code_2(tmp_path, fault, kind):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(fault=fault, folder=str(tmp_path / "run")))
    done = mpiexec(2, [script], 120)
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("halograd: error: "))
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    assert "rank 1" in line
    predicted, held = re.search(
        r"memory: expected ([\d.]+ \w+) for the arrays of this rank, got an error with ([\d.]+ \w+) held: "
        + ASKED[kind],
        line,
    ).groups()
    assert predicted.endswith("KiB")
    assert held.endswith("KiB") != ("zeros" in fault), "only messages are held before the arrays of the network"
    assert re.search(r"; set strategy\.recompute = .*training\.accumulate, or use more ranks", line)


def test_data_before_the_network_is_built(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(fault="samples.Samples.open = numpy", folder=str(tmp_path / "run")))
    done = mpiexec(2, [script], 120)
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("halograd: error: "))
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    assert re.search("rank 1: memory: expected enough for the arrays of this rank, got an error: Unable to", line)


@pytest.mark.ranks(1, 2)
def test_a_run_has_the_same_losses(config, shared):
    found = [
        train(config, [f"strategy.recompute={rule}", f"output.directory={shared / rule}"], comm=MPI.COMM_WORLD)
        for rule in ("none", "pointwise", "block")
    ]
    for one in found[1:]:
        assert (one["loss"], one["validation"]) == (found[0]["loss"], found[0]["validation"])


@pytest.mark.ranks(2)
def test_a_run_that_exchanges_halos_again_has_the_same_losses(config, shared):
    found = {}
    for halo in ("keep", "exchange"):
        changes = ["strategy.width=2", "strategy.recompute=pointwise", f"strategy.recompute_halo={halo}"]
        found[halo] = train(config, [*changes, f"output.directory={shared / halo}"], comm=MPI.COMM_WORLD)
    assert found["keep"]["loss"] == found["exchange"]["loss"]
    lines = [json.loads((shared / halo / "log.jsonl").read_text().splitlines()[0])["config"] for halo in found]
    assert [line["strategy"]["recompute_halo"] for line in lines] == ["keep", "exchange"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("halo", ["keep", "exchange"])
def test_repeated_operations_use_what_they_declare(halo):
    network = NETWORKS["unet"]()
    strategy = Strategy({"width": 2}, options={"recompute": "pointwise", "recompute_halo": halo})
    with (
        Communicator(MPI.COMM_WORLD) as comm,
        Executor(network, comm, get_backend("numpy"), 4, strategy, "float64", debug=True) as executor,
    ):
        repeated = [o for segment in executor.program.backward if segment.again for o in segment.operations]
        assert any(isinstance(o, Transfer) for o in repeated) == (halo == "exchange")
        for step in range(2):
            fill(executor, step)
            executor.forward()
            executor.backward()
            executor.reducer.finish()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rule", ["pointwise", "block"])
def test_it_is_priced_counted_and_allocated(rule):
    machine = Machine.load("lassen")
    strategies = [Strategy({"height": 2}, options={"recompute": one}) for one in ("none", rule)]
    for name in ("mesh", "unet"):
        network = NETWORKS[name]()
        kept, again = (
            simulate(network, strategy, 4, Pricing(NetworkModel(machine), RooflineTimes(machine)), ranks=2)
            for strategy in strategies
        )
        pairs = list(zip(kept.layers, again.layers, strict=True))
        for term in ("forward", "backward", "halo", "halo_exposed"):
            assert all(getattr(a, term) == pytest.approx(getattr(b, term)) for a, b in pairs), "repetition is apart"
        assert not kept.total("again")
        if rule == "pointwise":  # with all layers of these networks again, the arena would not be smaller
            assert again.step_seconds - kept.step_seconds == pytest.approx(again.total("again"), rel=0.01)
            assert kept.step_seconds < again.step_seconds
        counts = [count_step(network, strategy, 4, 2) for strategy in strategies]
        assert repr(counts[0]) == repr(counts[1])
        with (
            Communicator(MPI.COMM_WORLD) as comm,
            Executor(network, comm, get_backend("numpy"), 4, strategies[1], "float32") as executor,
        ):
            assert executor.program.placement.size == len(executor.runner.arena)


def test_boundary_strips_that_are_repeated_are_not_part_of_the_forward_pass():
    machine, network = Machine.load("lassen"), NETWORKS["mesh"]()
    first = next(name for name in network.layers if name.startswith("conv"))
    kept, again = (
        simulate(network, Strategy({"height": 4}, layers, {"halo": "overlap"}), 4, pricing, ranks=4)
        for layers in ({}, {first: {"recompute": "block"}})
        for pricing in [Pricing(NetworkModel(machine), RooflineTimes(machine))]
    )
    pairs = list(zip(kept.layers, again.layers, strict=True))
    assert all(a.forward == pytest.approx(b.forward) for a, b in pairs)
    assert [b.name for _, b in pairs if b.again] == [first]


def test_times_of_repeated_operations_are_recorded_apart():
    timeline = Timeline()
    with Communicator(MPI.COMM_SELF) as comm:
        comm.instruments.recorder = timeline
        strategy = Strategy({}, options={"recompute": "pointwise"})
        with Executor(NETWORKS["mesh"](), comm, get_backend("numpy"), 4, strategy) as executor:
            times = StepTimes(executor, timeline, 0, 1)
            fill(executor, 0)
            times.begin(0)
            executor.forward()
            executor.backward()
            times.end(0, 1.0, 0.0)
            repeated = {segment.name for segment in executor.program.backward if segment.again}
    spans = {name for name, category in timeline.phases if category == "again"}
    assert repeated and spans == repeated and "again" in timeline.table()
    assert timeline.summary()["again"]["seconds"] == pytest.approx(timeline.seconds("again"))
    layers = times.result().layers
    assert {f"{name} (again)" for name, (*_, again) in layers.items() if again} == repeated
    assert sum(again for *_, again in layers.values()) == pytest.approx(timeline.seconds("again"))


@pytest.mark.ranks(1, 2)
def test_a_network_that_does_not_fit_names_the_rule_with_which_it_fits(config, monkeypatch):
    """The message is the same on all ranks, and the run that it proposes is trained."""

    def needed(rule, limit=1):
        found = []
        monkeypatch.setattr(build, "bytes_text", lambda n: found.append(n) or str(n))
        monkeypatch.setattr(build, "memory_size", lambda ranks: limit)
        with pytest.raises(UserError, match=f"within the {limit} of memory of a node") as caught:
            train(config, [f"strategy.recompute={rule}"], comm=MPI.COMM_WORLD)
        assert limit > 1 or "strategy.recompute" not in str(caught.value), "one byte is enough for no rule"
        return found[1]

    kept, again = needed("none"), needed("pointwise")
    assert again < kept
    workspaces = needed("none", kept) - kept  # known when the kernels are made
    assert workspaces > 0
    monkeypatch.setattr(build, "memory_size", lambda ranks: (kept + again) // 2 + workspaces)
    with pytest.raises(UserError, match=r"; set strategy.recompute = .pointwise."):
        train(config, comm=MPI.COMM_WORLD)
    assert train(config, ["strategy.recompute=pointwise"], comm=MPI.COMM_WORLD)["steps"] > 0


@pytest.mark.ranks(1, 2)
def test_a_run_computes_again_as_little_as_fits(config, shared):
    """With ``recompute = "auto"`` and a limit, the losses are those of a run that keeps everything."""
    comm, loaded = MPI.COMM_WORLD, load_config(config)
    with Communicator(comm) as ranks:
        network = build.make_network(loaded)
        strategy = build.make_strategy(loaded.strategy, comm.size, network, loaded.training.at_once)
        own = build.needs_of(loaded, ranks, network, strategy, True, None)
    needed, arena = max(comm.allgather(sum(own.values()))), own["transient"]
    found = {
        memory: train(
            config,
            ["strategy.recompute=auto", f"strategy.memory={memory} B", f"output.directory={shared / str(memory)}"],
            comm=comm,
        )
        for memory in (needed, needed - arena // 5)
    }
    assert found[needed]["loss"] == found[needed - arena // 5]["loss"]
    begun = {memory: json.loads((shared / str(memory) / "log.jsonl").read_text().splitlines()[0]) for memory in found}
    assert [bool(begun[memory]["recomputed"]) for memory in found] == [False, True]
    # No convolution or loss is pointwise, although the rule is set for all layers.
    pointwise = shared / "pointwise"
    train(config, ["strategy.recompute=pointwise", f"output.directory={pointwise}"], comm=comm)
    again = json.loads((pointwise / "log.jsonl").read_text().splitlines()[0])["recomputed"]
    assert again and all(network.layers[name].layer.recomputation == "pointwise" for name in again)
    with pytest.raises(UserError, match=r"strategy.recompute: .* within .*needs"):
        train(config, ["strategy.recompute=auto", f"strategy.memory={needed - arena} B"], comm=comm)
