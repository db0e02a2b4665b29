"""Tests of normalization: definitions, kinds of statistics, running statistics, messages, rejected settings."""

import math

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.dtensor.groups import group_of, sample_groups
from halograd.layers import BatchNorm, GroupNorm, Input, LayerNorm, LocalResponseNorm, RMSNorm
from halograd.layers.local_response_norm import add_windows
from halograd.layers.strategy import Strategy, layout_of
from halograd.testing import grids, random_array, run_layer
from tests.layers.cases import NORMS
from tests.layers.norms import check_grids, close, executing, moved, normalize, step, traffic
from tests.layers.oracle import torch
from tests.support.grids import grids_in_turn
from tests.support.refusals import refusals

BATCH_SHAPE = (7, 5, 3)
AXES = ("sample", "height", "width")
BACKENDS = ("numpy", "onednn")


def norm(**options):
    return lambda: BatchNorm(name="norm", **options)


def batch_oracle(x, batch, shape, blocks=(slice(None),), relu=False, affine=True):
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
    x, r, g = (random_array((3, *BATCH_SHAPE), name) for name in ("x0", "x1", "g"))
    for parts in grids_in_turn(ranks.size, AXES, turn):
        make = norm(statistics=statistics, activation="relu")
        found = run_layer(make, [BATCH_SHAPE, BATCH_SHAPE], ranks, parts, batch=3, steps=2)
        if found is None:
            continue
        blocks = blocks_of(statistics, 3, BATCH_SHAPE, parts, ranks.size)
        linear = batch_oracle(x, 3, BATCH_SHAPE, blocks)["y"] + r
        close(found["y"], np.maximum(linear, 0))
        close(found["dx1"], np.where(linear > 0, g, 0))


def test_inputs_of_two_shapes_or_three_are_refused():
    x, y = Input(BATCH_SHAPE, "x"), Input((7, 5, 4), "y")
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
        want = batch_oracle(x, 3, shape, blocks_of(statistics, 3, shape, whole, ranks.size))
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
    x = random_array((3, *BATCH_SHAPE), "x0")
    for parts in grids_in_turn(ranks.size, AXES, turn):
        found = run_layer(
            norm(statistics=statistics, activation=relu, affine=affine), [BATCH_SHAPE], ranks, parts, batch=3, steps=2
        )
        want = batch_oracle(
            x, 3, BATCH_SHAPE, blocks_of(statistics, 3, BATCH_SHAPE, parts, ranks.size), bool(relu), affine
        )
        for key, array in want.items() if found is not None else ():
            close(found[key], array)


@pytest.mark.mpi
@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_float32_against_the_definition(ranks, turn, backend):
    x = random_array((2, 9, 8, 16), "x0").astype(np.float32)
    want = batch_oracle(x, 2, (9, 8, 16), relu=True)
    check_grids(ranks, turn, norm(activation="relu"), (9, 8, 16), want, 300, dtype="float32", backend=backend)


@pytest.mark.mpi
def test_the_strategy_chooses_the_statistics(ranks):
    parts = {"height": ranks.size}
    found = run_layer(norm(), [BATCH_SHAPE], ranks, parts, batch=2, options={"statistics": "local"})
    want = batch_oracle(
        random_array((2, *BATCH_SHAPE), "x0"), 2, BATCH_SHAPE, blocks_of("local", 2, BATCH_SHAPE, parts, ranks.size)
    )
    if found is not None:
        close(found["y"], want["y"])


# -- cancellation -----------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize(("mean", "spread"), [(1e3, 1.0), (1e6, 1.0), (-1e4, 1e-2), (5.0, 0.0)])
def test_large_mean_and_small_variance_in_float64(ranks, turn, mean, spread):
    """The error for a large mean is within a multiple of `mean / spread` roundings, which the subtraction leaves."""
    shift, x = moved(BATCH_SHAPE, 3, lambda x: mean * np.array([1, 0, -1]) + spread * x)
    want = {"y": batch_oracle(x, 3, BATCH_SHAPE)["y"]}
    check_grids(
        ranks, turn, norm(), BATCH_SHAPE, want, 10 * max(1, abs(mean) / math.hypot(spread, 3e-3)), batch=3, shift=shift
    )


@pytest.mark.mpi
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mean", [1e2, 1e4])
def test_large_mean_and_small_variance_in_float32(ranks, turn, backend, mean):
    shift, x = moved(BATCH_SHAPE, 3, lambda x: mean + x)
    want = {"y": batch_oracle(x.astype(np.float32), 3, BATCH_SHAPE)["y"]}
    check_grids(ranks, turn, norm(), BATCH_SHAPE, want, 10 * mean, "float32", backend=backend, batch=3, shift=shift)


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
    batches = [3 * random_array((3, *BATCH_SHAPE), f"batch{i}") + i for i in range(3)]
    for parts in grids(ranks.size, AXES):
        blocks = blocks_of(statistics, 3, BATCH_SHAPE, parts, ranks.size)
        want = running(batches, 0.2, blocks)
        with executing(norm(statistics=statistics, momentum=0.2), BATCH_SHAPE, ranks, parts, batch=3) as executor:
            for x in batches:
                executor.set_input("x", x)
                step(executor)
            for key, array in executor.store.state.items():
                close(array, want[key])
                everywhere = ranks.allgather_objects(array.tobytes())
                assert len(set(everywhere)) == 1


@pytest.mark.mpi
def test_running_statistics_survive_forward_passes_without_backward(ranks):
    x = random_array((3, *BATCH_SHAPE), "x0")
    want = running([x, x], 0.1, [slice(None)])
    with executing(norm(statistics="local"), BATCH_SHAPE, ranks, {"sample": ranks.size}, batch=3) as executor:
        blocks = blocks_of("local", 3, BATCH_SHAPE, {"sample": ranks.size}, ranks.size)
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
        with executing(norm(activation="relu"), BATCH_SHAPE, ranks, parts, dtype="float32", backend=backend) as trainer:
            step(trainer)
            mean, var = (random_array(BATCH_SHAPE[-1:], k) for k in ("mean", "var"))
            # As a checkpoint is loaded: into the arrays that are there.
            trainer.store.state["norm/mean"][...] = mean
            trainer.store.state["norm/var"][...] = var**2
            x = random_array((1, *BATCH_SHAPE), "held out")
            shared = {"trainable": False, "store": trainer.store}
            with executing(
                norm(activation="relu"), BATCH_SHAPE, ranks, parts, 1, "float32", backend, x, **shared
            ) as judge:
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
        with executing(norm(), BATCH_SHAPE, ranks, parts) as executor:
            executor.forward(training=False)
            executor.loss_value()
            step(executor)
            y = executor.gather("norm")
        if y is not None:
            close(y, batch_oracle(random_array((2, *BATCH_SHAPE), "x0"), 2, BATCH_SHAPE)["y"])


# -- messages and memory ----------------------------------------------------------------------------


@pytest.mark.mpi
def test_one_sum_forward_and_one_backward(ranks):
    several = ranks.size > 1
    with executing(norm(), BATCH_SHAPE, ranks, {"height": ranks.size}) as executor:
        step(executor)
        forward = traffic(ranks, lambda: executor.forward(training=True))
        nbytes = ranks.counters["statistics"].bytes
        executor.loss_value()
        backward = traffic(ranks, executor.backward)
        executor.reducer.finish()
    assert forward == ({"statistics": 1, "loss": 1} if several else {})
    assert nbytes == (2 * BATCH_SHAPE[-1] * 8 if several else 0)
    assert backward == ({"statistics": 1, "allreduce": 1} if several else {})


@pytest.mark.many_ranks
@pytest.mark.parametrize("statistics", ["sample", "local"])
def test_smaller_groups_sum_among_themselves(ranks, statistics):
    for parts in grids(ranks.size, AXES):
        spatial = parts["height"] * parts["width"]
        with executing(norm(statistics=statistics), BATCH_SHAPE, ranks, parts, batch=4) as executor:
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


test_batch_refuses_what_is_not_meant = refusals(
    ({"statistics": "batch"}, "expected one of"),
    ({"momentum": 1.5}, "from 0 to 1"),
    ({"eps": 0.0}, "eps: expected a number > 0"),
    ({"activation": "tan"}, "expected None, one of relu, .* got 'tan'"),
    call=lambda options: BatchNorm(**options),
)


@pytest.mark.mpi
def test_refuses_a_short_batch_in_training(ranks):
    with executing(norm(), BATCH_SHAPE, ranks, {"sample": ranks.size}, batch=4) as executor:
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
    with executing(norm(), BATCH_SHAPE, ranks, {"width": ranks.size}, batch=2) as executor:
        for i in range(3):
            x = random_array((2, *BATCH_SHAPE), f"batch{i}")
            executor.set_input("x", x)
            step(executor)
            module(lib.tensor(np.moveaxis(x, -1, 1).copy()))
        close(executor.store.state["norm/mean"], module.running_mean.numpy())
        close(executor.store.state["norm/var"], module.running_var.numpy())


def test_strategy_knows_the_option():
    assert Strategy(options={"statistics": "sample"}).options_of("norm") == {"statistics": "sample"}


GROUP_SHAPE = (7, 5, 4)

OPTIONS = [{"activation": "relu"}, {"affine": False}, {"affine": False, "activation": "relu"}]


def group_oracle(kind, x, relu=False, affine=True):
    """Return the results by the definition: x as (N, positions, groups, members), statistics over the kind's axes."""
    shape, channels = x.shape, x.shape[-1]
    groups = {"group": 2, "instance": channels, "layer": 1, "channels": 1, "rms": 1}[kind]
    axes, centered = (3,) if kind in ("channels", "rms") else (1, 3), kind != "rms"
    split = (shape[0], -1, groups, channels // groups)
    gamma, beta = (random_array((channels,), f"norm/{k}") for k in ("gamma", "beta"))
    gamma, beta = gamma if affine else np.ones(channels), beta * (affine and centered)
    g = random_array(shape, "g").reshape(split)
    vectors = [one.reshape(groups, -1) for one in (gamma, beta)]
    found = normalize(x.reshape(split), g, *vectors, axes, relu=relu, centered=centered)
    result = {k: found[k].reshape(shape) for k in ("y", "dx0")}
    if affine:
        plain = normalize(x.reshape(split), g, np.ones(split[2:]), np.zeros(split[2:]), axes, centered=centered)
        xhat = plain["y"].reshape(shape)
        dy = random_array(shape, "g") * (result["y"] > 0 if relu else 1)
        rest = tuple(range(len(shape) - 1))
        result |= {"dgamma": (dy * xhat).sum(rest)} | ({"dbeta": dy.sum(rest)} if centered else {})
    return result


@pytest.mark.mpi
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("options", OPTIONS)
def test_is_the_definition(ranks, turn, kind, options):
    x = random_array((3, *GROUP_SHAPE), "x0")
    want = group_oracle(kind, x, relu="activation" in options, affine=options.get("affine", True))
    check_grids(ranks, turn, lambda: NORMS[kind](**options), GROUP_SHAPE, want, batch=3, steps=2)


@pytest.mark.mpi
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_group_float32_against_the_definition(ranks, turn, kind, backend):
    shape = (9, 8, 16)
    x = random_array((2, *shape), "x0").astype(np.float32)
    want = group_oracle(kind, x, relu=True)
    check_grids(ranks, turn, lambda: NORMS[kind](activation="relu"), shape, want, 300, dtype="float32", backend=backend)


@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["group", "instance", "channels"])
@pytest.mark.parametrize(("mean", "spread"), [(1e6, 1.0), (5.0, 0.0)])
def test_large_mean_and_small_variance(ranks, turn, kind, mean, spread):
    shift, x = moved(GROUP_SHAPE, 2, lambda x: mean + spread * x)
    want = {"y": group_oracle(kind, x)["y"]}
    check_grids(
        ranks, turn, NORMS[kind], GROUP_SHAPE, want, 10 * max(1, abs(mean) / math.hypot(spread, 3e-3)), shift=shift
    )


@pytest.mark.mpi
@pytest.mark.parametrize("kind", NORMS)
def test_evaluation_is_the_same(ranks, kind):
    with executing(lambda: NORMS[kind](), GROUP_SHAPE, ranks, {"width": ranks.size}, trainable=False) as executor:
        for name, array in executor.store.params.items():
            array[...] = random_array(array.shape, name)
        executor.forward(training=False)
        executor.loss_value()
        y = executor.gather("norm")
    if y is not None:
        close(y, group_oracle(kind, random_array((2, *GROUP_SHAPE), "x0"))["y"])


@pytest.mark.many_ranks
@pytest.mark.parametrize("kind", NORMS)
def test_one_sum_forward_and_one_backward_among_those_who_share_samples(ranks, kind):
    groups = {"group": 2, "instance": GROUP_SHAPE[-1], "layer": 1, "channels": 0, "rms": 0}[kind]
    for parts in grids(ranks.size, AXES):
        with executing(lambda: NORMS[kind](), GROUP_SHAPE, ranks, parts, batch=4) as executor:
            step(executor)
            sent = traffic(ranks, lambda executor=executor: step(executor))
            nbytes = ranks.counters["statistics"].bytes
            box = executor.program.values["norm"].box
        shares = groups and parts["height"] * parts["width"] > 1 and box.shape[0]
        assert sent.get("statistics", 0) == (2 if shares else 0)
        assert nbytes == (2 * box.shape[0] * 2 * groups * 8 if shares else 0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rms_norm_without_eps_takes_the_rounding_unit(ranks, dtype):
    tiny = moved(GROUP_SHAPE, 2, lambda x: 1e-9 * x)
    found = run_layer(lambda: RMSNorm(affine=False, name="norm"), [GROUP_SHAPE], ranks, {}, shift=tiny[0], dtype=dtype)
    x = tiny[1]
    close(found["y"], x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.finfo(dtype).eps), dtype)


test_group_refuses_what_is_not_meant = refusals(
    (lambda: GroupNorm(0), "groups: expected a number >= 1"),
    (lambda: GroupNorm(2, eps=0.0), "eps: expected a number > 0"),
    (lambda: GroupNorm(2, activation="gel"), "expected None, one of relu, .* got 'gel'"),
    (lambda: LayerNorm("space"), "axes: expected"),
    (lambda: RMSNorm(0.0), "eps: expected a number > 0"),
    (lambda: GroupNorm(3)(Input(GROUP_SHAPE, name="x")), "expected a number of groups that divides 4, got 3"),
)


#: Large enough alpha that the gradient's second term matters.
SETTINGS = {"size": 5, "alpha": 0.7, "beta": 0.75, "k": 2.0}


def test_definition_over_several_chunks():
    """Single elements equal the formula of the docstring, for more positions than one chunk."""
    shape, size = (80, 70, 11), 4
    layer = LocalResponseNorm(size, 0.5, 0.6, 1.5)
    with Communicator(MPI.COMM_SELF) as alone:
        y = run_layer(lambda: layer, [shape], alone, {})["y"]
    x = random_array((2, *shape), "x0")
    for n, i, j in ((0, 0, 0), (1, 79, 69), (1, 20, 33)):
        for c in range(shape[-1]):
            window = x[n, i, j, max(0, c - size // 2) : c + (size - 1) // 2 + 1]
            want = x[n, i, j, c] * (1.5 + 0.5 / size * np.sum(window**2)) ** -0.6
            assert y[n, i, j, c] == pytest.approx(want, rel=1e-13)


@pytest.mark.parametrize("before, behind", [(0, 0), (1, 2), (3, 0), (9, 9)])
def test_windows_are_those_of_a_loop(before, behind):
    x = random_array((3, 6), "x")
    out = np.empty_like(x)
    add_windows(x, before, behind, out)
    for c in range(6):
        assert np.allclose(out[:, c], x[:, max(0, c - before) : c + behind + 1].sum(1), rtol=1e-14, atol=1e-14)


def test_shape_and_flops():
    assert LocalResponseNorm()(Input((4, 5, 2))).shape == (4, 5, 2)
    assert LocalResponseNorm(5).flops((4, 5, 2)) == 9 * 40


test_refusals = refusals(
    ({"size": 0}, "size: expected at least 1 channel, got 0"),
    ({"alpha": -1.0}, r"alpha: expected a number >= 0, got -1\.0"),
    ({"beta": 0.0}, "beta, k: expected numbers > 0"),
    ({"k": -1.0}, "beta, k: expected numbers > 0"),
    ({"k": float("nan")}, "beta, k: expected numbers > 0"),
    call=lambda wrong: LocalResponseNorm(**wrong),
)
