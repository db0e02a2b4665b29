"""Tests of outputs that backward computes again: the same bits, less memory, the same messages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.kernels import get_backend, reads, writes
from halograd.layers.strategy import Strategy, parameter_blocks
from halograd.lowering.context import Lowered
from halograd.lowering.operations import Operation, Release, Transfer
from halograd.lowering.views import Buffer
from halograd.models import build
from halograd.perfmodel.cost import NetworkModel, Pricing, count_step, simulate
from halograd.perfmodel.cost.account import layers_memory
from halograd.perfmodel.kernel_times import RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.program import arena
from halograd.program.arena import lifetimes, placement_of
from halograd.program.compiler import compile_program
from halograd.program.keeping import Keeping, keep_few
from halograd.program.program import Target, lines_of
from halograd.program.traffic import Move
from halograd.training import SGD, Constant, Trainer
from halograd.training.executor import Executor
from tests.training.steps import NETWORKS, copied, fill

BATCH = 4


def noisy():
    """Return a network with random layers, and one whose gradient reads its input."""
    x, target = hg.Input((8, 8, 3), name="x"), hg.Input((8, 8, 4), name="target")
    y = hg.BatchNorm(activation="relu")(hg.Conv(4, 3, padding=1)(x))
    y = hg.Dropout(0.3)(y)
    z = hg.StochasticDepth(0.5)(hg.GroupNorm(2)(hg.Conv(4, 3, padding=1)(y)))
    y = hg.GELU()(hg.Add()(y, z))
    return hg.Network({"loss": hg.MeanSquaredError(name="loss")(hg.Conv(4, 1)(hg.LayerNorm()(y)), target)})


def trained(comm, network, strategy, dtype="float64", backend="numpy", debug=False):
    """Return losses, parameters and states after four steps, the messages of the last one, and the program."""
    with Executor(network, comm, get_backend(backend), BATCH, strategy, dtype, seed=3, debug=debug) as executor:
        trainer, losses = Trainer(executor, SGD(executor.store, momentum=0.9), Constant(0.05)), []
        for step in range(4):
            fill(executor, step)
            comm.counters.reset()
            losses.append(float(trainer.step()))
            sent = comm.counters.snapshot()
        trainer.synchronize()
        if not debug:
            assert len(executor.runner.arena) == executor.program.placement.size
        arrays = copied(executor.store.params) | copied(executor.store.state)
        return losses, arrays, sent, executor.program


#: Axes that are cut, each on some numbers of ranks; one rank has no halos.
CUTS = [
    pytest.param("sample", "pad", marks=pytest.mark.ranks(1, 2)),
    pytest.param("height", "pad", marks=pytest.mark.ranks(2, 4)),
    pytest.param("width", "overlap", marks=pytest.mark.ranks(3, 4)),
]


@pytest.mark.parametrize(("axis", "halo"), CUTS)
@pytest.mark.parametrize("name", ["mesh", "resnet", "unet", "gated", "noisy"])
def test_the_same_bits_with_fewer_bytes_and_the_same_messages(name, axis, halo):
    make = {**NETWORKS, "noisy": noisy}[name]
    with Communicator(MPI.COMM_WORLD) as comm:
        found = {
            rule: trained(
                comm,
                make(),
                Strategy({axis: comm.size}, options={"halo": halo, "recompute": rule}),
                debug=name == "noisy",
            )
            for rule in ("none", "pointwise", "block")
        }
        losses, arrays, sent, kept = found.pop("none")
        for rule, (ours, own, messages, program) in found.items():
            assert ours == losses and messages == sent, rule
            for key, array in arrays.items():
                np.testing.assert_array_equal(own[key], array, err_msg=f"{rule} {key}")
            released = any(isinstance(operation, Release) for operation in program)
            assert (program.placement.size < kept.placement.size) == released, rule
            if rule == "pointwise" and name in ("mesh", "resnet", "unet"):
                assert program.placement.size < 0.95 * kept.placement.size


def drawn(network, rng, halos):
    """Return options of layers, drawn: outputs that are computed again, and what happens to their halos."""
    rules = ("none", "pointwise", "block")
    return {
        name: {"recompute": rules[rng.integers(3)], "recompute_halo": halos[rng.integers(len(halos))]}
        for name in network.layers
    }


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("mesh", marks=pytest.mark.ranks(2, 4)),
        pytest.param("resnet", marks=pytest.mark.ranks(2, 3)),
        pytest.param("unet", marks=pytest.mark.ranks(3, 4)),
        pytest.param("gated", marks=pytest.mark.ranks(2, 4)),
    ],
)
def test_halos_that_are_exchanged_again(name):
    """The bits are the same, and the messages are those that are counted; channels are shared with the first time."""
    network, rng, repeated = NETWORKS[name](), np.random.default_rng(len(name)), 0
    with Communicator(MPI.COMM_WORLD) as comm:
        two = {"height": 2, "width": 2} if comm.size == 4 else {"width": comm.size}
        cases = (({"height": comm.size}, "pad", ()), (two, "overlap", ("overlap",)))
        for grid, halo, passes in cases:
            options, some = {"halo": halo}, drawn(network, rng, ("exchange", "keep"))
            strategies = (
                Strategy(grid, options=options, passes=passes),
                Strategy(grid, some, options, passes=passes),
                Strategy(grid, options={**options, "recompute": "pointwise", "recompute_halo": "exchange"}),
            )
            (losses, arrays, sent, kept), *others = (trained(comm, network, one) for one in strategies)
            for strategy, (ours, own, messages, program) in zip(strategies[1:], others):
                counts = count_step(network, strategy, BATCH, comm.size, "float64")
                starts = [o for g in program.backward if g.again for o in g.operations if isinstance(o, Transfer)]
                repeated += len(starts)
                with comm.agreement():
                    assert ours == losses
                    for key, array in arrays.items():
                        np.testing.assert_array_equal(own[key], array, err_msg=key)
                    counted = {kind: total.messages[comm.rank] for kind, total in counts.items()}
                    assert messages["halo"].messages == counted["halo"]
                    more = sum(Move.of(o.exchange).peers(comm.rank)[0].size for o in starts if o.end == "start")
                    assert messages["halo"].messages == sent["halo"].messages + more
                    blocks = parameter_blocks(network, strategy, comm.size)
                    assert layers_memory(program, blocks)["messages"] == layers_memory(kept, blocks)["messages"]
        assert repeated > 0
        assert len(set(comm.allgather_objects(repeated))) == 1


def test_a_halo_that_is_exchanged_again_has_its_price_and_takes_no_memory_in_between():
    machine, network = Machine.load("lassen"), build("mesh", resolution=256)
    found = {}
    for halo in ("keep", "exchange"):
        strategy = Strategy({"width": 2}, options={"recompute": "pointwise", "recompute_halo": halo})
        pricing = Pricing(NetworkModel(machine), RooflineTimes(machine))
        size = compile_program(network, strategy, Target(1, 2)).placement.size
        found[halo] = simulate(network, strategy, 1, pricing, ranks=2), size
    (keep, least), (again, size) = found["keep"], found["exchange"]
    assert size < least
    more = again.total("again") - keep.total("again")
    assert again.step_seconds - keep.step_seconds == pytest.approx(more) and more > 0
    for term in ("forward", "backward", "halo", "halo_exposed", "packing"):
        assert again.total(term) == pytest.approx(keep.total(term))
    assert again.traffic["halo"][0] > keep.traffic["halo"][0] and again.total("messages") > keep.total("messages")


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["resnet", "unet"])
def test_the_same_bits_by_onednn(name):
    with Communicator(MPI.COMM_WORLD) as comm:
        cuts = [Strategy({"height": comm.size}, options={"recompute": rule}) for rule in ("none", "pointwise", "block")]
        (losses, arrays, *_), *others = (trained(comm, NETWORKS[name](), cut, "float32", "onednn") for cut in cuts)
        for ours, own, *_ in others:
            assert ours == losses
            for key, array in arrays.items():
                np.testing.assert_array_equal(own[key], array, err_msg=key)


def test_what_has_other_effects_or_is_read_later_is_kept():
    """Outputs of custom layers, which may have side effects, and of the network are not computed again."""
    calls = []

    class Counts(hg.Layer):
        def forward(self, inputs, params, box):
            calls.append(1)
            return inputs[0].copy()

        def backward(self, dy, inputs, params, box):
            return [dy.copy()], {}

    x, target = hg.Input((4, 4, 2), name="x"), hg.Input((4, 4, 2), name="target")
    y = hg.ReLU(name="read")(hg.Conv(2, 1)(Counts(name="counts")(hg.ReLU(name="relu")(hg.Conv(2, 1)(x)))))
    network = hg.Network({"loss": hg.MeanSquaredError(name="loss")(hg.Conv(2, 1)(y), target), "read": y})
    strategy = Strategy({}, options={"recompute": "block"})
    program = compile_program(network, strategy, Target(2))
    again = {segment.name for segment in program.backward if "again" in segment.name}
    assert not again & {"counts (again)", "read (again)", "loss (again)"}
    with Communicator(MPI.COMM_SELF) as comm, Executor(network, comm, get_backend("numpy"), 2, strategy) as executor:
        fill(executor, 0)
        executor.forward()
        executor.backward()
    assert len(calls) == 1


@reads("x")
@writes("y")
def halved(environment, x, y):
    """Return a kernel ``y = x / 2``."""
    return lambda: np.multiply(x, 0.5, out=y)


@reads("y")
@writes("y", "copy")
def squared(environment, y, copy):
    """Return a kernel that squares `y` in place, after a copy of it for the gradient."""

    def run():
        copy[...] = y
        y[...] = copy**2

    return run


@reads("copy", "dy")
@writes("dx")
def gradient(environment, copy, dy, dx):
    """Return the kernel of the gradient of ``(x / 2)^2``."""
    return lambda: np.multiply(copy, dy, out=dx)


class Square(hg.Layer):
    """``y = (x / 2)^2``, whose second kernel changes an array in place and makes another that backward reads."""

    recomputation = "pointwise"

    def lower(self, context):
        copy = context.scratch(context.box.shape)
        context.run(context.kernel(halved, x=context.inputs[0].view, y=context.y))
        context.run(context.kernel(squared, y=context.y, copy=copy))

        def backward():
            views = {"copy": copy, "dy": context.dy, "dx": context.gradient(0)}
            context.run(context.kernel(gradient, **views))

        return Lowered(backward)


def test_an_operation_that_changes_an_array_in_place_is_repeated_once():
    x, target, found = hg.Input((8, 8, 3), name="x"), hg.Input((8, 8, 1), name="target"), []
    y = hg.Conv(4, 3, padding=1)(Square()(hg.BatchNorm()(hg.Conv(4, 3, padding=1)(x))))
    network = hg.Network({"loss": hg.MeanSquaredError(name="loss")(hg.Conv(1, 1)(hg.ReLU()(y)), target)})
    with Communicator(MPI.COMM_SELF) as comm:
        for rule in ("none", "pointwise"):
            found.append(trained(comm, network, Strategy({}, options={"recompute": rule})))
    again = [segment for segment in found[1][3].backward if segment.name == "square1 (again)"]
    assert sum(len(segment.operations) for segment in again) == 2
    assert found[0][0] == found[1][0] and np.isfinite(found[0][0]).all()
    for key, array in found[0][1].items():
        np.testing.assert_array_equal(found[1][1][key], array, err_msg=key)


@pytest.mark.ranks(1, 2)
def test_the_gradients_after_an_evaluation_pass_are_those_of_its_batch():
    """Halos that are copied back belong to the last pass, whichever kind it is."""
    x, target = hg.Input((8, 8, 3), name="x"), hg.Input((8, 8, 1), name="target")
    y = hg.GELU()(hg.Conv(4, 3, padding=1)(hg.GELU()(hg.Conv(4, 3, padding=1)(x))))
    network, found = hg.Network({"loss": hg.MeanSquaredError(name="loss")(hg.Conv(1, 3, padding=1)(y), target)}), []
    with Communicator(MPI.COMM_WORLD) as comm:
        for rule in ("none", "pointwise", "block"):
            strategy = Strategy({"height": comm.size}, options={"recompute": rule})
            with Executor(network, comm, get_backend("numpy"), BATCH, strategy, "float64", seed=3) as executor:
                for step, training in enumerate((True, False)):
                    fill(executor, step)
                    executor.forward(training=training)
                    executor.backward()
                executor.reducer.finish()
                found.append(copied(executor.store.grads))
    for own in found[1:]:
        for key, array in found[0].items():
            np.testing.assert_array_equal(own[key], array, err_msg=key)


def test_programs_are_the_same_in_every_compilation():
    strategy = Strategy({}, options={"recompute": "pointwise"})
    texts = {"\n".join(lines_of(compile_program(NETWORKS["gated"](), strategy, Target(BATCH)))) for _ in range(6)}
    assert len(texts) == 1


@pytest.mark.ranks(1, 2)
def test_a_layer_of_a_user_that_may_be_repeated():
    class Smooth(hg.Layer):
        """Mean of three rows."""

        stencil = hg.Stencil(kernel=(3, 1), padding=(1, 0))
        recomputation = "pointwise"

        def forward(self, inputs, params, box):
            (x,) = inputs
            return (x[:, :-2] + x[:, 1:-1] + x[:, 2:]) / 3

        def backward(self, dy, inputs, params, box):
            dx = np.zeros_like(inputs[0])
            for first in range(3):
                dx[:, first : first + dy.shape[1]] += dy / 3
            return [dx], {}

    x, target, found = hg.Input((8, 8, 3), name="x"), hg.Input((8, 8, 1), name="target"), []
    y = hg.Conv(4, 3, padding=1)(Smooth(name="smooth")(hg.BatchNorm()(hg.Conv(4, 3, padding=1)(x))))
    network = hg.Network({"loss": hg.MeanSquaredError(name="loss")(hg.Conv(1, 1)(hg.ReLU()(y)), target)})
    with Communicator(MPI.COMM_WORLD) as comm:
        for rule in ("none", "pointwise"):
            found.append(trained(comm, network, Strategy({"height": comm.size}, options={"recompute": rule})))
    assert any(segment.name == "smooth (again)" for segment in found[1][3].backward)
    assert found[0][0] == found[1][0]
    for key, array in found[0][1].items():
        np.testing.assert_array_equal(found[1][1][key], array, err_msg=key)


def test_listing_names_what_ends_and_what_is_made_again():
    program = compile_program(NETWORKS["mesh"](), Strategy({}, options={"recompute": "pointwise"}), Target(BATCH))
    lines = list(lines_of(program))
    assert any("release 1 arrays" in line for line in lines)
    assert any(line.startswith("again") and ".normalize(" in line for line in lines)


@pytest.mark.parametrize("other", ["b", "a (b)", "a (sum)"])
def test_names_of_layers_may_end_in_brackets(other):
    """A segment such as "a (b) (sum)" belongs to layer "a (b)", not to "a"."""
    x = hg.Input((16, 16, 4), name="x")
    y = hg.ReLU(name=other)(hg.Conv(8, 3, padding=1, name="a")(x))
    y = hg.Conv(1, 1, name="last")(hg.Add()(hg.GELU()(y), y, hg.Conv(8, 1)(x)))
    network = hg.Network({"loss": hg.MeanSquaredError()(y, hg.Input((16, 16, 1), name="t"))})
    target = Target(BATCH, probed=frozenset({"x"}))
    program = compile_program(network, Strategy({}), target)
    for name, segments in (("a", {"a"}), (other, {other, f"{other} (sum)"})):
        assert {line[9:29].strip() for line in [*lines_of(program, frozenset({name}))][1:]} == segments
    keeping = Keeping(network, Strategy({}), target)
    assert np.all(np.diff(keeping._positions) <= 0), "the order of the backward pass"



def two_branches():
    x = hg.Input((24, 24, 8))
    y = hg.Add()(hg.Conv(16, 3, padding=1, activation="relu")(x), hg.Conv(16, 3, padding=1)(hg.GELU()(x)))
    y = hg.Conv(3, 1)(y)
    return hg.Network({"loss": hg.SoftmaxCrossEntropy()(y, hg.Input((24, 24, 1), "t", "int32"))})


def gates():
    x = hg.GroupNorm(2)(hg.Input((32, 32, 4)))
    y = hg.ChannelDropout(0.3)(x)
    y = hg.ChannelDropout(0.3)(hg.Multiply()(hg.Add()(x, y), hg.BatchNorm()(y)))
    scores = hg.Dense(3)(hg.Flatten()(hg.Dropout(0.3)(y)))
    return hg.Network({"loss": hg.SoftmaxCrossEntropy()(scores, hg.Input((1,), "t", "int32"))})


@pytest.mark.parametrize("make", [two_branches, gates])
def test_the_smallest_arena_is_not_larger_than_under_a_rule_for_all_layers(make):
    """Gaps between arrays, which no estimate includes, are a part of small arenas."""
    keeping = Keeping(make(), Strategy({}), Target(BATCH))
    rules = [keeping.arena(Strategy({}, options={"recompute": rule})) for rule in ("pointwise", "block")]
    least = keeping.arena(keeping.fewest())
    assert least <= min(rules)
    for capacity in (least, *rules):
        assert keeping.arena(keeping.within(capacity)) <= capacity


def test_the_forward_pass_limits_what_is_saved():
    """The backward pass reads no large output, so that nothing is saved."""
    x = hg.Input((32, 32, 8))
    scores = hg.Dense(3)(hg.GlobalAveragePool()(hg.Add()(hg.StochasticDepth(0.3)(x), x)))
    network = hg.Network({"loss": hg.SoftmaxCrossEntropy()(scores, hg.Input((1,), "t", "int32"))})
    keeping = Keeping(network, Strategy({}), Target(BATCH))
    assert keeping.least == pytest.approx(keeping.most, rel=1e-3) and not keeping.may_fit(0.7 * keeping.most)


def test_segments_of_equal_bytes_take_less_than_pointwise_layers_alone():
    network, target = build("mesh_2k"), Target(1)
    sizes = [
        compile_program(network, strategy, target).placement.size
        for strategy in (
            Strategy({}),
            Strategy({}, options={"recompute": "pointwise"}),
            keep_few(network, Strategy({}), target),
        )
    ]
    assert sizes[2] < 0.36 * sizes[0] and sizes[1] < 0.53 * sizes[0]


# -- memory ---------------------------------------------------------------------------------------


class _Uses(Operation):
    def __init__(self, *buffers: Buffer) -> None:
        super().__init__("layer")
        self._buffers = buffers

    def buffers(self):
        return iter(self._buffers)


@st.composite
def programs(draw):
    """Draw operations on buffers of several sizes, some of which are released and used again."""
    sizes = draw(st.lists(st.integers(1, 400), min_size=1, max_size=8))
    buffers = [Buffer((size,), np.dtype("uint8"), "transient") for size in sizes]
    operations = []
    for _ in range(draw(st.integers(1, 16))):
        used = draw(st.lists(st.sampled_from(buffers), min_size=1, max_size=3, unique=True))
        ended = draw(st.booleans())
        operations.append(Release("layer", tuple(used)) if ended else _Uses(*used))
    return operations


@given(programs())
def test_no_two_arrays_share_memory_while_both_are_used(operations):
    spans, placed = lifetimes(operations, []), placement_of(operations, [])
    alive = [sum(-(-b.nbytes // 64) * 64 for b in spans if _alive(spans[b], at)) for at in range(len(operations))]
    assert max(alive, default=0) <= placed.size
    for a in spans:
        for b in spans:
            first, second = (range(placed.offsets[x], placed.offsets[x] + x.nbytes) for x in (a, b))
            if a is not b and max(first.start, second.start) < min(first.stop, second.stop):
                assert not any(_alive(spans[a], at) and _alive(spans[b], at) for at in range(len(operations)))


@given(programs())
def test_each_array_takes_the_smallest_gap_that_fits(operations):
    spans = lifetimes(operations, [])
    offsets, end = arena._in_order(spans, spans, 64)
    before = []
    for buffer in spans:
        size, at, gaps = arena.aligned(buffer.nbytes), 64, []
        together = [b for b in before if any(_alive(spans[b], n) and _alive(spans[buffer], n) for n in range(16))]
        for start, stop in sorted((offsets[b], offsets[b] + arena.aligned(b.nbytes)) for b in together):
            gaps += [(start - at, at)] if start - at >= size else []
            at = max(at, stop)
        assert offsets[buffer] == (min(gaps)[1] if gaps else at)
        before.append(buffer)
    assert end == max((offsets[b] + arena.aligned(b.nbytes) for b in spans), default=64)
    assert arena._in_order(spans, spans, 64, end + 1) == (offsets, end)
    assert arena._in_order(spans, spans, 64, end) is None or not spans


def _alive(spans, at):
    return any(first <= at <= last for first, last in spans)


def test_the_arena_is_the_smallest_of_several_placements():
    """In the order of time, arrays of a network that is cut along two axes leave holes."""
    program = compile_program(build("unet3d", resolution=32), Strategy({"depth": 2, "height": 2}), Target(1, 4))
    spans, fixed = lifetimes(list(program), program.kept), sum(program.placement.kept.values())
    assert program.placement.size < 0.9 * arena._in_time(spans, fixed)[1]
