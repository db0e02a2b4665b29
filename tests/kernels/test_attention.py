"""Tests of attention against the whole matrix of scores in float64, and against torch; its rules along one axis."""

import itertools
import math
import zlib
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halograd.device import wide
from halograd.kernels import AttentionGeometry, DropoutMask, Everywhere, KernelError, Neighborhood, Windows, get_backend
from halograd.kernels.attention import boxes, extents_of, runs, span_of
from halograd.kernels.numpy import attention as tiled

from .conftest import EPS, Arrays
from .every import text_of
from .test_elementwise import dropped


@dataclass(frozen=True)
class Case:
    """A whole attention, without cuts."""

    reaches: tuple
    heads: int = 2
    groups: int = 1
    d: int = 4
    e: int = 4
    samples: int = 2
    bias: bool = False
    rate: float = 0.0

    @property
    def queries(self):
        return tuple(r.queries for r in self.reaches)

    @property
    def keys(self):
        return tuple(r.keys for r in self.reaches)

    def geometry(self, state=None, **changed):
        dropout = None
        if self.rate:
            shape = (self.samples, self.heads, *self.queries, *self.keys)
            dropout = DropoutMask(self.rate, zlib.crc32(b"attention"), shape, (0,) * len(shape), state)
        queries, keys = (tuple((0, n) for n in extents) for extents in (self.queries, self.keys))
        whole = AttentionGeometry(self.reaches, queries, keys, (0, self.heads), self.groups, 0.3, False, dropout)
        return replace(whole, **changed)

    def draw(self, a: Arrays):
        n, kv = self.samples, self.heads // self.groups
        arrays = {
            "q": a.draw(n, *self.queries, self.heads * self.d),
            "k": a.draw(n, *self.keys, kv * self.d),
            "v": a.draw(n, *self.keys, kv * self.e),
            "dy": a.draw(n, *self.queries, self.heads * self.e),
        }
        arrays["bias"] = a.draw(self.heads, *(r.bias_extent for r in self.reaches)) if self.bias else None
        return arrays


def pairs(case):
    """Return which keys each query reads, and the positions of each pair in the table of biases: flat indices."""
    allowed, index = np.ones((1, 1), bool), np.zeros((1, 1), int)
    for r in case.reaches:
        q, k = np.arange(r.queries), np.arange(r.keys)
        entry = np.clip((q[:, None] - k[None]) // r.dilation + r.extent - 1, 0, r.bias_extent - 1)
        allowed, index = (
            join(whole[:, None, :, None], axis[None, :, None, :]).reshape(len(whole) * len(q), -1)
            for whole, axis, join in (
                (allowed, r.allowed(q, k), np.logical_and),
                (index, entry, lambda a, b, n=r.bias_extent: a * n + b),
            )
        )
    return allowed, index


def expected(case, arrays, kept=1.0):
    """Return y, lse and the gradients, by whole matrices in float64; `kept` ``(N, heads, queries, keys)``."""
    x = {k: None if a is None else a.astype(np.float64) for k, a in arrays.items()}

    def by_head(a, heads):
        return a.reshape(a.shape[0], -1, heads, a.shape[-1] // heads).transpose(0, 2, 1, 3)

    kv = case.heads // case.groups
    q, dy = by_head(x["q"], case.heads), by_head(x["dy"], case.heads)
    k, v = (np.repeat(by_head(x[n], kv), case.groups, axis=1) for n in ("k", "v"))
    allowed, index = pairs(case)
    s = 0.3 * q @ k.swapaxes(-1, -2)
    if case.bias:
        s = s + x["bias"].reshape(case.heads, -1)[:, index]
    s = np.where(allowed, s, -np.inf)
    with np.errstate(divide="ignore"):
        peak = np.maximum(s.max(axis=-1, keepdims=True, initial=-1e300), -1e300)
        lse = np.log(np.exp(s - peak).sum(axis=-1, keepdims=True)) + peak
    p = np.where(allowed, np.exp(s - np.where(np.isinf(lse), 0, lse)), 0)
    y = (p * kept) @ v
    dp = kept * (dy @ v.swapaxes(-1, -2))
    ds = p * (dp - (dp * p).sum(axis=-1, keepdims=True))

    def back(a, like):
        heads = like.shape[-1] // a.shape[-1]
        a = a.reshape(a.shape[0], heads, -1, *a.shape[2:]).sum(axis=2)
        return a.transpose(0, 2, 1, 3).reshape(like.shape)

    found = {"y": back(y, x["dy"]), "lse": lse[..., 0].transpose(0, 2, 1).reshape(*x["q"].shape[:-1], case.heads)}
    found |= {"dq": 0.3 * back(ds @ k, x["q"]), "dk": 0.3 * back(ds.swapaxes(-1, -2) @ q, x["k"])}
    found["dv"] = back((p * kept).swapaxes(-1, -2) @ dy, x["v"])
    if case.bias:
        found["dbias"] = np.zeros(x["bias"].reshape(case.heads, -1).shape)
        for head in range(case.heads):
            np.add.at(found["dbias"][head], index[allowed], ds.sum(axis=0)[head][allowed])
        found["dbias"] = found["dbias"].reshape(x["bias"].shape)
    return found


def outputs(a, arrays, heads):
    """Return arrays for the results, filled with NaN."""
    found = {
        "y": a.poisoned(*arrays["dy"].shape),
        "lse": a.poisoned(*arrays["q"].shape[:-1], heads, dtype=wide(a.dtype)),
    }
    for name in ("q", "k", "v", "bias"):
        found["d" + name] = None if arrays[name] is None else a.poisoned(*arrays[name].shape)
    return found


def kernels(a, x, r, geometry):
    """Return the forward and the backward kernel."""
    given = (x["q"], x["k"], x["v"], x["bias"], r["y"], r["lse"])
    forward = a.backend.attention_forward(*given, geometry)
    return forward, a.backend.attention_backward(x["dy"], *given, r["dq"], r["dk"], r["dv"], r["dbias"], geometry)


def check(got, want, dtype):
    for name, array in want.items():
        assert not np.isnan(got[name]).any(), f"{name}: {np.isnan(got[name]).sum()} not written"
        infinite = np.isinf(array)
        assert (got[name][infinite] == array[infinite]).all(), name
        error = np.abs(got[name].astype(np.float64)[~infinite] - array[~infinite]).max(initial=0)
        # 16-bit results are rounded once from float32; gradients follow from the rounded output.
        bound = (
            (500 if EPS[np.dtype(dtype)] < 1e-6 else 4)
            * EPS[np.dtype(dtype)]
            * max(1.0, np.abs(array[~infinite]).max(initial=0))
        )
        assert error <= bound, f"{name}: error {error:.3e} exceeds {bound:.3e}"


CASES = {
    "global-1d": Case((Everywhere(11, 7),), heads=3, e=5),
    "global-2d-grouped": Case((Everywhere(3, 5), Everywhere(4, 2)), heads=6, groups=3, e=2),
    "global-3d-bias": Case((Everywhere(2, 3), Everywhere(3, 2), Everywhere(2, 2)), bias=True),
    "windows-1d": Case((Windows(13, 4, 0),), bias=True),
    "windows-2d-shifted": Case((Windows(7, 3, 1), Windows(9, 4, -2)), heads=4, groups=2, bias=True, e=3),
    "windows-3d": Case((Windows(4, 2, 1), Windows(4, 3), Windows(5, 2, 1)), samples=1),
    "neighborhood-1d": Case((Neighborhood(12, 3),), bias=True),
    "neighborhood-1d-dilated": Case((Neighborhood(9, 4, 2),)),
    "neighborhood-1d-far": Case((Neighborhood(5, 2, 4),)),
    "neighborhood-2d-dilated": Case((Neighborhood(9, 3, 2), Neighborhood(8, 2, 3)), heads=4, groups=2, bias=True),
    "neighborhood-3d": Case((Neighborhood(4, 3), Neighborhood(3, 5), Neighborhood(5, 2)), samples=1),
    "mixed": Case((Windows(7, 3, 2), Everywhere(3, 5), Neighborhood(6, 3)), bias=True, samples=1),
    "dropout": Case((Windows(7, 3, 1), Everywhere(3, 4)), bias=True, rate=0.4, heads=4, groups=2),
    "dropout-global": Case((Everywhere(3, 4), Everywhere(3, 5)), rate=0.3),
    "blocks": Case((Windows(6, 3, 1), Neighborhood(4, 3)), heads=4, groups=2, bias=True, rate=0.2, samples=1, d=3),
    "one": Case((Everywhere(1, 1),), heads=1, d=1, e=1, samples=1),
    "one-query": Case((Everywhere(1, 9),), heads=1, samples=1, bias=True),
    "one-key": Case((Everywhere(9, 1),), heads=1, samples=1),
}


@pytest.mark.parametrize("name", CASES)
def test_whole(typed, name):
    run_whole(typed, CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_tiles(backends, monkeypatch, name):
    """Tiles that are much smaller than the arrays give the same results."""
    for constant, value in (("QUERIES", 3), ("KEYS", 4), ("SCORES", 24)):
        monkeypatch.setattr(tiled, constant, value)
    run_whole(Arrays(backends("numpy"), np.float64), CASES[name])


@pytest.mark.parametrize("name", ["windows-2d-shifted", "neighborhood-2d-dilated", "dropout", "one"])
def test_threads(backends, monkeypatch, name):
    """Shares of samples or heads that threads compute give the same bits as one thread."""
    backends("onednn")  # or skip
    monkeypatch.setattr(tiled, "FEW", 0)
    found = []
    for threads in (1, 2, 3):
        with get_backend("onednn", threads=threads) as backend:
            found.append(run_whole(Arrays(backend, np.float32), CASES[name]))
    for results in found[1:]:
        # The table of biases is a sum over samples, which shares may divide.
        assert all(np.array_equal(results[n], found[0][n]) for n in ("y", "lse", "dq", "dk", "dv"))


#: Views of an array: windows, single channels, dilated tiles (whose axes interleave), axes of one element and of none.
VIEWS = {
    "windows": ((2, 6, 12), lambda x: x.reshape(2, 2, 3, 3, 4).transpose(0, 1, 3, 2, 4)),
    "dilated": ((2, 6, 12), lambda x: x.reshape(2, 3, 2, 3, 4).transpose(0, 2, 3, 1, 4)),
    "interleaved": ((6, 4), lambda x: np.lib.stride_tricks.as_strided(x, (2, 3, 2), (20, 32, 4))),
    "one channel": ((3, 5, 4), lambda x: x[..., 1:2]),
    "one element": ((3, 5, 4), lambda x: x[1:2, 2:3, 1:2]),
    "nothing": ((3, 5, 4), lambda x: x[:, 2:2, 1:3]),
    "one tile": ((1, 8, 12), lambda x: x.reshape(1, 8, 3, 4)[:, :, 1:2].swapaxes(1, 2)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_copies_of_views(backend, name):
    """Copies and sums write all elements of a view, and none between them; also when they run again."""
    shape, view = VIEWS[name]
    typed = Arrays(backend, np.float32)
    operations = backend._tile_operations()[0]
    operations.begin()
    for _ in range(2):
        for write, plus in ((operations.copy, 0), (operations.add, 1)):
            for source, target in (("view", "packed"), ("packed", "view")):
                arrays = {"view": typed.draw(*shape), "packed": typed.draw(*view(np.zeros(shape, np.float32)).shape)}
                views = {"view": view(arrays["view"]), "packed": arrays["packed"]}
                expected = {n: a.copy() for n, a in arrays.items()}
                written = view(expected["view"]) if target == "view" else expected["packed"]
                written[...] = plus * written + views[source]
                write(views[source], views[target])
                assert all(np.array_equal(arrays[n], expected[n]) for n in arrays)
    operations.end()
    operations.close()


def run_whole(typed, case):
    """Compare all results of a case with the expected ones, and return them."""
    state = np.array([12, 3, 0], np.uint64)
    x = case.draw(typed)
    r = outputs(typed, x, case.heads)
    forward, backward = kernels(typed, x, r, case.geometry(state))
    for step in (3, 4):
        state[1] = step
        for kernel in (forward, backward):
            kernel()
        check(r, expected(case, x, kept_of(case, state)), typed.dtype)
    for kernel in (forward, backward):
        kernel.close()
    return r


def kept_of(case, state):
    """Return the factors of the probabilities by dropout, ``(N, heads, queries, keys)``."""
    if not case.rate:
        return 1.0
    shape = case.geometry(state).dropout.shape
    seed, step, _ = (int(i) for i in state)
    gone = dropped(shape, _Box(shape), case.rate, seed, step, case.geometry(state).dropout.salt)
    return np.where(gone, 0, 1 / (1 - case.rate)).reshape(*shape[:2], math.prod(case.queries), -1)


class _Box:
    def __init__(self, shape):
        self.shape, self.start, self.ndim, self.size = shape, (0,) * len(shape), len(shape), math.prod(shape)


def cuts(size, pieces):
    edges = [round(i * size / pieces) for i in range(pieces + 1)]
    return list(itertools.pairwise(edges))


@pytest.mark.parametrize("name", CASES)
def test_blocks(backends, name):
    """Blocks of queries, of heads and of keys, merged block by block as in a ring, give the results of the whole."""
    run_blocks(Arrays(backends("numpy"), np.float64), CASES[name])


def run_blocks(typed, case):
    state = np.array([5, 6, 0], np.uint64)
    x, found = case.draw(typed), {}
    total = expected(case, x, kept_of(case, state))
    for key, array in total.items():
        found[key] = np.zeros(array.shape)
    axes = [[cuts(r.queries, 2) for r in case.reaches], [cuts(r.keys, 2) for r in case.reaches]]
    query_blocks, key_blocks = (list(itertools.product(*some)) for some in axes)
    for heads in cuts(case.heads, 2 if case.groups == 1 else 3):
        for queries in query_blocks:
            _block(typed, case, x, heads, queries, key_blocks, state, found)
    check(found, total, typed.dtype)


def _block(a, case, x, heads, queries, key_blocks, state, found):
    """Compute one block of queries and heads, and add its results to `found`."""
    key_heads = case.geometry(heads=heads).key_heads

    def cut(array, intervals, some, width):
        box = (slice(None), *(slice(*i) for i in intervals), slice(some[0] * width, some[1] * width))
        block = a.poisoned(*array[box].shape)
        block[...] = array[box]
        return block, box

    q, rows = cut(x["q"], queries, heads, case.d)
    dy, rows_e = cut(x["dy"], queries, heads, case.e)
    y, dq = a.poisoned(*dy.shape), a.poisoned(*q.shape)
    lse = a.poisoned(*q.shape[:-1], heads[1] - heads[0], dtype=wide(a.dtype))
    dbias = None if x["bias"] is None else a.poisoned(*x["bias"].shape)
    blocks, passes = [], []
    for i, keys in enumerate(key_blocks):
        k, columns = cut(x["k"], keys, key_heads, case.d)
        v, columns_e = cut(x["v"], keys, key_heads, case.e)
        dk, dv = a.poisoned(*k.shape), a.poisoned(*v.shape)
        g = case.geometry(state, queries=queries, keys=keys, heads=heads, merge=i > 0)
        if g.dropout is not None:
            start = (0, heads[0], *(q[0] for q in queries), *(k[0] for k in keys))
            g = replace(g, dropout=replace(g.dropout, start=start))
        blocks.append((dk, columns, dv, columns_e))
        passes.append(
            (
                a.backend.attention_forward(q, k, v, x["bias"], y, lse, g),
                a.backend.attention_backward(dy, q, k, v, x["bias"], y, lse, dq, dk, dv, dbias, g),
            )
        )
    for forward, _ in passes:
        forward()
    for _, backward in passes:
        backward()
    for name, array, box in (("y", y, rows_e), ("dq", dq, rows)):
        found[name][box] += array
    found["lse"][(*rows[:-1], slice(*heads))] += lse
    for dk, columns, dv, columns_e in blocks:
        found["dk"][columns] += dk
        found["dv"][columns_e] += dv
    if dbias is not None:
        assert not dbias[: heads[0]].any() and not dbias[heads[1] :].any()
        found["dbias"] += dbias


@st.composite
def random_cases(draw):
    reaches = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 6))
        reaches.append(
            draw(
                st.sampled_from(
                    [
                        Everywhere(size, draw(st.integers(1, 5))),
                        Windows(size, draw(st.integers(1, 4)), draw(st.integers(-2, 3))),
                        Neighborhood(size, draw(st.integers(1, 4)), draw(st.integers(1, 2))),
                    ]
                )
            )
        )
    groups = draw(st.sampled_from([1, 2]))
    heads = groups * draw(st.integers(1, 2))
    widths = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    return Case(tuple(reaches), heads, groups, *widths, 1, draw(st.booleans()), draw(st.sampled_from([0.0, 0.3])))


@settings(max_examples=25, deadline=None)
@given(case=random_cases())
def test_random(backends, case):
    a, state = Arrays(backends("numpy"), np.float64), np.array([1, 2, 0], np.uint64)
    x = case.draw(a)
    r = outputs(a, x, case.heads)
    for kernel in kernels(a, x, r, case.geometry(state)):
        kernel()
    check(r, expected(case, x, kept_of(case, state)), a.dtype)


def test_queries_without_keys(typed):
    """Without keys the output is 0, lse -inf, and all gradients are 0."""
    case = Case((Windows(8, 2),), bias=True)
    x = case.draw(typed)
    x["k"], x["v"] = (typed.draw(2, 2, 8) for _ in range(2))
    r = outputs(typed, x, case.heads)
    for kernel in kernels(typed, x, r, case.geometry(keys=((4, 6),))):
        kernel()
    none = np.array([0, 1, 2, 3, 6, 7])
    assert not r["y"][:, none].any() and np.isneginf(r["lse"][:, none]).all() and not r["dq"][:, none].any()
    assert r["y"][:, 4:6].all() and np.isfinite(r["lse"][:, 4:6]).all() and r["dk"].all()


@pytest.mark.parametrize("merge", [False, True])
def test_ranks_with_nothing(typed, merge):
    case, zero = Case((Everywhere(4, 4),), bias=True), ((0, 0),)
    x = case.draw(typed)
    for changed, replaced in (("queries", ("q", "dy")), ("keys", ("k", "v"))):
        some = x | {n: typed.draw(2, 0, 8) for n in replaced}
        r = outputs(typed, some, case.heads)
        before = {n: a.copy() for n, a in r.items()}
        for kernel in kernels(typed, some, r, case.geometry(merge=merge, **{changed: zero})):
            kernel()
        assert not r["dk"].any() and not r["dv"].any()
        if merge:
            assert all(np.array_equal(r[n], before[n], equal_nan=True) for n in ("y", "lse", "dq", "dbias"))
        else:
            assert not r["y"].any() and np.isneginf(r["lse"]).all() and not r["dq"].any() and not r["dbias"].any()


def test_scratch_memory_does_not_grow_with_the_square(typed):
    """Scores of all pairs would take 64 MiB in float32."""
    case = Case((Everywhere(4096, 4096),), heads=1, samples=1, d=8, e=8)
    x = case.draw(typed)
    for kernel in kernels(typed, x, outputs(typed, x, 1), case.geometry()):
        assert kernel.scratch_bytes < 8 << 20


def test_nan_reaches_the_queries_that_read_it(typed):
    case = Case((Windows(6, 3),), samples=1)
    x = case.draw(typed)
    x["v"][0, 4, 0] = np.nan
    x["k"][0, 1, 4] = np.nan
    r = outputs(typed, x, case.heads)
    kernels(typed, x, r, case.geometry())[0]()
    bad = np.isnan(r["y"][0]).reshape(2, 3, 2, 4)
    assert bad[1, :, 0, 0].all() and bad[0, :, 1].all() and bad.sum() == 3 + 12


@pytest.mark.parametrize("causes", ["plain", "masked"])
def test_torch(backends, causes):
    """Outputs and gradients equal those of torch's scaled_dot_product_attention in float64."""
    torch = pytest.importorskip("torch", reason="needs torch as oracle: pip install 'halograd[oracle]'")
    a = Arrays(backends("numpy"), np.float64)
    reaches = (Everywhere(9, 7), Everywhere(5, 6)) if causes == "plain" else (Windows(9, 4, 1), Neighborhood(8, 3))
    case = Case(reaches, heads=4, d=6, e=5)
    x = case.draw(a)
    r = outputs(a, x, case.heads)
    for kernel in kernels(a, x, r, case.geometry()):
        kernel()
    t = {
        n: torch.tensor(x[n].reshape(2, -1, 4, x[n].shape[-1] // 4)).transpose(1, 2).requires_grad_()
        for n in ("q", "k", "v")
    }
    mask = None if causes == "plain" else torch.tensor(pairs(case)[0])
    y = torch.nn.functional.scaled_dot_product_attention(t["q"], t["k"], t["v"], attn_mask=mask, scale=0.3)
    y.backward(torch.tensor(x["dy"].reshape(2, -1, 4, 5)).transpose(1, 2))
    for name, want in {"y": y.detach(), "dq": t["q"].grad, "dk": t["k"].grad, "dv": t["v"].grad}.items():
        assert np.abs(want.transpose(1, 2).numpy().reshape(r[name].shape) - r[name]).max() < 1e-12


def test_refused(typed):
    case, b = Case((Everywhere(4, 5),)), typed.backend
    x = case.draw(typed)
    r = outputs(typed, x, 2)

    def forward(geometry=None, **changed):
        a = x | r | changed
        return b.attention_forward(a["q"], a["k"], a["v"], a["bias"], a["y"], a["lse"], geometry or case.geometry())

    assert "expected q of shape (N, 4, 2 heads), got (2, 5, 8)" in text_of(lambda: forward(q=typed.draw(2, 5, 8)))
    assert "as many channels per head in q as in k" in text_of(lambda: forward(k=typed.draw(2, 5, 6)))
    assert "expected arrays of as many samples" in text_of(lambda: forward(v=typed.draw(1, 5, 8)))
    assert "expected bias of shape (all heads, 9), got (1, 9)" in text_of(lambda: forward(bias=typed.draw(1, 9)))
    assert "expected lse of dtype" in text_of(lambda: forward(lse=np.zeros((2, 4, 2), np.int32)))
    assert "expected keys within [0, 5), got [0, 6)" in text_of(lambda: case.geometry(keys=((0, 6),)))
    assert "for each of 1 to 3 axes, got 1, 2 and 1" in text_of(lambda: case.geometry(queries=((0, 4),) * 2))
    assert "expected an interval of heads" in text_of(lambda: case.geometry(groups=0))
    mask = DropoutMask(0.1, 0, (2, 2, 4), (0, 0, 0), np.zeros(3, np.uint64))
    assert "with a shape (samples, heads, *queries, *keys)" in text_of(lambda: forward(case.geometry(dropout=mask)))
    with pytest.raises(KernelError, match="expected a bias with dbias, got none"):
        given = (x["dy"], x["q"], x["k"], x["v"], None, *(r[n] for n in ("y", "lse", "dq", "dk", "dv")), r["y"])
        b.attention_backward(*given, case.geometry())


@st.composite
def rules(draw):
    kind = draw(st.sampled_from(["everywhere", "windows", "neighborhood"]))
    size = draw(st.integers(1, 14))
    if kind == "everywhere":
        return Everywhere(size, draw(st.integers(1, 9)))
    if kind == "windows":
        return Windows(size, draw(st.integers(1, 6)), draw(st.integers(-7, 7)))
    return Neighborhood(size, draw(st.integers(1, 6)), draw(st.integers(1, 4)))


@st.composite
def intervals(draw, size):
    a, b = (draw(st.integers(0, size)) for _ in range(2))
    return min(a, b), max(a, b)


def reads(reach, query, key):
    """Return whether a query reads a key, by the definition in words."""
    if isinstance(reach, Everywhere):
        return True
    if isinstance(reach, Windows):
        return (query - reach.shift) // reach.extent == (key - reach.shift) // reach.extent
    same = [p for p in range(reach.size) if p % reach.dilation == query % reach.dilation]
    first = same.index(query) - reach.extent // 2
    first = max(0, min(first, len(same) - reach.extent))
    return key in same[first : first + reach.extent]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_rules_by_brute_force(data):
    reach = data.draw(rules())
    queries, keys = data.draw(intervals(reach.queries)), data.draw(intervals(reach.keys))
    whole = np.array([[reads(reach, q, k) for k in range(reach.keys)] for q in range(reach.queries)])
    assert (reach.allowed(range(reach.queries), range(reach.keys)) == whole).all()
    rows = whole[slice(*queries)]
    columns = np.flatnonzero(rows.any(axis=0))
    assert reach.keys_of(*queries) == ((columns[0], columns[-1] + 1) if len(columns) else (0, 0))
    # Every pair of the intervals occurs in exactly one tile.
    count = np.zeros(whole.shape, int)
    for run in runs(reach, queries, keys):
        for i in range(run.count):
            q, k = (np.array(p) + i * run.step for p in (run.queries, run.keys))
            assert q[0] >= queries[0] and q[-1] < queries[1] and k[0] >= keys[0] and k[-1] < keys[1]
            allowed = np.ones((len(q), len(k)), bool) if run.allowed is None else run.allowed
            assert (allowed == reach.allowed(q, k)).all()
            count[np.ix_(q, k)] += allowed
            distance = (q[:, None] - k[None, :])[allowed]
            assert (distance % reach.dilation == 0).all() and (abs(distance) // reach.dilation < reach.extent).all()
    inside = np.zeros_like(count)
    inside[slice(*queries), slice(*keys)] = 1
    assert (count == whole * inside).all()


def test_windows_of_swin():
    """A shifted window equals a window of the rolled image with Swin's mask."""
    size, extent, shift = 14, 7, 3
    rolled = (np.arange(size) - shift) % size
    region = np.where(rolled < size - extent, 0, np.where(rolled < size - shift, 1, 2))
    same = (rolled[:, None] // extent == rolled[None] // extent) & (region[:, None] == region[None])
    assert (Windows(size, extent, shift).allowed(range(size), range(size)) == same).all()


def test_regular_tiles_are_one_run():
    assert [(r.count, len(r.queries)) for r in runs(Windows(20, 4, 2), (0, 20), (0, 20))] == [(1, 2), (4, 4), (1, 2)]
    assert [r.count for r in runs(Neighborhood(40, 5), (0, 40), (0, 40))] == [1, 6, 1]
    assert Windows(8, 4).bias_extent == 7 and Everywhere(3, 5).bias_extent == 9


@pytest.mark.parametrize("make", [lambda: Windows(4, 0), lambda: Neighborhood(4, 2, 0), lambda: Everywhere(-1, 2)])
def test_reach_refused(make):
    with pytest.raises(ValueError, match=r"expected sizes >= 0, extents and dilations >= 1, got "):
        make()


@given(
    shape=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    most=st.integers(0, 60),
    multiple=st.sampled_from([1, 4, 16]),
    shift=st.integers(0, 3),
)
def test_boxes_cover_each_element_once(shape, most, multiple, shift):
    within = tuple(slice(shift, shift + n) for n in shape)
    count = np.zeros([n + shift for n in shape], int)
    found = boxes(count.shape, most, within, multiple)
    for box in found:
        count[box] += 1
        assert span_of(box) <= max(1, most)
    assert (count[within] == 1).all() and count.sum() == span_of(within)
    for axis in range(len(shape)):
        # But for the last, the boxes of an axis are equal.
        extents = {(box[axis].start, box[axis].stop - box[axis].start) for box in found}
        assert len({n for _, n in sorted(extents)[:-1]}) <= 1


def test_boxes_are_multiples_where_this_is_possible():
    def extents(*arguments):
        return [extents_of(box) for box in boxes(*arguments)]

    assert extents((4096,), 1000, (), 16) == [(832,)] * 4 + [(768,)]
    assert extents((50,), 16, (), 16) == [(16,)] * 3 + [(2,)]
    assert extents((50,), 15, (), 16) == [(13,)] * 3 + [(11,)], "not more than permitted"
    assert extents((2, 30), 64, (), 16) == [(2, 30)], "an axis that is not cut stays whole"
