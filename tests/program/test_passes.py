"""Tests of passes that a strategy names: they change the program that is executed, counted, listed, simulated."""

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy, parameter_blocks
from halograd.lowering.operations import ForkEnd, Run, Total, Transfer
from halograd.perfmodel.cost import NetworkModel, Pricing, Training, count_step, memory_of, program_of, simulate
from halograd.perfmodel.kernel_times import RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.program.gradients import Accumulate
from halograd.program.passes import Overlap, apply_passes
from halograd.program.program import Target, lines_of
from halograd.testing import grids
from halograd.training.executor import Executor
from tests.perfmodel.counted import CASES, differing, strategies
from tests.support.grids import grids_in_turn
from tests.training.steps import NETWORKS, copied, fill

BATCH = 4

#: Pass of a user: every exchange of the forward pass is made twice. The results stay, messages and their time double.
TWICE = """
from dataclasses import dataclass, replace

from halograd.lowering.operations import Transfer
from halograd.program.passes import Pass


@dataclass(frozen=True)
class Twice(Pass):
    times: int = 2

    def __call__(self, program):
        return replace(program, forward=[self.changed(segment) for segment in program.forward])

    def changed(self, segment):
        operations = []
        for operation in segment.operations:
            operations.append(operation)
            if isinstance(operation, Transfer) and operation.end == "finish":
                again = [replace(operation, end=end) for end in ("start", "finish")]
                operations += again * (self.times - 1)
        return replace(segment, operations=operations)
"""


OWN = "from halograd.program.passes import Pass\n\nclass Own(Pass):\n    def __call__(self, program):\n        "


def losses_of(comm, strategy, name="mesh", passes=()):
    """Return strategy, losses, gradients, messages of the last step, and predicted memory of a training. Collective."""
    strategy = Strategy(strategy.parts, strategy.layers, strategy.options, 4096, strategy.reduction, tuple(passes))
    losses = []
    with Executor(NETWORKS[name](), comm, get_backend("numpy"), BATCH, strategy, "float64", seed=3) as executor:
        held = {use: n for use, n in executor.predicted_bytes.items() if use != "kernel workspace"}
        for step in range(2):
            fill(executor, step)
            executor.forward(training=True)
            losses.append(executor.loss_value())
            comm.counters.reset()
            executor.backward()
            executor.reducer.finish()
        comm.counters.reset()
        executor.forward(training=True)
        losses.append(executor.loss_value())
        executor.backward()
        executor.reducer.finish()
        return strategy, losses, copied(executor.store.grads), comm.counters.snapshot(), held


@pytest.mark.mpi(min_size=2)
def test_a_pass_of_a_users_file_is_run_priced_and_counted(tmp_path):
    with Communicator(MPI.COMM_WORLD, "mpi") as comm:
        path = comm.allgather_objects(str(tmp_path))[0] + "/passes.py"
        if comm.rank == 0:
            with open(path, "w", encoding="utf-8") as file:
                file.write(TWICE)
        comm.barrier()
        cut = Strategy({"height": comm.size}, options={"halo": "pad"})
        _, losses, grads, once, _ = losses_of(comm, cut)
        strategy, found, others, counted, held = losses_of(comm, cut, passes=[f"{path}:Twice:times=3"])
        with comm.agreement():
            assert found == losses, "bitwise"
            for name, array in grads.items():
                np.testing.assert_array_equal(others[name], array, err_msg=name)
            assert counted["halo"].messages > once["halo"].messages > 0
            network = NETWORKS["mesh"]()
            want = count_step(network, strategy, BATCH, dtype="float64")
            assert not differing(counted, want, comm.rank)
            target = Target(BATCH, comm.size, comm.rank, np.dtype("float64"))
            program = program_of(network, strategy, target)
            assert sum(isinstance(o, Transfer) for o in program) > sum(
                isinstance(o, Transfer) for o in program_of(network, cut, target)
            )
            machine = Machine.load("lassen")
            prices = [
                simulate(network, one, BATCH, Pricing(NetworkModel(machine), RooflineTimes(machine)), ranks=comm.size)
                for one in (cut, strategy)
            ]
            assert prices[1].step_seconds > prices[0].step_seconds
            assert prices[1].traffic["halo"][0] > prices[0].traffic["halo"][0]
            assert prices[1].total("halo") > prices[0].total("halo") and held["messages"] > 0


def test_the_price_of_a_program_is_that_of_its_layers(tmp_path):
    """Layers whose costs are computed one by one for a search cost the same as the operations of a compiled program.

    Only messages that overlap with other layers wait less in the program: redistributions between branches.
    """
    path = tmp_path / "nothing.py"
    path.write_text(OWN + "return program\n")
    machine = Machine.load("lassen")
    for make in CASES.values():
        network = make()
        for strategy in [Strategy({"sample": 2, "height": 2}), *strategies(network, 4)]:
            same = Strategy(
                strategy.parts, strategy.layers, strategy.options, 4096, strategy.reduction, (f"{path}:Own",)
            )
            plain = Strategy(strategy.parts, strategy.layers, strategy.options, 4096, strategy.reduction)
            one, other = (
                simulate(network, s, BATCH, Pricing(NetworkModel(machine), RooflineTimes(machine)), ranks=4)
                for s in (plain, same)
            )
            for layer, same_layer in zip(one.layers, other.layers, strict=True):
                for key in ("forward", "backward", "halo", "packing", "statistics", "halo_algorithm"):
                    want = getattr(layer, key)
                    assert getattr(same_layer, key) == (want if isinstance(want, str) else pytest.approx(want, 1e-9))
            for key in ("allreduce_seconds", "update_seconds"):
                assert getattr(other, key) == pytest.approx(getattr(one, key), rel=1e-9), (key, network.name, strategy)
            moves = sum(layer.redistribution for layer in one.layers)
            for key in ("forward_seconds", "backward_seconds", "step_seconds"):
                most = getattr(one, key)
                assert most - moves <= getattr(other, key) * (1 + 1e-9), (key, network.name, strategy)
                assert getattr(other, key) <= most * (1 + 1e-9), (key, network.name, strategy)
                assert moves or getattr(other, key) == pytest.approx(most, rel=1e-9), (key, network.name, strategy)
            assert other.memory == one.memory and other.traffic == one.traffic


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["mesh", "unet", "resnet"])
def test_overlap_keeps_the_bits(turn, name):
    with Communicator(MPI.COMM_WORLD) as comm:
        for grid in grids_in_turn(comm.size, ("sample", "height", "width"), turn):
            _, losses, grads, once, _ = losses_of(comm, Strategy(grid), name)
            strategy, found, others, counted, held = losses_of(comm, Strategy(grid), name, ["overlap"])
            network = NETWORKS[name]()
            target = Target(BATCH, comm.size, comm.rank, np.dtype("float64"), overlaps=comm.waits_for_network)
            program = program_of(network, strategy, target)
            want = memory_of(program, parameter_blocks(network, strategy, comm.size))
            with comm.agreement():
                assert found == losses and counted == once, grid
                for key, array in grads.items():
                    np.testing.assert_array_equal(others[key], array, err_msg=f"{grid} {key}")
                assert held["transient"] == want["transient"]


def test_what_overlap_hides_is_priced(tmp_path):
    """With the overlap pass a simulated step waits less for halos that overlap with kernels of other layers."""
    path = tmp_path / "nothing.py"
    path.write_text(OWN + "return program\n")
    machine = Machine.load("lassen")
    for name in ("gated", "zoo"):
        plain, moved = (
            simulate(
                CASES[name](),
                Strategy({"height": 4}, options={"halo": "pad"}, passes=(some,)),
                BATCH,
                Pricing(NetworkModel(machine), RooflineTimes(machine)),
            )
            for some in (f"{path}:Own", "overlap")
        )
        hidden = plain.total("halo_exposed") - moved.total("halo_exposed")
        assert hidden > 0.05 * plain.total("halo_exposed"), name
        assert moved.total("halo") == pytest.approx(plain.total("halo"))
        assert moved.step_seconds < plain.step_seconds - hidden / 2


@pytest.mark.parametrize("name", CASES)
def test_overlap_moves_starts_and_finishes_and_nothing_else(name):
    """The overlap pass keeps the order of kernels and of messages; messages span at least as many kernels as before."""
    network, longer = CASES[name](), 0
    for strategy in strategies(network, 4):
        program = program_of(network, strategy, Target(BATCH, 4, 1))
        moved = Overlap()(program)
        for before, after in ((program.forward, moved.forward), (program.backward, moved.backward)):
            one, other = ([o for segment in segments for o in segment.operations] for segments in (before, after))
            assert len(one) == len(other) and set(one) == set(other)
            for kind in (Run, Transfer | Total):
                assert [o for o in one if isinstance(o, kind)] == [o for o in other if isinstance(o, kind)]
            assert all(spans(other)[key] >= runs for key, runs in spans(one).items())
            longer += sum(spans(other).values()) > sum(spans(one).values())
    assert longer or name not in ("zoo", "unet"), "some exchange must travel behind more operations"


def separate():
    """Return a network with activation layers: four can be fused, one has an input that another layer reads."""
    x = hg.Input((12, 10, 3), name="x")
    y = hg.ReLU(name="relu1")(hg.Conv(4, 3, padding=1, name="conv1")(x))
    z = hg.Conv(4, 3, padding=1, name="conv2")(y)
    y = hg.ReLU(name="of a sum")(hg.Add(name="sum")(z, hg.ReLU(name="of two readers")(z)))
    y = hg.LeakyReLU(0.1, name="leaky")(hg.Conv(4, 3, stride=2, padding=1, name="conv3")(y))
    y = hg.GELU(name="by input")(hg.Conv(4, 1, name="conv4")(y))
    y = hg.ReLU(name="output")(hg.Conv(2, 3, padding=1, name="conv5")(y))
    loss = hg.MeanSquaredError(name="loss")(y, hg.Input(y.shape, name="target"))
    return hg.Network({"loss": loss, "prediction": y}, name="separate")


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(("backend", "dtype"), [("numpy", "float64"), ("onednn", "float32")])
def test_fused_activations_give_the_same(backend, dtype):
    kernels = get_backend(backend)
    with Communicator(MPI.COMM_WORLD) as comm:
        for grid in grids(comm.size, ("sample", "height", "width")):
            found = []
            for passes in ((), ("fuse",), ("fuse", "overlap")):
                strategy = Strategy(grid, options={"halo": "pad"}, passes=passes)
                with Executor(separate(), comm, kernels, BATCH, strategy, dtype, seed=3) as executor:
                    forward = [o for s in executor.program.forward for o in s.operations if isinstance(o, Run)]
                    functions = {o.layer for o in forward if o.kernel.function is not None}
                    left = {"of two readers"} | (set() if passes else {"relu1", "of a sum", "leaky", "output"})
                    assert functions == left
                    losses = []
                    for step in range(2):
                        fill(executor, step)
                        executor.forward(training=True)
                        losses.append(executor.loss_value())
                        executor.backward()
                        executor.reducer.finish()
                    found.append((losses, copied(executor.store.grads), executor.gather("prediction")))
            for losses, grads, prediction in found[1:]:
                with comm.agreement():
                    assert losses == found[0][0], (grid, backend)
                    assert prediction is None or np.array_equal(prediction, found[0][2])
                    for key, array in grads.items():
                        np.testing.assert_array_equal(array, found[0][1][key], err_msg=f"{grid} {key}")


def test_fused_activations_cost_nothing_of_their_own():
    machine = Machine.load("lassen")
    plain, fused = (
        simulate(
            separate(), Strategy(passes=passes), BATCH, Pricing(NetworkModel(machine), RooflineTimes(machine)), ranks=1
        )
        for passes in (("overlap",), ("fuse",))
    )
    forward = [{record.name: record.forward for record in one.layers} for one in (plain, fused)]
    assert all(forward[1][name] < forward[0][name] for name in ("relu1", "of a sum"))
    assert forward[1]["by input"] == forward[0]["by input"]
    assert fused.step_seconds < plain.step_seconds


def normed():
    """Return a network with norms whose sums convolutions can compute, and with some of each kind that they cannot."""
    x = hg.Input((12, 10, 8), name="x")
    y = hg.BatchNorm(activation="relu", name="two readers")(hg.Conv(8, 3, padding=1, bias=False, name="conv1")(x))
    z = hg.BatchNorm(name="plain")(hg.Conv(8, 3, padding=1, name="conv2")(y))
    a = hg.BatchNorm(activation="relu", name="sum of two")(hg.Conv(8, 1, name="conv3")(z), y)
    a = hg.BatchNorm(activation="relu", name="of relu")(hg.Conv(8, 3, padding=1, activation="relu", name="conv4")(a))
    a = hg.BatchNorm(activation="relu", name="relu")(hg.Conv(16, 3, stride=2, padding=1, name="conv5")(a))
    y = hg.Conv(2, 3, padding=1, name="conv6")(a)
    loss = hg.MeanSquaredError(name="loss")(y, hg.Input(y.shape, name="target"))
    return hg.Network({"loss": loss, "prediction": y}, name="normed")


#: Sums that no kernel of this network can compute in addition, whatever the cut, and parts of the reasons.
UNFUSED = {
    ("two readers", "sums over dy"): "2 operations write it",
    ("sum of two", "sums over dy"): "its relu is applied to a sum of two inputs",
    ("of relu", "sums over x"): "a convolution without activation does not write it",
}
OPTIONS = [{"halo": "pad"}, {"halo": "overlap", "statistics": "sample"}]
OPTIONS += [{"statistics": "local"}, {"recompute": "block"}]


def unfused_of(program):
    """Return the reasons why sums are not fused, by layer and array."""
    return {(layer, text.partition(": ")[0]): text.partition(": ")[2] for layer, text in program.unfused}


def sums_of_norms(program):
    """Return the operations that compute only the sums of a norm."""
    return [o for o in program if isinstance(o, Run) and o.method in ("statistics", "backward_sums")]


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_fused_sums_give_the_same(turn, options):
    """Sums in kernels of convolutions are those of kernels of their own in every bit, in training and in evaluation.

    In float32 on one rank a norm is one kernel per pass; in float64 its parts are operations.
    """
    numpy, dtype = get_backend("numpy"), "float64" if options.get("halo") == "pad" else "float32"
    with Communicator(MPI.COMM_WORLD) as comm:
        for grid in grids_in_turn(comm.size, ("sample", "height", "width"), turn):
            found = []
            for passes in ((), ("sums", "overlap")):
                strategy, debug = Strategy(grid, options=options, passes=passes), comm.size == 1
                with Executor(normed(), comm, numpy, BATCH, strategy, dtype, seed=3, debug=debug) as executor:
                    unfused, alone = unfused_of(executor.program), sums_of_norms(executor.program)
                    losses = []
                    fill(executor, 0)
                    for training in (True, False):
                        executor.forward(training)
                        losses.append(executor.loss_value())
                        if training:
                            executor.backward()
                            executor.reducer.finish()
                    found.append((losses, copied(executor.store.grads), copied(executor.store.state)))
            with comm.agreement():
                assert found[0][0] == found[1][0], grid
                for one, other in zip(found[0][1:], found[1][1:]):
                    for key, array in one.items():
                        np.testing.assert_array_equal(other[key], array, err_msg=f"{grid} {key}")
                if "recompute" in options:
                    assert "it is computed again" in unfused.values()
                    continue
                more = unfused.keys() - UNFUSED.keys()
                assert unfused.keys() >= UNFUSED.keys() and len(alone) == len(unfused), grid
                # The boundary strips of a convolution are computed after its interior.
                assert bool(more) == (options.get("halo") == "overlap" and grid["height"] * grid["width"] > 1), grid
                assert all("operations write it" in unfused[key] and key[1] == "sums over x" for key in more), grid
                assert more or unfused == UNFUSED, grid


def test_fused_sums_are_priced_and_listed():
    """A pass over memory less is priced; without a kernel for both, nothing changes and the listing has the reasons."""
    network, machine = normed(), Machine.load("dgx-h100")
    pricing = Pricing(NetworkModel(machine), RooflineTimes(machine), "bfloat16")
    training = Training(dtype="bfloat16")
    plain, fused = (
        simulate(network, Strategy(passes=passes), 1024, pricing, training, ranks=1)
        for passes in (("fuse",), ("sums",))
    )
    saved = {
        one.name: (1 - other.forward / one.forward, 1 - other.backward / one.backward)
        for one, other in zip(plain.layers, fused.layers, strict=True)
        if one.name != "loss"
    }
    # A norm reads x twice and writes y; backward, it reads x and dy twice and writes dx.
    forward = {"two readers": 1 / 3, "plain": 1 / 3, "sum of two": 1 / 4, "relu": 1 / 3}
    for name, found in saved.items():
        expected = (forward.get(name, 0), 1 / 5 if name == "plain" else 0)
        assert found == pytest.approx(expected, abs=1e-9), f"{name}: the data gradient of two channels has no plan"
    program = program_of(network, Strategy(passes=("sums",)), Target(BATCH, fuses_sums=lambda conv: False))
    assert len(sums_of_norms(program)) == len(sums_of_norms(program_of(network, Strategy(), Target(BATCH))))
    listed = [line for line in lines_of(program) if line.startswith("unfused")]
    assert len(listed) == 10 and sum("no kernel computes both" in line for line in listed) == 7
    assert list(lines_of(program, frozenset({"plain"})))[-2:] == [line for line in listed if " plain " in line]


def branches():
    """Return a network with two strided convolutions of one value and their sum, whose gradient both read."""
    x = hg.Input((16, 12, 3), name="x")
    y = hg.Conv(4, 3, padding=1, name="stem")(x)
    y = hg.Add(name="sum")(*(hg.Conv(4, 3, stride=2, padding=1, name=name)(y) for name in ("left", "right")))
    loss = hg.MeanSquaredError(name="loss")(hg.MaxPool(3, 1, 1, name="pool")(y), hg.Input(y.shape, name="target"))
    return hg.Network({"loss": loss}, name="branches")


@pytest.mark.parametrize("scheme", ["per_layer", "bucketed", "sharded", "blocking"])
@pytest.mark.parametrize("grid", [{"height": 2}, {"height": 3}, {"sample": 2, "height": 2}, {"height": 2, "width": 2}])
def test_overlap_keeps_the_order_of_messages_on_all_ranks(grid, scheme):
    """The overlap pass keeps the order of messages and gradient sums on every rank, so no transport can deadlock."""
    for make in (branches, CASES["zoo"], CASES["unet"], CASES["resnet"]):
        network = make()
        plain = Strategy(grid, bucket_bytes=2048, reduction=Scheme(scheme))
        moved = Strategy(grid, bucket_bytes=2048, reduction=Scheme(scheme), passes=("overlap",))
        for rank in range(plain.ranks):
            one, other = (program_of(network, s, Target(BATCH, plain.ranks, rank)) for s in (plain, moved))
            assert messages(one) == messages(other), (network.name, rank)


@pytest.mark.parametrize("scheme", ["sharded", "bucketed"])
def test_operations_on_gradients_stand_once_where_a_program_begins_with_a_redistribution(scheme):
    """Operations on gradients occur once, also if the overlap pass splits the segment of a redistribution in two."""
    x = hg.Input((12, 12, 3), name="x")
    first = hg.Conv(4, 3, padding=1, name="first")(x)
    y = hg.Add(name="sum")(first, hg.Conv(4, 3, padding=1, name="second")(x))
    network = hg.Network({"loss": hg.MeanSquaredError(name="loss")(y, hg.Input(y.shape, name="target"))})
    cuts = {"second": {"height": 2}}
    strategy = Strategy({"sample": 2}, cuts, reduction=Scheme(scheme), passes=("overlap",))
    program = program_of(network, strategy, Target(BATCH, 2))
    names = [segment.name for segment in program.forward]
    assert names[0] not in network.layers and names.count(names[0]) == 2
    placed = [operation for segment in program.forward for operation in segment.before]
    assert placed and len(placed) == len(set(placed))
    machine = Machine.load("lassen")
    assert simulate(network, strategy, BATCH, Pricing(NetworkModel(machine), RooflineTimes(machine))).step_seconds > 0


def messages(program):
    """Return starts and finishes in order, by layer or bucket."""
    return [(o.layer, o.end, getattr(o, "bucket", None)) for o in program if isinstance(o, Transfer | Total)]


def spans(operations):
    """Return the number of runs between the start and the finish of each exchange."""
    begun, found, runs = {}, {}, 0
    for operation in operations:
        runs += isinstance(operation, Run)
        if isinstance(operation, Transfer):
            if operation.end == "start":
                begun[operation.exchange] = runs
            else:
                found[operation.exchange] = runs - begun[operation.exchange]
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", ["per_layer", "bucketed", "frozen"])
def test_operations_on_gradients_follow_the_ends_of_forked_kernels(case, ranks):
    """On one rank a gradient may run until the next one begins: its part of a batch is added after that."""
    y = hg.Input((8, 8, 2), name="x")
    for i in range(3):
        y = hg.Conv(2, 3, padding=1, bias=False, name=f"conv{i}")(y)
    network = hg.Network({"loss": hg.MeanSquaredError()(y, hg.Input((8, 8, 2), name="target"))})
    network = network.freeze("conv0") if case == "frozen" else network
    scheme = Scheme() if case == "frozen" else Scheme(case)
    strategy = Strategy({"height": ranks}, reduction=scheme, bucket_bytes=1 << 20, passes=("fork",))
    program = program_of(network, strategy, Target(2, ranks, probed=frozenset({"x"})), parts=2)
    running, added = set(), 0
    for operation in program:
        if isinstance(operation, Run) and operation.forked:
            running.add(operation.kernel)
        elif isinstance(operation, ForkEnd):
            running.remove(operation.kernel)
        elif isinstance(operation, Accumulate):
            assert not running
            added += 1
    assert added == (3 if case == "per_layer" else 1)


def test_an_unknown_pass_and_one_that_returns_no_program(tmp_path):
    program = program_of(NETWORKS["mesh"](), Strategy(), Target(BATCH))
    with pytest.raises(UserError, match=r"strategy.passes: expected fuse, sums, overlap.*got 'overlay'"):
        apply_passes(program, ["overlay"])
    path = tmp_path / "none.py"
    path.write_text(OWN + "pass\n")
    with pytest.raises(UserError, match="expected it to return a Program, got NoneType"):
        apply_passes(program, [f"{path}:Own"])


def test_a_strategy_keeps_its_passes(tmp_path):
    strategy = Strategy({"height": 2}, passes=("overlap",))
    strategy.save(tmp_path / "s.json")
    assert Strategy.load(tmp_path / "s.json") == strategy
    Strategy({"height": 2}).save(tmp_path / "t.json")
    assert "passes" not in (tmp_path / "t.json").read_text()
