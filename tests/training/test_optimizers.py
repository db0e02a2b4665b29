"""Tests of optimizers, averages and schedules against plain formulas and torch: state, no allocation, every cut."""

import functools
import math
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.exporting import export_run
from halograd.kernels import get_backend
from halograd.kernels.numpy import updates
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy
from halograd.training import evaluate, train
from halograd.training.directory import checkpoint_of
from halograd.training.executor import Executor
from halograd.training.log import read_log
from halograd.training.optimizers import LAMB, LARS, SGD, Adam, AdamW, Lion, Optimizer
from halograd.training.schedules import (
    SCHEDULES,
    Constant,
    Cosine,
    DecaySettings,
    Linear,
    OneCycle,
    Plateau,
    Polynomial,
    StepDecay,
    WarmUp,
    make_schedule,
)
from halograd.training.trainer import Trainer
from tests.layers.cuts import random_strategy
from tests.support.lean import traced
from tests.training.own_optimizer import OwnLARS, RMSprop
from tests.training.steps import NETWORKS, copied, fill

RATES = [0.1, 0.05, 0.2, 0.1]
SCALE = 0.7


def gradients(store, step):
    for name, array in store.grads.items():
        seed = [step, *map(ord, name)]
        array[...] = np.random.default_rng(seed).standard_normal(array.shape)


def run(store, optimizer, scale=1.0):
    """Return the parameters after some steps, and the gradients of each step."""
    seen = []
    for step, rate in enumerate(RATES):
        gradients(store, step)
        seen.append(copied(store.grads))
        optimizer.begin_step(rate, scale)
        for bucket in store.buckets:
            optimizer.update(bucket)
    return seen


def decays(name):
    return name.endswith("/w")


def sgd(p, g, rate, state, decay, momentum, nesterov):
    g = g + decay * p
    state["v"] = momentum * state.get("v", 0) + g
    return p - rate * (g + momentum * state["v"] if nesterov else state["v"])


def rms(p, g, rate, state, decay):
    g = g + decay * p
    state["v"] = 0.9 * state.get("v", 0) + 0.1 * g * g
    return p - rate * g / (np.sqrt(state["v"]) + 1e-8)


def adam(p, g, rate, state, decay, decoupled):
    state["t"] = t = state.get("t", 0) + 1
    p = p * (1 - rate * decay) if decoupled else p
    g = g if decoupled else g + decay * p
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * g * g
    return p - rate * (state["m"] / (1 - 0.9**t)) / (np.sqrt(state["v"] / (1 - 0.999**t)) + 1e-8)


def lars(p, g, rate, state, decay, layerwise):
    below = np.linalg.norm(g) + decay * np.linalg.norm(p)
    ratio = 0.02 * np.linalg.norm(p) / below if layerwise and np.linalg.norm(p) > 0 else 1.0
    state["v"] = 0.9 * state.get("v", 0) + rate * ratio * (g + decay * p)
    return p - state["v"]


def lion(p, g, rate, state, decay):
    m = state.get("m", 0)
    state["m"] = 0.98 * m + 0.02 * g
    return p - rate * (np.sign(0.9 * m + 0.1 * g) + decay * p)


def lamb(p, g, rate, state, decay, layerwise):
    t = state["t"] = state.get("t", 0) + 1
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * g * g
    u = (state["m"] / (1 - 0.9**t)) / (np.sqrt(state["v"] / (1 - 0.999**t)) + 1e-6) + decay * p
    norms = np.linalg.norm(p), np.linalg.norm(u)
    return p - rate * (norms[0] / norms[1] if layerwise and all(norms) else 1.0) * u


DECAY = {"weight_decay": 0.01}
CASES = {
    "sgd": (lambda s: SGD(s), lambda *a, d: sgd(*a, 0, 0, False)),
    "momentum": (lambda s: SGD(s, momentum=0.9, **DECAY), lambda *a, d: sgd(*a, 0.01 * d, 0.9, False)),
    "nesterov": (lambda s: SGD(s, momentum=0.9, nesterov=True, **DECAY), lambda *a, d: sgd(*a, 0.01 * d, 0.9, True)),
    "adam": (lambda s: Adam(s, weight_decay=0.01), lambda *a, d: adam(*a, 0.01 * d, False)),
    "adamw": (lambda s: AdamW(s, weight_decay=0.01), lambda *a, d: adam(*a, 0.01 * d, True)),
    "lars": (lambda s: LARS(s, momentum=0.9, trust=0.02, weight_decay=0.01), lambda *a, d: lars(*a, 0.01 * d, d)),
    "lion": (lambda s: Lion(s, beta2=0.98, **DECAY), lambda *a, d: lion(*a, 0.01 * d)),
    "lamb": (lambda s: LAMB(s, **DECAY), lambda *a, d: lamb(*a, 0.01 * d, d)),
    "own": (lambda s: RMSprop(s, decay=0.9, **DECAY), lambda *a, d: rms(*a, 0.01 * d)),
    "own norms": (lambda s: OwnLARS(s), lambda *a, d: lars(*a, 0.01 * d, d)),
}


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize("scale", [1.0, SCALE])
@pytest.mark.parametrize("case", CASES)
def test_formula(make_store, monkeypatch, case, scale, bucket_bytes):
    monkeypatch.setattr(updates, "PIECE", 16)  # several pieces per bucket, the last one short
    store = make_store(bucket_bytes)
    make, formula = CASES[case]
    want = copied(store.params)
    states = {k: {} for k in want}
    seen = run(store, make(store), scale)
    for rate, grads in zip(RATES, seen):
        for k in want:
            want[k] = formula(want[k], scale * grads[k], rate, states[k], d=decays(k))
    for k, found in store.params.items():
        np.testing.assert_allclose(found, want[k], rtol=1e-12, atol=1e-13, err_msg=k)


@pytest.mark.torch
@pytest.mark.parametrize("case", ["momentum", "nesterov", "adam", "adamw"])
def test_torch(make_store, case):
    torch = pytest.importorskip("torch", reason="needs torch as oracle: pip install 'halograd[oracle]'")
    store = make_store()
    groups = [[k for k in store.params if decays(k)], [k for k in store.params if not decays(k)]]
    twins = {k: torch.nn.Parameter(torch.tensor(v)) for k, v in store.params.items()}
    options = [{"params": [twins[k] for k in keys], "weight_decay": decay} for keys, decay in zip(groups, (0.01, 0.0))]
    peer = {
        "momentum": lambda: torch.optim.SGD(options, lr=1.0, momentum=0.9),
        "nesterov": lambda: torch.optim.SGD(options, lr=1.0, momentum=0.9, nesterov=True),
        "adam": lambda: torch.optim.Adam(options, lr=1.0),
        "adamw": lambda: torch.optim.AdamW(options, lr=1.0),
    }[case]()
    for rate, grads in zip(RATES, run(store, CASES[case][0](store))):
        for k, twin in twins.items():
            twin.grad = torch.tensor(grads[k])
        for group in peer.param_groups:
            group["lr"] = rate
        peer.step()
    for k, found in store.params.items():
        np.testing.assert_allclose(found, twins[k].detach().numpy(), rtol=1e-12, atol=1e-13, err_msg=k)


@pytest.mark.parametrize("case", CASES)
def test_gaps_stay_zero(make_store, case):
    store = make_store(dtype="float32")
    run(store, CASES[case][0](store))
    for bucket in store.buckets:
        gaps = np.ones(bucket.params.size, bool)
        for where in bucket.slices.values():
            gaps[where] = False
        assert gaps.any() and not bucket.params[gaps].any()


@pytest.mark.parametrize("case", CASES)
def test_state_is_named_by_parameter(make_store, case):
    """The optimizer state has the same names and values for any buckets."""
    one, many = make_store(1 << 20), make_store(1)
    assert len(one.buckets) < len(many.buckets)
    states = []
    for store in (one, many):
        optimizer = CASES[case][0](store)
        run(store, optimizer)
        states.append(optimizer.named_state())
        assert optimizer.state_dict()["step"] == len(RATES)
    assert states[0].keys() == states[1].keys()
    for key, arrays in states[0].items():
        assert arrays.keys() == one.params.keys()
        for name, array in arrays.items():
            assert array.shape == one.params[name].shape and array.any()
            np.testing.assert_allclose(array, states[1][key][name], rtol=1e-13)


@pytest.mark.parametrize("case", CASES)
def test_update_allocates_no_array(make_store, case):
    store = make_store(first=(64, 64, 9), dtype="float32")
    optimizer = CASES[case][0](store)

    def update():
        optimizer.begin_step(0.1, SCALE)
        for bucket in store.buckets:
            optimizer.update(bucket)

    run(store, optimizer, SCALE)
    peak, _ = traced(update)
    assert peak < 4096, f"a step allocated {peak} bytes; the parameters have {store.buckets[0].params.nbytes}"


def test_nesterov_needs_momentum(make_store):
    with pytest.raises(ValueError, match=r"nesterov: .*momentum > 0 .*, got 0"):
        SGD(make_store(), nesterov=True)


def own(**attributes):
    return type("Own", (Optimizer,), {"rule": lambda self, piece, numbers: None, **attributes})


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (type("Own", (Optimizer,), {}), {}, "optimizer Own: expected a method rule(self, piece, numbers), got none"),
        (own(state_names="velocity"), {}, "optimizer Own: state_names: expected a tuple of different words other than"),
        (own(state_names=("v", "average")), {}, "got ('v', 'average')"),
        (own(state_names=("v", "v")), {}, "got ('v', 'v')"),
        (own(state_names=("a/b",)), {}, "got ('a/b',)"),
        (RMSprop, {"decay": 1}, "decay: expected a number < 1, got 1"),
        (RMSprop, {"beta": 1}, "beta: unknown key; expected one of kind, decay, epsilon, weight_decay"),
        (Adam, {"betas": (0.9, 0.99)}, "betas: unknown key; expected one of kind, beta1, beta2, epsilon, weight_decay"),
    ],
)
def test_what_is_no_optimizer_is_refused(make_store, kind, settings, message):
    with pytest.raises(UserError) as error:
        kind(make_store(), **settings)
    assert message in str(error.value)


STEPS, AVERAGE = 12, 0.75
FACTORS = {"conv*": 0.5, "conv2": 0.0, "dense4": 3.0}
OPTIMIZERS = {
    "sgd": lambda store, **more: SGD(store, momentum=0.5, weight_decay=1e-2, **more),
    "adam": lambda store, **more: Adam(store, weight_decay=1e-2, **more),
    "adamw": lambda store, **more: AdamW(store, weight_decay=1e-2, **more),
    "lars": lambda store, **more: LARS(store, weight_decay=1e-2, **more),
}


def run_averages(comm, strategy, kind, factors=FACTORS, average=AVERAGE, rate=0.05):
    """Return the parameters after every step, and the final averages (this rank's blocks). Collective."""
    made = NETWORKS["lenet"]()
    with Executor(made, comm, get_backend("numpy"), 4, strategy, "float64", seed=3) as executor:
        optimizer = OPTIMIZERS[kind](executor.store, factors=factors, average=average)
        trainer, history = Trainer(executor, optimizer, Constant(rate)), []
        for step in range(STEPS):
            fill(executor, step % 3)
            trainer.step()
            trainer.synchronize()
            history.append(copied(executor.store.params))
        with trainer.averaged():
            averages = copied(executor.store.params)
        after = copied(executor.store.params)
        blocks = {name: executor.store.box(name).slices() for name in executor.store.params}
        start = {name: executor.store.shapes[name] for name in executor.store.params}
    assert all((after[name] == array).all() for name, array in history[-1].items())
    return SimpleNamespace(history=history, averages=averages, blocks=blocks, start=start)


@functools.cache
def alone(kind, rate=0.05):
    with Communicator(MPI.COMM_SELF) as comm:
        return run_averages(comm, Strategy(bucket_bytes=1 << 14), kind, rate=rate)


def check(comm, found, want):
    with comm.agreement():
        for name, where in found.blocks.items():
            for ours, whole in ((found.history[-1], want.history[-1]), (found.averages, want.averages)):
                np.testing.assert_allclose(ours[name], whole[name][where], rtol=0, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_factor_is_another_learning_rate(kind):
    """In the first step a factor of a layer has the effect of a multiplied learning rate."""
    factors = {name: next((f for p, f in reversed(FACTORS.items()) if match(p, name)), 1.0) for name in layers()}
    assert set(factors.values()) == {0.0, 0.5, 1.0, 3.0}
    found = alone(kind).history[0]
    with Communicator(MPI.COMM_SELF) as comm:
        for factor in sorted(set(factors.values())):
            want = run_averages(comm, Strategy(), kind, {}, 0.0, 0.05 * factor).history[0]
            own = [name for name in found if factors[name.rpartition("/")[0]] == factor]
            assert own
            for name in own:
                np.testing.assert_allclose(found[name], want[name], rtol=1e-14, atol=0, err_msg=name)


def match(pattern, name):
    return name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1]))


def layers():
    made = NETWORKS["lenet"]()
    return {name.rpartition("/")[0] for name in made.parameters()}


def test_the_formula():
    """Averages follow ``a + (1 - w) (p - a)`` with ``w = min(average, n / (9 + n))``, from the initial parameters."""
    found, initial = alone("sgd"), NETWORKS["lenet"]().initial_values(3)
    for name, ours in found.averages.items():
        want = initial[name].astype(np.float64)
        for n, params in enumerate(found.history, 1):
            want = want + (1 - min(AVERAGE, n / (9 + n))) * (params[name] - want)
        np.testing.assert_allclose(ours, want, rtol=0, atol=1e-12, err_msg=name)
    assert any((found.averages[name] != found.history[-1][name]).any() for name in found.averages)


@pytest.mark.nightly
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("seed", range(3))
def test_random_strategies(seed):
    with Communicator(MPI.COMM_WORLD, "mpi") as comm:
        check(comm, run_averages(comm, random_strategy(NETWORKS["lenet"](), comm.size, seed), "adam"), alone("adam"))


@pytest.mark.nightly
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("scheme", [Scheme("sharded"), Scheme("hierarchical"), Scheme(replicated_dense=2)], ids=str)
def test_schemes(scheme):
    with Communicator(MPI.COMM_WORLD, "shared") as comm:
        strategy = Strategy({"sample": comm.size}, bucket_bytes=4096, reduction=scheme)
        check(comm, run_averages(comm, strategy, "sgd"), alone("sgd"))


def test_refused():
    with Communicator(MPI.COMM_SELF) as comm, Executor(NETWORKS["lenet"](), comm, get_backend("numpy"), 4) as executor:
        for factors, words in (({"cnov1": 0.1}, "got 'cnov1'"), ({"conv1": -1}, "expected a finite number >= 0")):
            with pytest.raises(ValueError, match=words):
                SGD(executor.store, factors=factors)
        with pytest.raises(ValueError, match=r"average: .*\[0, 1\), got 1"):
            SGD(executor.store, average=1)


# -- whole runs ------------------------------------------------------------------------------------

SETS = ["training.average=0.9", 'schedule.factors={"conv1*" = 0.5}', 'schedule.kind="constant"', "training.epochs=2"]
CUTS = {1: [], 2: ["strategy.height=2"], 4: ["strategy.height=2", "strategy.width=2", 'reduction.name="sharded"']}


@pytest.mark.ranks(1, 2, 4)
def test_a_run_is_judged_by_its_averages(comm, shared, config):
    """Validations use the averages, in training, later and after resumption; checkpoints also have the parameters."""
    cuts = CUTS[comm.size]

    def results(out, more, comm):
        more = [*SETS, *more, f"output.directory={shared / out}"]
        train(config, [*more, "training.epochs=1"], comm=comm)
        train(config, more, True, comm=comm)
        return evaluate(shared / out, comm=comm), evaluate(shared / out, ["training.average=0"], comm=comm)

    found = results("cut", cuts, comm)
    if comm.rank:
        return
    last = read_log(shared / "cut" / "log.jsonl", "validation")[-1]
    assert found[0]["loss"] == pytest.approx(last["loss"], rel=1e-12)
    assert abs(found[0]["loss"] - found[1]["loss"]) > 1e-4
    want = results("alone", [], MPI.COMM_SELF)
    assert [one["loss"] for one in found] == pytest.approx([one["loss"] for one in want], rel=1e-9)
    with h5py.File(checkpoint_of(shared / "cut/checkpoints/latest.h5")) as file:
        names = []
        file["params"].visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        assert names and all(file[f"optimizer/average/{name}"].shape == file[f"params/{name}"].shape for name in names)


@pytest.mark.ranks(1)
def test_averages_that_begin_later_and_end(comm, shared, config):
    out = f"output.directory={shared / 'late'}"
    plain = ['schedule.kind="constant"', out]
    train(config, [*plain, "training.epochs=1"], comm=comm)
    before = evaluate(shared / "late", ["training.average=0.999999"], comm=comm)  # none are in the file
    train(config, [*plain, "training.epochs=2", "training.average=0.999999"], True, comm=comm)
    averaged = evaluate(shared / "late", comm=comm)
    assert averaged["loss"] != before["loss"]
    train(config, [*plain, "training.epochs=3", "training.average=0"], True, comm=comm)
    with h5py.File(checkpoint_of(shared / "late/checkpoints/latest.h5")) as file:
        assert "average" not in file["optimizer"]


@pytest.mark.ranks(1)
def test_exported_are_the_averages(comm, shared, config, tmp_path):
    safetensors = pytest.importorskip(
        "safetensors.numpy", reason="needs safetensors: pip install 'halograd[interchange]'"
    )
    out = shared / "exported"
    train(config, [*SETS, f"output.directory={out}"], comm=comm)
    arrays = {}
    for name, more in (("averaged", []), ("last", ["training.average=0"])):
        export_run(out, "safetensors", tmp_path / f"{name}.safetensors", more)
        arrays[name] = safetensors.load_file(tmp_path / f"{name}.safetensors")
    differ = [name for name in arrays["last"] if (arrays["last"][name] != arrays["averaged"][name]).any()]
    assert differ and not [name for name in differ if "running" in name or "num_batches" in name]


@pytest.mark.ranks(1)
def test_refused_by_a_run(comm, shared, config):
    with pytest.raises(UserError, match=r"schedule\.factors: .* got 'up9'"):
        train(config, ["schedule.factors={up9 = 0.1}", f"output.directory={shared / 'x'}"], comm=comm)


def test_constant():
    assert [Constant(0.3)(s) for s in (0, 7, 10**9)] == [0.3] * 3


def test_step():
    rate = StepDecay(1.0, (3, 5), 0.1)
    assert [rate(s) for s in (0, 2, 3, 4, 5, 99)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_cosine():
    rate = Cosine(1.0, 8, final=0.2)
    assert rate(0) == 1.0
    assert rate(2) == pytest.approx(0.2 + 0.4 * (1 + math.cos(math.pi / 4)))
    assert rate(4) == pytest.approx(0.6)
    assert rate(8) == rate(800) == pytest.approx(0.2)


def test_warm_up_multiplies():
    rate = WarmUp(StepDecay(2.0, (3,), 0.5), steps=4, start=0.2)
    assert [rate(s) for s in range(6)] == pytest.approx([0.8, 1.2, 1.6, 1.0, 1.0, 1.0])


def test_warm_up_of_warm_up():
    rate = WarmUp(WarmUp(Constant(1.0), 2), 4)
    assert [rate(s) for s in range(5)] == pytest.approx([0.5 * 0.25, 0.5, 0.75, 1.0, 1.0])


def test_cosine_after_a_warm_up():
    config = DecaySettings(kind="cosine", learning_rate=0.4, warmup_epochs=2, warmup_start=0.1, final=0.1)
    rate = make_schedule(config, epochs=10, steps_per_epoch=2)
    assert [rate(s) for s in range(5)] == pytest.approx([0.13, 0.22, 0.31, 0.4, 0.4])
    assert rate(5) < rate(4) == max(map(rate, range(30)))
    assert [rate(s) for s in (12, 20, 99)] == pytest.approx([0.25, 0.1, 0.1])


@pytest.mark.parametrize("steps", [3, 4, 9])
def test_warm_up_to_the_end_of_a_cosine(steps):
    rate = WarmUp(Cosine(1.0, 4, 0.5, begin=steps), steps)
    assert [rate(s) for s in range(steps)] == pytest.approx([(s + 1) / steps for s in range(steps)])
    assert rate(steps + 1) == pytest.approx(0.5)


def test_no_memory():
    rate = WarmUp(Cosine(0.1, 50, begin=5), 5)
    forward = [rate(s) for s in range(60)]
    assert [rate(s) for s in reversed(range(60))] == forward[::-1]


@pytest.mark.parametrize("make", [lambda: Cosine(1.0, 0), lambda: WarmUp(Constant(1.0), 0)])
def test_no_steps(make):
    with pytest.raises(ValueError, match="steps: expected at least 1, got 0"):
        make()


def test_negative_begin():
    with pytest.raises(ValueError, match="begin: expected at least 0, got -1"):
        Cosine(1.0, 4, begin=-1)


def test_falling_milestones():
    with pytest.raises(ValueError, match=r"milestones: .*rising.*, got \(5, 3\)"):
        StepDecay(1.0, (5, 3))


def of(epochs=4, **table):
    """Return the schedule of a table, for epochs of five steps."""
    return make_schedule(SCHEDULES.settings(table["kind"], {"learning_rate": 2.0, **table}), epochs, 5)


def test_polynomial_and_line_after_a_warm_up():
    rate = of(kind="polynomial", power=3, final=0.5, warmup_epochs=1)
    assert [rate(s) for s in (0, 4, 5)] == pytest.approx([0.4, 2.0, 2.0])
    assert rate(14) == pytest.approx(0.5 + 1.5 * 0.4**3) and rate(20) == rate(99) == 0.5
    assert [of(kind="linear")(s) for s in (0, 5, 10, 20, 21)] == pytest.approx([2, 1.5, 1, 0, 0])
    assert of(kind="linear", final=1.0) == Linear(2.0, 20, 1.0) and Linear(2.0, 20, 1.0)(10) == pytest.approx(1.5)
    assert of(kind="polynomial") == Polynomial(2.0, 20, 0.9)


@pytest.mark.torch
def test_one_cycle_is_that_of_torch():
    import torch

    for steps, rise in ((20, 0.3), (7, 0.5), (100, 0.25)):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
        theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2.0, total_steps=steps, pct_start=rise)
        mine = OneCycle(2.0, steps, rise, final=2.0 / 25 / 1e4)
        for step in range(steps):
            assert mine(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12, abs=1e-15), step
            optimizer.step()
            if step + 1 < steps:
                theirs.step()
    assert [OneCycle(2.0, 1)(s) for s in (0, 1)] == [2.0, 0.0]
    with pytest.raises(UserError, match=r"warmup_epochs: .*0 with one_cycle.*, got 1"):
        of(kind="one_cycle", warmup_epochs=1)


@pytest.mark.parametrize(
    ("better", "values"), [("lower", [5, 4, 4, 4.5, None, 4.1, 4.2]), ("higher", [1, 2, 2, 1, math.nan, 1, 1])]
)
def test_plateau(better, values):
    """Two validations without improvement, undefined ones left out, multiply the rate; state continues elsewhere."""
    table = {"kind": "plateau", "score": "iou", "factor": 0.5, "patience": 2, "least": 0.6, "warmup_epochs": 0.2}
    rates, schedule = [], of(**table)
    schedule.follow({"loss": "lower", "iou": better})
    for value in values:
        schedule.validated({"loss": 1.0, "iou": value})
        rates.append(schedule(9))
        again = of(**table)
        again.follow({"iou": better})
        again.load_state_dict(schedule.state_dict())
        schedule = again
    assert rates == [2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 0.6]
    other = Plateau(2.0, 0.5, 2)
    other.load_state_dict(schedule.state_dict())
    assert (other.drops, other.best, other.waited) == (2, None, 0)


def test_plateau_without_its_score():
    with pytest.raises(UserError, match=r"schedule\.score: .*loss, iou, got 'dice'"):
        of(kind="plateau", score="dice").follow({"loss": "lower", "iou": "higher", "own": None})
    with pytest.raises(UserError, match=r"held-out samples.*, got data.validation = 0"):
        of(kind="plateau").follow({})
