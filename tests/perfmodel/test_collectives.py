"""Tests of collectives against hand-computed values, simulations of the algorithms, and general laws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.perfmodel import collectives
from halograd.perfmodel.collectives import ALGORITHMS, group_seconds
from halograd.perfmodel.machine import MACHINES, GroupStage, Link, Machine

LINK = Link(alpha=10.0, beta=1.0)  # times below are whole numbers: 10 s a message, 1 s a byte
CASES = [(name, algorithm) for name, formulas in ALGORITHMS.items() for algorithm in formulas]


def cost(name: str, nbytes: float, ranks: int, link: Link = LINK, **options: object) -> float:
    return collectives.seconds(name, nbytes, ranks, link, **options)


@pytest.mark.parametrize(
    ("name", "algorithm", "ranks", "seconds"),
    [
        # 120 bytes
        ("allreduce", "recursive_doubling", 8, 3 * (10 + 120)),
        ("allreduce", "recursive_doubling", 6, 2 * (10 + 120) + 2 * (10 + 120)),
        ("allreduce", "ring", 8, 14 * 10 + 2 * 105),
        ("allreduce", "ring", 6, 10 * 10 + 2 * 100),
        ("allreduce", "rabenseifner", 8, 6 * 10 + 2 * 105),
        ("allreduce", "rabenseifner", 6, 4 * 10 + 2 * 90 + 2 * (10 + 120)),
        ("reduce_scatter", "recursive_halving", 8, 3 * 10 + 105),
        ("reduce_scatter", "recursive_halving", 6, 4 * 10 + 240),
        ("reduce_scatter", "ring", 6, 5 * 10 + 100),
        ("all_gather", "recursive_doubling", 8, 3 * 10 + 105),
        ("all_gather", "recursive_doubling", 6, 4 * 10 + 100),
        ("all_gather", "bruck", 6, 3 * 10 + 100),
        ("all_gather", "ring", 6, 5 * 10 + 100),
    ],
)
def test_by_hand(name: str, algorithm: str, ranks: int, seconds: float) -> None:
    assert cost(name, 120, ranks, algorithm=algorithm) == pytest.approx(seconds)


@pytest.mark.parametrize(("name", "algorithm"), CASES)
@pytest.mark.parametrize("ranks", range(1, 18))
def test_one_rank_and_no_bytes_are_free(name: str, algorithm: str, ranks: int) -> None:
    assert cost(name, 100, 1, algorithm=algorithm) == cost(name, 0, ranks, algorithm=algorithm) == 0
    if ranks > 1:
        assert cost(name, 100, ranks, algorithm=algorithm) > 0


@pytest.mark.parametrize(("name", "algorithm"), CASES)
@given(
    nbytes=st.floats(0, 1e12),
    factor=st.floats(1, 100),
    ranks=st.integers(1, 3000),
    alpha=st.floats(0, 1),
    beta=st.floats(0, 1),
)
def test_monotonic_in_bytes(
    name: str, algorithm: str, nbytes: float, factor: float, ranks: int, alpha: float, beta: float
) -> None:
    link = Link(alpha, beta)
    less = cost(name, nbytes, ranks, link, algorithm=algorithm)
    assert less <= cost(name, nbytes * factor, ranks, link, algorithm=algorithm) * (1 + 1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
@given(nbytes=st.floats(1e-3, 1e9), ranks=st.integers(2, 300))
def test_cheapest_is_taken(name: str, nbytes: float, ranks: int) -> None:
    every = [cost(name, nbytes, ranks, algorithm=algorithm) for algorithm in ALGORITHMS[name]]
    assert cost(name, nbytes, ranks) == min(every)


@pytest.mark.parametrize("name", ALGORITHMS)
@given(nbytes=st.floats(1, 1e9), ranks=st.integers(2, 300))
def test_not_below_the_bounds_of_any_algorithm(name: str, nbytes: float, ranks: int) -> None:
    """Costs respect the bounds of Chan et al. 2007: ceil(lg p) messages, and a rank's share of the bytes."""
    steps = (ranks - 1).bit_length()
    share = nbytes * (ranks - 1) / ranks * (2 if name == "allreduce" else 1)
    assert cost(name, nbytes, ranks, Link(1.0, 0.0)) >= steps * (1 - 1e-12)
    assert cost(name, nbytes, ranks, Link(0.0, 1.0)) >= share * (1 - 1e-12)


@pytest.mark.parametrize(
    ("name", "ranks", "short", "long"),
    [
        ("allreduce", 16, "recursive_doubling", "rabenseifner"),
        ("allreduce", 12, "recursive_doubling", "ring"),
        ("reduce_scatter", 12, "recursive_halving", "ring"),
    ],
)
def test_crossover(name: str, ranks: int, short: str, long: str) -> None:
    """An algorithm for long messages is slower than one for short messages below exactly one size, and faster above."""
    link = Link(1e-6, 1e-10)

    def gain(nbytes: float) -> float:
        return cost(name, nbytes, ranks, link, algorithm=long) - cost(name, nbytes, ranks, link, algorithm=short)

    low, high = 1.0, 1e9
    assert gain(low) > 0 > gain(high)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    assert 100 < low < 1e8
    assert cost(name, 1, ranks, link) == cost(name, 1, ranks, link, algorithm=short)
    assert cost(name, 1e9, ranks, link) == cost(name, 1e9, ranks, link, algorithm=long)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32])
def test_recursive_doubling_and_halving_simulated(ranks: int) -> None:
    """The cost of recursive doubling and halving equals that of a simulation of its messages."""
    held = {rank: {rank} for rank in range(ranks)}
    messages, blocks, bit = 0, 0, 1
    while bit < ranks:
        messages, blocks = messages + 1, blocks + len(held[0])
        held = {r: held[r] | held[r ^ bit] for r in held}
        bit *= 2
    assert all(len(owned) == ranks for owned in held.values())
    seconds = messages * LINK.alpha + 8 * blocks * LINK.beta
    assert cost("all_gather", 8.0 * ranks, ranks, algorithm="recursive_doubling") == pytest.approx(seconds)
    assert cost("reduce_scatter", 8.0 * ranks, ranks, algorithm="recursive_halving") == pytest.approx(seconds)


@pytest.mark.parametrize("ranks", range(2, 34))
def test_bruck_all_gather_simulated(ranks: int) -> None:
    held = {rank: [rank] for rank in range(ranks)}
    messages = blocks = 0
    while len(held[0]) < ranks:
        step = len(held[0])
        count = min(step, ranks - step)
        messages, blocks = messages + 1, blocks + count
        held = {r: held[r] + held[(r + step) % ranks][:count] for r in held}
    assert all(sorted(owned) == list(range(ranks)) for owned in held.values())
    seconds = messages * LINK.alpha + 8 * blocks * LINK.beta
    assert cost("all_gather", 8.0 * ranks, ranks, algorithm="bruck") == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("nbytes", "ranks", "algorithm", "message"),
    [
        (1, 2, "magic", "allreduce: expected an algorithm of recursive_doubling, rabenseifner, ring, got 'magic'"),
        (-1, 2, None, "expected nbytes >= 0 and ranks >= 1, got -1 and 2"),
        (1, 0, None, "expected nbytes >= 0 and ranks >= 1, got 1 and 0"),
    ],
)
def test_refusal(nbytes: float, ranks: int, algorithm: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cost("allreduce", nbytes, ranks, algorithm=algorithm)


# -- groups that span nodes -------------------------------------------------------------------------

IN, OUT, FAR = Link(1.0, 0.1), Link(10.0, 1.0), Link(20.0, 2.0)
NODE, SWITCH, ACROSS = GroupStage("node", 4, IN, 4), GroupStage("switch", 8, OUT), GroupStage("across", 2, FAR)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_stage_is_the_flat_collective(name: str) -> None:
    for nbytes in (1.0, 1e3, 1e6):
        assert group_seconds(name, nbytes, [SWITCH]) == cost(name, nbytes, 8, OUT)
    assert group_seconds(name, 100, []) == group_seconds(name, 0, [NODE, SWITCH]) == 0


def test_allreduce_by_hand() -> None:
    # 1 byte is latency alone: reduce-scatter and all-gather on 4, recursive doubling on 8
    small = 2 * (2 * 1 + 0.1 * 0.75) + 3 * (10 + 1)
    assert group_seconds("allreduce", 1, [NODE, SWITCH]) == pytest.approx(small)
    # the node's one adapter carries the whole vector, so the outer all-reduce is of all of it
    large = 2 * (2 * 1 + 0.1 * 0.75e6) + 6 * 10 + 2 * 1e6 * 7 / 8
    ring = 2 * 31 * 10 + 2 * 1e6 * 31 / 32
    assert group_seconds("allreduce", 1e6, [NODE, SWITCH]) == pytest.approx(min(large, ring))
    # with an adapter per device, a quarter of it
    rails = [NODE._replace(sharing=1), SWITCH]
    assert group_seconds("allreduce", 1e6, rails) == pytest.approx(2 * (2 + 0.75e5) + 60 + 2 * 0.25e6 * 7 / 8)


def test_three_stages_by_hand() -> None:
    """Costs over three levels are those computed by hand; each of the 8 devices of a switch sends an eighth across."""
    within = 2 * (2 * 1 + 0.1 * 0.75 * 8) + 2 * (3 * 10 + 8 * 7 / 8)
    assert group_seconds("allreduce", 8, [NODE, SWITCH, ACROSS]) == pytest.approx(within + 20 + 2 * 1)
    gather = (2 + 0.1 * 0.75 * 8) + (30 + 7) + (20 + 2 * 0.5)
    assert group_seconds("all_gather", 8, [NODE, SWITCH, ACROSS]) == pytest.approx(gather)
    assert group_seconds("reduce_scatter", 8, [NODE, SWITCH, ACROSS]) == pytest.approx(gather)


@pytest.mark.parametrize("name", ALGORITHMS)
@given(nbytes=st.floats(0, 1e9), factor=st.floats(1, 10), ranks=st.integers(1, 600), machine=st.sampled_from(MACHINES))
def test_groups_are_monotonic_in_bytes(name: str, nbytes: float, factor: float, ranks: int, machine: str) -> None:
    stages = Machine.load(machine).stages(range(ranks))
    less = group_seconds(name, nbytes, stages)
    assert 0 <= less <= group_seconds(name, nbytes * factor, stages) * (1 + 1e-12)
    assert (less == 0) == (ranks == 1 or nbytes == 0)


def test_unknown_collective() -> None:
    with pytest.raises(ValueError, match=r"expected a collective of allreduce, .*, got 'scan'"):
        group_seconds("scan", 1, [NODE])
