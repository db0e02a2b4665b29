"""Tests of batch norm: its three kinds of statistics, running statistics, messages, rejected settings."""

import math

import numpy as np
import pytest

from halograd.dtensor.groups import group_of, sample_groups
from halograd.layers import BatchNorm, Input
from halograd.layers.strategy import Strategy, layout_of
from halograd.testing import grids, random_array, run_layer
from tests.layers.norms import check_grids, close, executing, moved, normalize, step, traffic
from tests.layers.oracle import torch
from tests.support.grids import grids_in_turn
from tests.support.refusals import refusals

SHAPE = (7, 5, 3)
AXES = ("sample", "height", "width")
BACKENDS = ("numpy", "onednn")


def norm(**options):
    return lambda: BatchNorm(name="norm", **options)


def oracle(x, batch, shape, blocks=(slice(None),), relu=False, affine=True):
    """Return the results of the definition applied to each of `blocks`; dgamma and dbeta are sums over blocks."""
    g = random_array((batch, *shape), "g")
    channels = shape[-1:]
    gamma, beta = (
        random_array(channels, f"norm/{k}") if affine else np.array(float(k == "gamma")) for k in ("gamma", "beta")
    )
    total = {
        "y": np.zeros(x.shape),
        "dx0": np.zeros(x.shape),
        "dgamma": np.zeros(channels),
        "dbeta": np.zeros(channels),
    }
    for block in blocks:
        part = normalize(x[block], g[block], gamma, beta, tuple(range(x.ndim - 1)), relu=relu)
        for key in ("y", "dx0"):
            total[key][block] = part[key]
        for key in ("dgamma", "dbeta"):
            total[key] += part[key]
    return total if affine else {k: v for k, v in total.items() if k in ("y", "dx0")}


def blocks_of(statistics, batch, shape, parts, size):
    """Return slices of the global array, one per group of ranks with common statistics."""
    boxes = layout_of((batch, *shape), {**dict.fromkeys(AXES, 1), **parts}, size).boxes
    if statistics == "global":
        return [slice(None)]
    if statistics == "sample":
        return [slice(*r) for r in sorted({b.ranges[0] for b in boxes if b.size})]
    return [b.slices() for b in boxes if b.size]


# -- exactness --------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize("statistics", ["global", "sample", "local"])
def test_a_residual_is_added_before_the_activation(ranks, turn, statistics):
    x, r, g = (random_array((3, *SHAPE), name) for name in ("x0", "x1", "g"))
    for parts in grids_in_turn(ranks.size, AXES, turn):
        make = norm(statistics=statistics, activation="relu")
        found = run_layer(make, [SHAPE, SHAPE], ranks, parts, batch=3, steps=2)
        if found is None:
            continue
        blocks = blocks_of(statistics, 3, SHAPE, parts, ranks.size)
        linear = oracle(x, 3, SHAPE, blocks)["y"] + r
        close(found["y"], np.maximum(linear, 0))
        close(found["dx1"], np.where(linear > 0, g, 0))


def test_inputs_of_two_shapes_or_three_are_refused():
    x, y = Input(SHAPE, "x"), Input((7, 5, 4), "y")
    for nodes in ((x, y), (x, x, x)):
        with pytest.raises(
            ValueError, match="BatchNorm: expected one input, or a second of the same shape to add, got"
        ):
            BatchNorm()(*nodes)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("statistics", ["global", "sample", "local"])
def test_statistics_of_cut_channels_are_those_of_their_blocks_in_space(ranks, statistics):
    """Statistics under a cut of channels are those without it, because channels do not mix."""
    shape = (6, 5, 4)
    x = random_array((3, *shape), "x0")
    for parts in grids(ranks.size, ("sample", "width", "channel")):
        found = run_layer(norm(statistics=statistics), [shape], ranks, parts, batch=3, steps=2)
        whole = {"sample": parts["sample"], "width": parts["width"]}
        want = oracle(x, 3, shape, blocks_of(statistics, 3, shape, whole, ranks.size))
        for key, array in want.items() if found is not None else ():
            close(found[key], array)


@pytest.mark.ranks(2, 4)
def test_statistics_of_cut_channels_are_summed_by_the_ranks_with_the_same(ranks):
    """With cut channels, statistics are summed among ranks with the same channels: once forward and once backward."""
    shape, channel = (8, 6, 4), 2
    parts = {"height": ranks.size // channel, "channel": channel}
    strategy = Strategy(parts, {"probe": {"height": ranks.size}})
    with executing(norm(), shape, ranks, parts, strategy=strategy) as executor:
        assert executor.store.state["norm/mean"].shape == (2,)
        step(executor)
        ranks.counters.reset()
        step(executor)
        found = ranks.counters["statistics"]
        several = int(ranks.size > channel)
        assert (found.messages, found.bytes) == (2 * several, 2 * several * 2 * 2 * 8)
        assert ranks.counters["running statistics"].messages == 0
        state = executor.store.gather(ranks, executor.store.state)
        if state is not None:
            x = random_array((2, *shape), "x0").reshape(-1, 4)
            close(state["norm/mean"], x.mean(0) * (1 - 0.9**2))


@pytest.mark.mpi
@pytest.mark.parametrize("statistics", ["global", "sample", "local"])
@pytest.mark.parametrize(("relu", "affine"), [(None, True), ("relu", True), ("relu", False)])
def test_is_the_definition_on_the_blocks_of_its_statistics(ranks, turn, statistics, relu, affine):
    x = random_array((3, *SHAPE), "x0")
    for parts in grids_in_turn(ranks.size, AXES, turn):
        found = run_layer(
            norm(statistics=statistics, activation=relu, affine=affine), [SHAPE], ranks, parts, batch=3, steps=2
        )
        want = oracle(x, 3, SHAPE, blocks_of(statistics, 3, SHAPE, parts, ranks.size), bool(relu), affine)
        for key, array in want.items() if found is not None else ():
            close(found[key], array)


@pytest.mark.mpi
@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_against_the_definition(ranks, turn, backend):
    x = random_array((2, 9, 8, 16), "x0").astype(np.float32)
    want = oracle(x, 2, (9, 8, 16), relu=True)
    check_grids(ranks, turn, norm(activation="relu"), (9, 8, 16), want, 300, dtype="float32", backend=backend)


@pytest.mark.mpi
def test_the_strategy_chooses_the_statistics(ranks):
    parts = {"height": ranks.size}
    found = run_layer(norm(), [SHAPE], ranks, parts, batch=2, options={"statistics": "local"})
    want = oracle(random_array((2, *SHAPE), "x0"), 2, SHAPE, blocks_of("local", 2, SHAPE, parts, ranks.size))
    if found is not None:
        close(found["y"], want["y"])


# -- cancellation -----------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize(("mean", "spread"), [(1e3, 1.0), (1e6, 1.0), (-1e4, 1e-2), (5.0, 0.0)])
def test_large_mean_and_small_variance_in_float64(ranks, turn, mean, spread):
    """The error for a large mean is within a multiple of `mean / spread` roundings, which the subtraction leaves."""
    shift, x = moved(SHAPE, 3, lambda x: mean * np.array([1, 0, -1]) + spread * x)
    want = {"y": oracle(x, 3, SHAPE)["y"]}
    check_grids(
        ranks, turn, norm(), SHAPE, want, 10 * max(1, abs(mean) / math.hypot(spread, 3e-3)), batch=3, shift=shift
    )


@pytest.mark.mpi
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mean", [1e2, 1e4])
def test_large_mean_and_small_variance_in_float32(ranks, turn, backend, mean):
    shift, x = moved(SHAPE, 3, lambda x: mean + x)
    want = {"y": oracle(x.astype(np.float32), 3, SHAPE)["y"]}
    check_grids(ranks, turn, norm(), SHAPE, want, 10 * mean, "float32", backend=backend, batch=3, shift=shift)


# -- running statistics and evaluation --------------------------------------------------------------


def running(batches, momentum, blocks):
    """Return running mean and variance after `batches`: weighted means over blocks."""
    mean, var = 0.0, 1.0
    total = batches[0][..., 0].size
    for x in batches:
        parts = [x[b].reshape(-1, x.shape[-1]) for b in blocks]
        m = sum(len(p) * p.mean(0) for p in parts) / total
        v = sum(len(p) * p.var(0) * len(p) / max(len(p) - 1, 1) for p in parts) / total
        mean, var = (1 - momentum) * mean + momentum * m, (1 - momentum) * var + momentum * v
    return {"norm/mean": mean, "norm/var": var}


@pytest.mark.many_ranks
@pytest.mark.parametrize("statistics", ["global", "sample", "local"])
def test_running_statistics_are_one_processes_and_the_same_on_all_ranks(ranks, statistics):
    batches = [3 * random_array((3, *SHAPE), f"batch{i}") + i for i in range(3)]
    for parts in grids(ranks.size, AXES):
        blocks = blocks_of(statistics, 3, SHAPE, parts, ranks.size)
        want = running(batches, 0.2, blocks)
        with executing(norm(statistics=statistics, momentum=0.2), SHAPE, ranks, parts, batch=3) as executor:
            for x in batches:
                executor.set_input("x", x)
                step(executor)
            for key, array in executor.store.state.items():
                close(array, want[key])
                everywhere = ranks.allgather_objects(array.tobytes())
                assert len(set(everywhere)) == 1


@pytest.mark.mpi
def test_running_statistics_survive_forward_passes_without_backward(ranks):
    x = random_array((3, *SHAPE), "x0")
    want = running([x, x], 0.1, [slice(None)])
    with executing(norm(statistics="local"), SHAPE, ranks, {"sample": ranks.size}, batch=3) as executor:
        blocks = blocks_of("local", 3, SHAPE, {"sample": ranks.size}, ranks.size)
        want = running([x, x], 0.1, blocks)
        for training in (True, True, False):
            executor.forward(training=training)
            executor.loss_value()
        for key, array in executor.store.state.items():
            close(array, want[key])


@pytest.mark.mpi
@pytest.mark.parametrize("backend", BACKENDS)
def test_evaluation_uses_the_running_statistics_without_messages(ranks, backend):
    for parts in grids(ranks.size, AXES):
        with executing(norm(activation="relu"), SHAPE, ranks, parts, dtype="float32", backend=backend) as trainer:
            step(trainer)
            mean, var = (random_array(SHAPE[-1:], k) for k in ("mean", "var"))
            # As a checkpoint is loaded: into the arrays that are there.
            trainer.store.state["norm/mean"][...] = mean
            trainer.store.state["norm/var"][...] = var**2
            x = random_array((1, *SHAPE), "held out")
            shared = {"trainable": False, "store": trainer.store}
            with executing(norm(activation="relu"), SHAPE, ranks, parts, 1, "float32", backend, x, **shared) as judge:
                gamma, beta = (trainer.store.params[f"norm/{k}"].astype(np.float64) for k in ("gamma", "beta"))
                want = np.maximum(gamma * (x - mean) / np.sqrt(var**2 + 1e-5) + beta, 0)
                messages = traffic(ranks, lambda: judge.forward(training=False))
                judge.loss_value()
                assert set(messages) <= {"loss"}
                y = judge.gather("norm")
            if y is not None:
                close(y, want, "float32")


@pytest.mark.mpi
def test_training_goes_on_after_evaluation(ranks):
    for parts in grids(ranks.size, AXES):
        with executing(norm(), SHAPE, ranks, parts) as executor:
            executor.forward(training=False)
            executor.loss_value()
            step(executor)
            y = executor.gather("norm")
        if y is not None:
            close(y, oracle(random_array((2, *SHAPE), "x0"), 2, SHAPE)["y"])


# -- messages and memory ----------------------------------------------------------------------------


@pytest.mark.mpi
def test_one_sum_forward_and_one_backward(ranks):
    several = ranks.size > 1
    with executing(norm(), SHAPE, ranks, {"height": ranks.size}) as executor:
        step(executor)
        forward = traffic(ranks, lambda: executor.forward(training=True))
        nbytes = ranks.counters["statistics"].bytes
        executor.loss_value()
        backward = traffic(ranks, executor.backward)
        executor.reducer.finish()
    assert forward == ({"statistics": 1, "loss": 1} if several else {})
    assert nbytes == (2 * SHAPE[-1] * 8 if several else 0)
    assert backward == ({"statistics": 1, "allreduce": 1} if several else {})


@pytest.mark.many_ranks
@pytest.mark.parametrize("statistics", ["sample", "local"])
def test_smaller_groups_sum_among_themselves(ranks, statistics):
    for parts in grids(ranks.size, AXES):
        spatial = parts["height"] * parts["width"]
        with executing(norm(statistics=statistics), SHAPE, ranks, parts, batch=4) as executor:
            step(executor)
            sent = traffic(ranks, lambda executor=executor: step(executor))
        grouped = statistics == "sample" and spatial > 1  # also where a rank has no elements to add
        assert sent.get("statistics", 0) == (2 if grouped else 0)
        everyone = grouped and parts["sample"] == 1
        assert sent.get("running statistics", 0) == (0 if everyone or ranks.size == 1 else 1)


@pytest.mark.mpi
def test_layers_cut_alike_share_one_group(ranks):
    parts = {"sample": min(2, ranks.size), "height": max(1, ranks.size // 2)}
    groups = sample_groups(layout_of((2, 8, 4, 1), parts, ranks.size).boxes)
    color = groups.color(ranks.rank)
    members = [] if color is None else list(groups.members(color))
    first = group_of(ranks, groups)
    assert group_of(ranks, sample_groups(layout_of((2, 9, 4, 3), parts, ranks.size).boxes)) is first
    assert (list(first.ranks) if first is not None else []) == members


# -- refusals ---------------------------------------------------------------------------------------


test_refuses_what_is_not_meant = refusals(
    ({"statistics": "batch"}, "expected one of"),
    ({"momentum": 1.5}, "from 0 to 1"),
    ({"eps": 0.0}, "eps: expected a number > 0"),
    ({"activation": "tan"}, "expected None, one of relu, .* got 'tan'"),
    call=lambda options: BatchNorm(**options),
)


@pytest.mark.mpi
def test_refuses_a_short_batch_in_training(ranks):
    with executing(norm(), SHAPE, ranks, {"sample": ranks.size}, batch=4) as executor:
        executor.mode.valid = 3
        with pytest.raises(ValueError, match="full batch of 4 samples, got 3"):
            executor.forward(training=True)
        executor.forward(training=False)
        executor.loss_value()
        with pytest.raises(RuntimeError, match="training mode before"):
            executor.backward()


def test_shapes_and_parameters():
    y = BatchNorm()(Input((4, 4, 6), name="x"))
    assert y.shape == (4, 4, 6)
    assert {k: p.shape for k, p in y.layer.parameters((4, 4, 6)).items()} == {"gamma": (6,), "beta": (6,)}
    assert not any(p.decay for p in y.layer.parameters((4, 4, 6)).values())
    assert BatchNorm(affine=False).parameters((4, 4, 6)) == {}


# -- torch ------------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.ranks(1, 2)
def test_running_statistics_against_torch(ranks):
    lib = torch()
    module = lib.nn.BatchNorm2d(3, dtype=lib.float64)
    with executing(norm(), SHAPE, ranks, {"width": ranks.size}, batch=2) as executor:
        for i in range(3):
            x = random_array((2, *SHAPE), f"batch{i}")
            executor.set_input("x", x)
            step(executor)
            module(lib.tensor(np.moveaxis(x, -1, 1).copy()))
        close(executor.store.state["norm/mean"], module.running_mean.numpy())
        close(executor.store.state["norm/var"], module.running_var.numpy())


def test_strategy_knows_the_option():
    assert Strategy(options={"statistics": "sample"}).options_of("norm") == {"statistics": "sample"}
