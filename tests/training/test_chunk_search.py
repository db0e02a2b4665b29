"""Tests of the search for a chunk size against the paper's listing, and of the tuner that runs it."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.layers.reduction_scheme import Scheme
from halograd.training.auto_reduction import ChunkSearch, Tuner


def listing(times, step, reach):
    """Return the tried sizes and the best one by Algorithm 1 of Le et al. 2018, with `times` in place of clocks."""
    chunk, best_chunk, lapse_min, done, sizes = 1, 1, math.inf, False, []
    while not done:
        sizes.append(chunk)
        if chunk >= best_chunk + step * reach:
            chunk = best_chunk
            done = True
        else:
            lapse = times(chunk)
            if lapse < lapse_min:
                lapse_min = lapse
                best_chunk = chunk
            chunk = chunk + 1 if chunk < step else chunk + step
    return sizes, chunk


def run(search, times):
    sizes = []
    while not search.done:
        sizes.append(search.chunk)
        search.observe(times(search.chunk))
    return sizes, search.chunk


@given(st.integers(1, 12), st.integers(1, 10), st.lists(st.integers(1, 9), min_size=1, max_size=60))
def test_search_is_the_listing(step, reach, values):
    def times(chunk):
        return float(values[chunk % len(values)])

    assert run(ChunkSearch(10**9, step, reach), times) == listing(times, step, reach)


@pytest.mark.parametrize(
    "step, reach, best, intervals", [(10, 5, 9, 15), (10, 10, 20, 21), (3, 5, 3, 8), (10, 5, 1, 15)]
)
def test_intervals_of_the_paper(step, reach, best, intervals):
    """Searches take the numbers of intervals of Section 5.3: (10, 5) ends at iteration 150; all take at most 21."""
    sizes, found = run(ChunkSearch(10**9, step, reach), lambda chunk: abs(chunk - best) + 1.0)
    assert (len(sizes), found) == (intervals, best)


def test_no_chunk_is_longer_than_the_network():
    sizes, found = run(ChunkSearch(7), lambda chunk: 1.0 / chunk)
    assert (sizes, found) == ([1, 2, 3, 4, 5, 6, 7], 7)


@pytest.mark.parametrize("settings", [{"layers": 0}, {"layers": 3, "step": 0}, {"layers": 3, "range": 0}])
def test_refused(settings):
    with pytest.raises(ValueError, match="expected at least 1, got 0"):
        ChunkSearch(**settings)
    search = ChunkSearch(1)
    search.observe(1.0)
    with pytest.raises(ValueError, match="got one that is done"):
        search.observe(1.0)


CANDIDATES = [Scheme("bucketed"), Scheme("two_chunks", first_layers=3, replicated_dense=2), Scheme("bucketed")]


def seconds(scheme):
    if scheme.name == "host_accumulate":
        return 0.5 + 0.1 * abs(scheme.chunk - 4)
    return {"bucketed": 0.9, "two_chunks": 0.6}[scheme.name]


def tuned(tuner, times, stop=10**9):
    """Run up to `stop` intervals of a tuner; return the scheme of each."""
    schemes = []
    while not tuner.done and len(schemes) < stop:
        schemes.append(tuner.scheme)
        tuner.observe(times(tuner.scheme))
    return schemes


def test_tuner_tries_candidates_once_then_chunks_with_the_better_replication():
    tuner = Tuner(CANDIDATES, ChunkSearch(8, 10, 5))
    schemes = tuned(tuner, seconds)
    assert schemes[:2] == CANDIDATES[:2]
    assert [(s.chunk, s.replicated_dense) for s in schemes[2:]] == [(k, 2) for k in range(1, 9)]
    assert tuner.scheme == Scheme("host_accumulate", chunk=4, replicated_dense=2)
    assert tuner.best.seconds == 0.5 and len(tuner.trials) == 10
    with pytest.raises(ValueError, match="got one that is done"):
        tuner.observe(1.0)


def test_tuner_takes_a_candidate_where_no_chunk_is_better():
    tuner = Tuner(CANDIDATES, ChunkSearch(8, 2, 2))
    tuned(tuner, lambda scheme: seconds(scheme) + 1.0 * (scheme.name == "host_accumulate"))
    assert tuner.scheme == CANDIDATES[1]


def test_tuner_without_a_search():
    tuner = Tuner(CANDIDATES)
    assert tuned(tuner, seconds) == CANDIDATES[:2] and tuner.scheme == CANDIDATES[1]
    with pytest.raises(ValueError, match="at least one scheme"):
        Tuner([])


@pytest.mark.parametrize("stop", range(11))
def test_tuner_goes_on_from_its_state(stop):
    whole, first = Tuner(CANDIDATES, ChunkSearch(8)), Tuner(CANDIDATES, ChunkSearch(8))
    expected = tuned(whole, seconds)
    before = tuned(first, seconds, stop)
    second = Tuner([Scheme("blocking")], ChunkSearch(8))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + tuned(second, seconds) == expected and second.scheme == whole.scheme
