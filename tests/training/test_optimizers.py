"""Tests of optimizers against plain formulas and torch; their state by name; no allocation in a step."""

import numpy as np
import pytest

from halograd.errors import UserError
from halograd.kernels.numpy import updates
from halograd.training.optimizers import LAMB, LARS, SGD, Adam, AdamW, Lion, Optimizer
from tests.support.lean import traced
from tests.training.own_optimizer import OwnLARS, RMSprop
from tests.training.steps import copied

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
