"""Tests of the overlap of gradient sums with computation, by hand (Dryden et al. 2019, Section V-B)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.dtensor import Groups
from halograd.perfmodel.cost.layer_cost import LayerCost
from halograd.perfmodel.cost.timeline import PricedBucket, PricedReduction, Replication, run_step

NAMES = ("a", "b", "c")
#: Forward 1 s, backward 2 s, each.
COSTS = [LayerCost(forward=1.0, backward_data=1.0, backward_filter=1.0)] * 3


def reductions(*seconds, update=0.0):
    """Return one bucket per layer, last layer first."""
    return [
        PricedReduction(PricedBucket((n,), Groups.whole(2), (8,)), t, update) for n, t in zip(reversed(NAMES), seconds)
    ]


def test_all_hidden_behind_backward_and_the_next_forward():
    """c is summed from 2 to 3, b from 4 to 5, a from 6 to 6: no computation waits."""
    assert run_step(NAMES, COSTS, reductions(1.0, 1.0, 0.0)).seconds == 9.0


def test_the_last_sum_is_waited_for_by_the_first_layer():
    found = run_step(NAMES, COSTS, reductions(1.0, 1.0, 0.5, update=0.25))
    assert found.waits == (0.0, 0.0, 0.5) and found.seconds == 9.0 + 0.5 + 3 * 0.25
    assert found.forward == 3.0 and found.backward == 6.0 and found.update == 0.75


@pytest.mark.parametrize(
    ("options", "in_order", "waits"),
    [
        # c: 2 to 6; b, ready at 4, waits for the link: 6 to 10; a: 10 to 11, waited for from 6 on; c is long done.
        ({}, False, 5.0),
        # All at once. c: 2 to 6, b: 4 to 8, a: 6 to 7: layer a waits 1 s, then b needs 8 at 8.
        ({"concurrent": True}, False, 1.0),
        # Large sums of the emulated network end in the order of their starts: a, there at 7, is finished behind b.
        ({"concurrent": True}, True, 2.0),
    ],
)
def test_one_sum_at_a_time_or_all_at_once(options, in_order, waits):
    found = run_step(NAMES, COSTS, [replace(r, in_order=in_order) for r in reductions(4.0, 4.0, 1.0)], **options)
    assert found.waits == (0.0, 0.0, waits) and found.seconds == 6 + waits + 3


def test_a_barrier_ends_all_sums_before_the_next_step():
    """The sums run from 2 to 6 (c), 6 to 6.5 (b), and 6.5 to 7.5 (a)."""
    found = run_step(NAMES, COSTS, reductions(4.0, 0.5, 1.0), barrier=True)
    assert found.seconds == pytest.approx(7.5 + 3)
    assert run_step(NAMES, COSTS, reductions(0.1, 3.0, 0.0)).seconds == 9.0 + 1.0


def test_a_bucket_is_started_when_its_last_layer_is_done():
    one = [PricedReduction(PricedBucket(("c", "b", "a"), Groups.whole(2), (8,)), 2.0, 0.0)]
    assert run_step(NAMES, COSTS, one).seconds == 6 + 2 + 3


@given(st.lists(st.floats(0, 5), min_size=3, max_size=3))
def test_a_step_is_never_shorter_than_computation_or_sums_nor_longer_than_both(seconds):
    found = run_step(NAMES, COSTS, reductions(*seconds)).seconds
    assert found + 1e-9 >= 9.0 and found <= 9.0 + sum(seconds) + 1e-9
    assert found <= run_step(NAMES, COSTS, reductions(*seconds), barrier=True).seconds + 1e-9


def test_halos_hide_behind_kernels():
    cost = LayerCost(1.0, 1.0, 1.0, halo_forward=1.5, halo_backward=0.5, strips=0.25, hides=True)
    assert cost.with_halo("pad").forward_seconds == 2.5
    assert cost.with_halo("overlap").forward_seconds == 1.0 + 0.5 + 0.25
    assert cost.backward_seconds == 2.0


# -- schemes ------------------------------------------------------------------------------------


def test_blocking_sums_begin_when_backward_is_over():
    """Backward takes 6; sums of 1 + 1 + 0.5 follow one after another, without overlap."""
    found = run_step(NAMES, COSTS, reductions(1.0, 1.0, 0.5, update=0.25), blocking=True)
    assert found.seconds == pytest.approx(6 + 2.5 + 3 * 0.25 + 3) and sum(found.waits) == 2.5
    assert run_step(NAMES, COSTS, reductions(1.0, 1.0, 0.5), concurrent=True, blocking=True).seconds == 6 + 1 + 3


def test_what_a_start_takes_delays_backward():
    """The start of c's sum takes from 2 to 2.5, and the sum arrives at 3.5; b and a have no sum."""
    begun = [PricedReduction(PricedBucket(("c",), Groups.whole(2), (8,)), 1.0, 0.0, begin=0.5)]
    found = run_step(NAMES, COSTS, begun)
    assert found.seconds == 9.5 and found.waits == (0.5,) and found.backward == 6.0


def test_shards_are_updated_first_and_gathered_behind_forward():
    """c is scattered 2-3, b 4-5, a 6-7; from 7 on a, b, c are updated, 0.25 each, each followed by its gather of 2 s.

    a arrives at 9.25, b at 11.25, c at 13.25; forward waits from 7.75 for a, at 10.25 for b, at 12.25 for c.
    """
    shards = [
        PricedReduction(PricedBucket((n,), Groups.whole(2), (8,)), 1.0, 0.25, gather=2.0) for n in reversed(NAMES)
    ]
    found = run_step(NAMES, COSTS, shards)
    assert found.seconds == pytest.approx(14.25)
    assert found.waits == pytest.approx((1.0, 1.0, 1.0 + 1.5))
    assert found.update == 0.75


def test_a_replicated_layer_computes_its_gradient_where_it_is_needed():
    """b is replicated. Its A is sent when its forward of the step before begins (-2 to 2), E at 6 (to 8).

    c's sum, ready at 2, follows A: 2 to 3. Forward: a 6-7; b waits to 8, multiplies to 8.5, updates to 8.75.
    """
    others = [r for r in reductions(1.0, 1.0, 0.0) if r.bucket.layers != ("b",)]
    replicated = [Replication("b", activations=4.0, errors=2.0, compute=0.5, update=0.25)]
    found = run_step(NAMES, COSTS, others, replications=replicated)
    assert found.seconds == pytest.approx(8.75 + 2) and found.replicated == (1.0,)
    assert found.backward == 6.5 and found.forward == 3.0 and found.update == 0.25
    late = [Replication("b", activations=9.5, errors=0.0, compute=0.5, update=0.25)]
    assert run_step(NAMES, COSTS, [], replications=late).replicated == (0.5,)
    assert run_step(NAMES, COSTS, others, replications=replicated, barrier=True).seconds == pytest.approx(11.75)
