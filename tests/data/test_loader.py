"""Order of samples, split, resumption, and the prefetch thread: correct boxes, errors, and no thread left."""

from __future__ import annotations

import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from halograd.data import sampler as module
from halograd.data.dataset import Hdf5Dataset
from halograd.data.disk import DataError
from halograd.data.loader import Loader
from halograd.data.normalize import channel_statistics
from halograd.data.sampler import Batch, Sampler, split
from halograd.data.targets import TargetReduction
from halograd.dtensor.box import Box
from tests.harness.limits import wait_until
from tests.support.refusals import refusals


def taken(sampler: Sampler, batches: int) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = []
    while len(out) < batches:
        for batch in sampler:
            out.append(batch.indices)
            if len(out) == batches:
                break
    return out


def test_an_epoch_holds_every_sample_once_in_a_new_order() -> None:
    sampler = Sampler(range(10, 22), 4, seed=3)
    first, second = taken(sampler, 3), taken(sampler, 3)
    for epoch in (first, second):
        assert sorted(sum(epoch, ())) == list(range(10, 22))
    assert first != second
    assert sampler.epoch == 2 and sampler.position == 0


def test_order_depends_on_seed_and_epoch_only() -> None:
    assert taken(Sampler(range(50), 8, seed=1), 12) == taken(Sampler(range(50), 8, seed=1), 12)
    assert taken(Sampler(range(50), 8, seed=1), 3) != taken(Sampler(range(50), 8, seed=2), 3)
    # The order of samples is the same for other batch sizes.
    assert sum(taken(Sampler(range(48), 4, seed=1), 12), ()) == sum(taken(Sampler(range(48), 16, seed=1), 3), ())


def test_drop_and_fill() -> None:
    assert len(Sampler(range(10), 4)) == 2
    last = list(Sampler(range(10), 4, shuffle="never", remainder="fill"))[-1]
    assert last.indices == (8, 9, 9, 9) and last.valid == 2


@pytest.mark.parametrize("after", [0, 1, 5, 6, 7])
def test_resume_anywhere(after: int) -> None:
    whole = taken(Sampler(range(13), 2, seed=7), 14)
    first = Sampler(range(13), 2, seed=7)
    assert taken(first, after) == whole[:after]
    second = Sampler(range(13), 2, seed=7)
    second.load_state_dict(first.state_dict())
    assert taken(second, 14 - after) == whole[after:]


def test_rest_of_epoch_does_not_move() -> None:
    sampler = Sampler(range(6), 2)
    sampler.advance()
    assert [b.position for b in sampler.rest_of_epoch()] == [1, 2]
    assert (sampler.epoch, sampler.position) == (0, 1)


def test_a_foreign_state_is_refused() -> None:
    sampler = Sampler(range(6), 2, seed=1)
    for key, value in (("seed", 2), ("samples", 7), ("shuffle", "never")):
        with pytest.raises(DataError, match=f"checkpoint has {key} = {value}, this run has"):
            sampler.load_state_dict(sampler.state_dict() | {key: value})
    with pytest.raises(DataError, match=r"a position in 0 \.\. 2, got 0, 3"):
        sampler.load_state_dict(sampler.state_dict() | {"position": 3})


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (3, 5, 2), (4, 12), (6, 8)])
def test_other_batches_continue_after_the_same_samples(sizes) -> None:
    """A sequence of batches of several sizes, two each, leaves out no sample within an epoch and repeats none."""
    state, seen = None, []
    for size in sizes:
        sampler = Sampler(range(13), size, seed=7)
        if state is not None:
            sampler.load_state_dict(state)
        left = sampler.left(1)
        assert left == len(sampler.rest_of_epoch()) * (sampler.epoch == 0)
        for batch in list(sampler.rest_of_epoch())[: 2 if sampler.epoch == 0 else 0]:
            sampler.advance()
            seen += batch.indices
        if sampler.epoch == 0:
            assert sampler.done == pytest.approx(len(seen) / size)
        state = sampler.state_dict()
    assert seen == Sampler(range(13), 1, seed=7).order(0).tolist()[: len(seen)]
    assert 13 - len(seen) < max(sizes) or sampler.epoch == 0
    again = Sampler(range(13), sizes[-1], seed=7)
    again.load_state_dict(state)
    assert (again.epoch, again.done, again.state_dict()) == (sampler.epoch, sampler.done, state)


def test_split_keeps_simulations_together() -> None:
    groups = np.repeat(np.arange(20), 3)
    training, validation = split(60, 0.25, seed=2, groups=groups)
    assert len(validation) == 15
    assert sorted([*training, *validation]) == list(range(60))
    assert not set(groups[training]) & set(groups[validation])
    again = split(60, 0.25, seed=2, groups=groups)
    np.testing.assert_array_equal(again[1], validation)
    assert not np.array_equal(split(60, 0.25, seed=3, groups=groups)[1], validation)


def test_split_extremes() -> None:
    assert len(split(5, 0.0)[1]) == 0
    assert [len(part) for part in split(5, 0.01)] == [4, 1]
    assert [len(part) for part in split(5, 0.99)] == [1, 4]


@pytest.mark.parametrize("groups", [None, [3, 1, 1, 2, 3, 0, 2, 2, 5, 7]])
def test_split_is_that_of_earlier_versions(groups: list[int] | None) -> None:
    """The split chooses among the sorted distinct names, as in earlier versions, so resumed runs keep it."""
    for seed in range(5):
        labels = np.arange(10) if groups is None else np.array(groups)
        names = np.unique(labels)
        chosen = np.random.default_rng([seed, 1]).permutation(names)[: max(1, round(0.3 * len(names)))]
        training, validation = split(10, 0.3, seed, groups)
        np.testing.assert_array_equal(validation, np.flatnonzero(np.isin(labels, chosen)))
        np.testing.assert_array_equal(training, np.flatnonzero(~np.isin(labels, chosen)))


def test_many_samples_are_not_looked_for_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The split does not search for equal samples: NumPy's unique takes 50 s for ten million different integers."""
    for name in ("unique", "isin"):
        monkeypatch.setattr(np, name, lambda *_, **__: pytest.fail("expected no search"))
    assert [len(part) for part in split(1000, 0.1)] == [900, 100]


def test_batches_are_made_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are created one at a time, so an epoch of a thousand million samples needs no list of them."""
    made: list[int] = []

    def counted(*arguments: Any) -> Batch:
        found = Batch(*arguments)
        made.append(found.position)
        return found

    monkeypatch.setattr(module, "Batch", counted)
    batches = Sampler(range(10**5), 3, shuffle="never", remainder="fill").rest_of_epoch()
    assert len(batches) == 33334 and not made
    assert batches[-1] == Batch((99999, 99999, 99999), 1, 0, 33333)
    assert [b.indices for b in batches[1:3]] == [(3, 4, 5), (6, 7, 8)]
    assert made == [33333, 1, 2]
    with pytest.raises(IndexError):
        batches[33334]


def test_what_takes_long_is_announced(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MANY", 1000)
    training, _ = split(999, 0.1)
    assert not caplog.messages
    split(1000, 0.1)
    assert caplog.messages == ["drawing the order of 1,000 samples, 0.0 GB on every rank"]
    Sampler(np.arange(2000), 4).rest_of_epoch()
    assert "drawing the order of 2,000 samples" in caplog.messages[1]
    Sampler(training, 4).rest_of_epoch()
    assert len(caplog.messages) == 2


test_sampler_wrong_arguments = refusals(
    (lambda: split(4, 1), "validation fraction: expected 0 or more and less than 1, got 1"),
    (
        lambda: split(4, 0.5, groups=[0, 0, 0, 0]),
        r"two or more, of which one is held out, got one group of samples "
        r"\(simulation or file\) with all 4; set data.validation = 0, or data.split = \"random\"",
    ),
    (lambda: split(1, 0.5), r"got one sample; set data.validation = 0$"),
    (
        lambda: split(1, 0.5, groups=[7]),
        r"got one group of samples \(simulation or file\) with all 1; set data.validation = 0$",
    ),
    (lambda: split(4, 0.5, groups=[0, 0, 0]), r"groups: expected one per sample, shape \(4,\), got \(3,\)"),
    (lambda: Sampler(range(4), 8), "expected at least 8 samples to draw from, got 4"),
    (lambda: Sampler(range(4), 0), "batch: expected 1 or more samples, got 0"),
    (lambda: Sampler(range(4), 2, shuffle="always"), "shuffle: expected 'epoch' or 'never', got 'always'"),
    (lambda: Sampler(range(4), 2, remainder="keep"), "remainder: expected 'drop' or 'fill', got 'keep'"),
    error=DataError,
)


def units(sampler: Sampler, epoch: int | None = None) -> list[tuple[int, int, bool]]:
    """Return sample, patch and place of all elements of the rest of an epoch."""
    sampler.epoch = sampler.epoch if epoch is None else epoch
    found, none = [], (0,) * sampler.batch
    for batch in sampler.rest_of_epoch():
        found += list(zip(batch.indices, batch.patches or none, map(bool, batch.centered or none)))
    return found


def test_an_epoch_holds_every_patch_of_every_sample_once() -> None:
    found = units(Sampler(range(10, 17), 3, seed=3, patches=4), 2)
    assert len(found) == 27 == len({unit[:2] for unit in found}), "a remainder of one is left out"
    for first in range(0, 27, 7):
        assert len({index for index, _, _ in found[first : first + 7]}) == min(7, 27 - first), "samples take turns"
    # The first patches are the samples of an epoch without patches.
    assert [index for index, _, _ in found[:7]] == Sampler(range(10, 17), 7, seed=3).order(2).tolist()
    other = units(Sampler(range(10, 17), 9, seed=3, patches=4), 2)
    assert other == found[: len(other)], "whatever the batch"
    whole = Batch((1, 2, 3, 4), 4, 0, 0, patches=(0, 1, 2, 3), centered=(True, False, True, False))
    assert [(p.patches, p.centered) for p in whole.parts(2)] == [((0, 1), (True, False)), ((2, 3), (True, False))]


@pytest.mark.parametrize("share", [0.0, 0.29, 0.5, 1.0])
def test_the_share_around_foreground_is_exact(share) -> None:
    found = [centered for _, _, centered in units(Sampler(range(10), 4, patches=10, foreground=share))]
    for count in range(1, 101):
        assert sum(found[:count]) == count * round(100 * share) // 100
    assert found == [c for _, _, c in units(Sampler(range(10), 25, patches=10, foreground=share))]


@pytest.mark.parametrize(("patches", "steps"), [(3, 0), (1, 9), (2, 3)])
def test_patches_and_steps_are_resumed(patches, steps) -> None:
    def made(batch: int = 2) -> Sampler:
        return Sampler(range(5), batch, 7, patches=patches, steps=steps, foreground=0.4)

    whole = made()
    assert len(whole) == (steps or 7) and whole.left(2) == 2 * len(whole)
    want = [batch for _ in range(2) for batch in whole]
    assert {len(batch.indices) for batch in want} == {2} and whole.epoch == 2
    for after in (1, 4):
        first, second = made(), made()
        for _ in range(after):
            first.advance()
        second.load_state_dict(first.state_dict())
        rest, done = list(second.rest_of_epoch()), first.epoch * len(whole) + first.position
        assert rest == want[done : done + len(whole) - first.position]
        other = made(3)
        other.load_state_dict(first.state_dict())
        used = 2 * first.position
        if other.epoch == first.epoch and used:
            every = units(Sampler(range(5), 1, 7, steps=40, foreground=0.4), first.epoch)
            assert units(other) == every[used : used + 3 * len(other.rest_of_epoch())]
    for key, value in (("patches", 9), ("steps", 8)):
        with pytest.raises(DataError, match=f"checkpoint has {key} = {value}, this run has"):
            made().load_state_dict(made().state_dict() | {key: value})
    with pytest.raises(DataError, match=r"checkpoint has patches = 1, this run has 4"):
        Sampler(range(5), 2, 7, patches=4).load_state_dict(Sampler(range(5), 2, 7).state_dict())


INPUT = Box((0, -1, 0, 0), (2, 5, 8, 2))
TARGET = Box((0, 0, 0, 0), (2, 4, 8, 1))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["inputs"] = rng.normal(5, 2, (9, 8, 8, 2)).astype(np.float32)
        file["inputs"].attrs["layout"] = "NHWC"
        file["mask"] = rng.integers(0, 2, (9, 8, 8)).astype(np.uint8)
    return tmp_path / "d.h5"


def prefetch_threads() -> int:
    return sum(t.name == "halograd-prefetch" for t in threading.enumerate())


def arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with h5py.File(path) as file:
        return file["inputs"][()], file["mask"][()][..., None]


@pytest.mark.parametrize("depth", [2, 3])
def test_boxes_in_order_normalised_with_zero_padding(path: Path, depth: int) -> None:
    x, y = arrays(path)
    with Hdf5Dataset(path) as data:
        statistics = channel_statistics(data, "x", range(9))
        loader = Loader(data, {"x": INPUT, "target": TARGET}, statistics={"x": statistics}, depth=depth)
        seen = []
        for item in loader.iterate(Sampler(range(9), 2, seed=1)):
            chosen = list(item.batch.indices)
            expected = (x[chosen] - statistics.mean) / statistics.std
            assert np.all(item.arrays["x"][:, 0] == 0)
            np.testing.assert_allclose(item.arrays["x"][:, 1:], expected[:, :5], rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(item.arrays["target"], y[chosen, :4])
            seen.append(item.batch.position)
        assert seen == [0, 1, 2, 3]
        assert loader.seconds_waited > 0
    assert prefetch_threads() == 0


def test_buffers_are_reused_over_epochs(path: Path) -> None:
    with Hdf5Dataset(path) as data, Loader(data, {"x": INPUT, "target": TARGET}) as loader:
        places = {id(item.arrays["x"]) for _ in range(3) for item in loader.iterate([[0, 1], [2, 3], [4, 5]])}
    assert len(places) == 2


def test_a_batch_in_use_is_not_overwritten(path: Path) -> None:
    x, _ = arrays(path)
    with Hdf5Dataset(path) as data, Loader(data, {"x": INPUT}) as loader:
        for item in loader.iterate([[k, k + 1] for k in range(6)]):
            ready = loader._running.ready
            wait_until(lambda ready=ready: not ready.empty(), "the thread to run ahead, or to end")
            np.testing.assert_array_equal(item.arrays["x"][:, 1:], x[list(item.batch.indices), :5])
            assert set(item.arrays) == {"x"}


def test_reduced_targets(path: Path) -> None:
    _, y = arrays(path)
    coarse = Box((0, 1, 0, 0), (2, 2, 2, 1))
    with (
        Hdf5Dataset(path) as data,
        Loader(
            data, {"x": INPUT, "target": coarse}, reductions={"target": TargetReduction("fraction", (4, 4))}
        ) as loader,
    ):
        (item,) = loader.iterate([[3, 7]])
        expected = y[[3, 7], 4:8].reshape(2, 1, 4, 2, 4, 1).mean(axis=(2, 4))
        np.testing.assert_allclose(item.arrays["target"], expected)


def test_a_rank_with_nothing(path: Path) -> None:
    empty = Box((0, 8, 0, 0), (2, 8, 8, 2))
    with Hdf5Dataset(path) as data, Loader(data, {"x": empty, "target": empty.replace(3, 0, 1)}) as loader:
        shapes = [item.arrays["x"].shape for item in loader.iterate([[0, 1], [2, 3]])]
        assert shapes == [(2, 0, 8, 2)] * 2 and data.bytes_read == 0


def test_an_error_is_raised_when_its_batch_is_due(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file["inputs"][5, 0, 0, 0] = np.nan
    with Hdf5Dataset(path) as data, Loader(data, {"x": INPUT}) as loader:
        got = []
        with pytest.raises(DataError, match="nan in sample 5, channel 0"):
            for item in loader.iterate([[0, 1], [2, 3], [4, 5], [6, 7]]):
                got.append(item.batch.indices)
        assert got == [(0, 1), (2, 3)]
        assert prefetch_threads() == 0
        # The loader can be used again.
        assert len(list(loader.iterate([[0, 1]]))) == 1


def test_leaving_a_loop_ends_the_thread(path: Path) -> None:
    with Hdf5Dataset(path) as data, Loader(data, {"x": INPUT}) as loader:
        loop = loader.iterate([[0, 1]] * 50)
        next(loop)
        with pytest.raises(DataError, match="already in a loop"):
            next(loader.iterate([[0, 1]]))
        loader.close()
        loader.close()
        assert prefetch_threads() == 0
        assert len(list(loop)) <= 2, "a closed loop must end, not wait"
        for _ in loader.iterate([[0, 1]] * 50):
            break
    assert prefetch_threads() == 0


def test_a_forgotten_loop_does_not_end_another(path: Path) -> None:
    with Hdf5Dataset(path) as data, Loader(data, {"x": INPUT}) as loader:
        old = loader.iterate([[0, 1]] * 5)
        next(old)
        loader.close()
        new = loader.iterate([[2, 3]] * 5)
        next(new)
        assert isinstance(old, Generator)
        old.close()
        assert len(list(new)) == 4


def test_reads_are_recorded(path: Path) -> None:
    class Recorder:
        spans: list = []  # noqa: RUF012

        def span(self, name: str, category: str, t0: float, t1: float) -> None:
            self.spans.append((name, category, t1 >= t0))

    with Hdf5Dataset(path) as data, Loader(data, {"x": INPUT}, recorder=Recorder()) as loader:
        list(loader.iterate([[0, 1], [2, 3]]))
    assert Recorder.spans == [("read", "io", True)] * 2


def test_loader_wrong_arguments(path: Path) -> None:
    with Hdf5Dataset(path) as data:
        with pytest.raises(DataError, match="depth: expected 2 or more sets of buffers, got 1"):
            Loader(data, {"x": INPUT}, depth=1)
        with pytest.raises(DataError, match=r"divisible into patches of \(3, 4\), got \(8, 8\)"):
            Loader(data, {"x": INPUT, "target": TARGET}, reductions={"target": TargetReduction("any", (3, 4))})
