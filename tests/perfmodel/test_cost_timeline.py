"""Tests of the overlap of gradient sums with computation, against times by hand (Dryden et al. 2019, Section V-B)."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.dtensor import Groups
from halograd.layers.reduction_chunks import GradientChunk
from halograd.layers.reduction_scheme import Scheme
from halograd.lowering.operations import ExchangeSpec, KernelSpec, Run, Sum, Timing, Total, Transfer
from halograd.lowering.views import Buffer
from halograd.perfmodel.cost.network_model import ExchangeTimes
from halograd.perfmodel.cost.pricing import SumPrice
from halograd.perfmodel.cost.timeline import LayerCost, play, price_layer
from halograd.program.gradients import complete_early, reduce_gradients
from halograd.program.program import Program, Segment, Step, Target

NAMES = ("a", "b", "c")
#: Forward 1 s, backward 2 s, each.
COSTS = dict.fromkeys(NAMES, LayerCost(1.0, 2.0))
BOTH = Groups.whole(2)


class Prices:
    """Stub of a cost model: costs by the label of a bucket ("bucket 0"), or by the name of a gather."""

    synchronize = jitter = 0.0

    def __init__(self, *sums, update=0.0, gathers=(), rows=None, whole=0.0, concurrent=False):
        self.concurrent = concurrent
        self.of = {("bucket gradients", f"bucket {i}"): price for i, price in enumerate(sums)}
        self.of |= {("bucket parameters", f"bucket {i}"): price for i, price in enumerate(gathers)}
        self.of |= rows or {}
        self.seconds, self.whole = update, whole

    def sum(self, total):
        price = self.of[total.view.buffer.location]
        return price if isinstance(price, SumPrice) else SumPrice(price)

    def update(self, operation, slots):
        return self.seconds

    def kernel(self, timing, step, trained):
        assert timing.phase == "backward_filter"
        return self.whole


def program(*buckets, scheme="bucketed", replicated=()):
    """Return a program with these buckets of layers, those of the last layers first."""
    chunks = [GradientChunk(BOTH, (), tuple(layers), layers in replicated, (8,)) for layers in buckets]
    exposed = {name: gathering(name) for name in replicated}
    made = Program("net", Target(1, 2), forward=[Segment(n) for n in NAMES], exposed=exposed)
    made.backward = [Segment(name) for name in reversed(NAMES)]
    return reduce_gradients(made, chunks, Scheme(scheme))


def gathering(name):
    """Return a kernel description with the gathers of a replicated layer."""
    views = {what: Buffer((2, 1), np.dtype("float32"), "", location=(name, what)).view for what in ("rows", "errors")}
    sums = {f"{k}_gather": Sum(BOTH, v, [8], "replicated_dense", None, "all_gather") for k, v in views.items()}
    return KernelSpec(lambda environment: None, views, sums)


def step(*seconds, update=0.0, concurrent=False, barrier=False):
    """Return the timeline of a step with one bucket per layer; `seconds` begin with the last layer."""
    prices = Prices(*seconds, update=update, concurrent=concurrent)
    return play(program("c", "b", "a"), COSTS, prices, barrier=barrier)


def test_all_hidden_behind_backward_and_the_next_forward():
    """Sums of c (2 to 3), b (4 to 5) and a (at 6) overlap completely, so computation never waits."""
    assert step(1.0, 1.0, 0.0).seconds == 9.0


def test_the_last_sum_is_waited_for_by_the_first_layer():
    found = step(1.0, 1.0, 0.5, update=0.25)
    assert found.waits == {0: 0.0, 1: 0.0, 2: 0.5} and found.seconds == 9.0 + 0.5 + 3 * 0.25
    assert found.forward == 3.0 and found.backward == 6.0 and found.update == 0.75
    assert found.sums == {0: 1.0, 1: 1.0, 2: 0.5}


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
    found = step(*(SumPrice(seconds, in_order=in_order) for seconds in (4.0, 4.0, 1.0)), **options)
    assert found.waits == {0: 0.0, 1: 0.0, 2: waits} and found.seconds == 6 + waits + 3


def test_a_barrier_ends_all_sums_before_the_next_step():
    """With a barrier the sums of c (2 to 6), b (6 to 6.5) and a (6.5 to 7.5) end before the next step."""
    found = step(4.0, 0.5, 1.0, barrier=True)
    assert found.seconds == pytest.approx(7.5 + 3)
    assert step(0.1, 3.0, 0.0).seconds == 9.0 + 1.0


def test_sums_that_must_be_complete_early_are_waited_for_before_any_update():
    """Sums that must be complete early end as with a barrier; updates stay in forward, before their layers."""
    found = play(complete_early(program("c", "b", "a")), COSTS, Prices(4.0, 0.5, 1.0, update=0.25))
    assert found.seconds == pytest.approx(7.5 + 3 + 3 * 0.25) and sum(found.waits.values()) == 1.5


def test_a_bucket_is_started_when_its_last_layer_is_done():
    assert play(program("cba"), COSTS, Prices(2.0)).seconds == 6 + 2 + 3


@given(st.lists(st.floats(0, 5), min_size=3, max_size=3))
def test_a_step_is_never_shorter_than_computation_or_sums_nor_longer_than_both(seconds):
    found = step(*seconds).seconds
    assert found + 1e-9 >= 9.0 and found <= 9.0 + sum(seconds) + 1e-9
    assert found <= step(*seconds, barrier=True).seconds + 1e-9


class Second:
    """Cost model of one layer: kernels and exchanges by their names; packing takes 1/8 s per exchange."""

    overhead, concurrent, jitter = 1 / 16, False, 0.0

    def __init__(self, best_halo=False, **seconds):
        self.best_halo, self.seconds = best_halo, seconds

    def kernel(self, timing, step, trained):
        return self.seconds[timing.phase]

    def exchange(self, made):
        return ExchangeTimes(self.seconds[made.name], 1 / 8)

    def sum(self, total):
        return SumPrice(self.seconds[total.name], self.seconds.get("work", 0.0))


def run(phase):
    return Run("a", KernelSpec(lambda environment: None, {}), timing=Timing(phase, ()))


def sent(name, kind="halo"):
    """Return start and finish of an exchange of layer a, named `name`."""
    made = ExchangeSpec((), (), None, None, (), (), "assign", kind, "a")
    made.name = name
    return Transfer("a", made, "start"), Transfer("a", made, "finish")


def layer(forward, backward, prices, halo="auto"):
    return price_layer(Step("a", None, [], None, {"halo": halo}, {}), forward, backward, prices)


def test_halos_hide_behind_kernels():
    """A kernel hides 1 s of a halo exchange of 1.5 s; boundary strips take 0.25 s more; the faster algorithm counts."""
    start, finish = sent("a")
    forward = [start, run("forward"), finish, run("boundary")]
    backward = [start, run("backward_filter"), finish, run("backward_data")]
    phases = {"forward": 1.0, "boundary": 0.25, "backward_filter": 2.0, "backward_data": 0.5}
    overhead = 1 / 16 + 1 / 8
    found = layer(forward, backward, Second(a=1.5, **phases))
    assert found.forward_seconds == 1.5 + 0.25 + overhead and found.backward_seconds == 2.0 + 0.5 + overhead
    assert found.terms["halo"] == 3.0 and found.terms["halo_exposed"] == 0.5 and found.halo_algorithm == "overlap"
    for boundary, halo, algorithm, seconds in (
        (0.25, "auto", "overlap", 1.75),
        (1.25, "auto", "pad", 2.5),
        (1.25, "overlap", "overlap", 2.75),
    ):
        found = layer(forward, [], Second(True, a=1.5, **{**phases, "boundary": boundary}), halo)
        assert (found.halo_algorithm, found.forward_seconds) == (algorithm, seconds + overhead)
        assert found.backward_seconds == 0.0 and ("boundary" in found.terms) == (algorithm == "overlap")


def test_a_halo_that_backward_hides_leaves_the_algorithm_of_forward():
    start, finish = sent("a")
    phases = {"forward": 1.0, "backward_filter": 2.0}
    found = layer([start, finish, run("forward")], [start, run("backward_filter"), finish], Second(a=1.5, **phases))
    assert found.halo_algorithm == "pad" and found.backward_seconds == 1 / 16 + 1 / 8 + 2.0


def test_exchanges_travel_one_after_the_other_and_what_waits_is_named():
    """Two exchanges of 1 s and 2 s are sequential and followed by a sum; each wait is reported by its kind."""
    (first, first_end), (second, second_end) = sent("one", "channel"), sent("two", "redistribute")
    total = Sum(BOTH, Buffer((1,), np.dtype("float64"), "").view, [8], "statistics", "norm")
    operations = [first, second, first_end, second_end, Total("a", total, "start"), Total("a", total, "finish")]
    found = layer([*operations, run("forward")], [], Second(one=1.0, two=2.0, norm=0.5, work=0.25, forward=1.0))
    assert found.terms["channel"] == 1.0 - 1 / 8 and found.terms["redistribute"] == 2.0
    assert found.terms["statistics"] == 0.5 and found.terms["packing"] == 0.25 and found.halo_algorithm == ""
    assert found.forward_seconds == pytest.approx(1 / 16 + 1 / 8 + 3.0 + 0.5 + 1.0)


# -- whole programs -----------------------------------------------------------------------------


def test_messages_hide_behind_kernels_of_other_layers():
    """The halo exchange of b overlaps with the kernel of a if it starts before that kernel."""
    start, finish = sent("a")
    late = [Segment("a", [run("forward")]), Segment("b", [start, finish])]
    early = [Segment("a", [start, run("forward")]), Segment("b", [finish])]
    found = [
        play(Program("net", Target(1), forward=forward), {}, Second(a=1.5, forward=1.0))
        for forward in (late, early)
    ]
    assert [one.seconds for one in found] == [1 / 8 + 2.5, 1 / 8 + 1.5]
    assert found[1].terms["a", "halo_exposed"] == 0.5 and found[1].forward == found[1].seconds


# -- schemes ------------------------------------------------------------------------------------


def test_blocking_sums_begin_when_backward_is_over():
    """Blocking sums of 1 + 1 + 0.5 s begin after 6 s of backward, one after the other, without overlap."""
    made = program("c", "b", "a", scheme="blocking")
    found = play(made, COSTS, Prices(1.0, 1.0, 0.5, update=0.25))
    assert found.seconds == pytest.approx(6 + 2.5 + 3 * 0.25 + 3) and sum(found.waits.values()) == 2.5
    assert play(made, COSTS, Prices(1.0, 1.0, 0.5, concurrent=True)).seconds == 6 + 1 + 3


def test_what_a_start_takes_delays_backward():
    """The start of a sum delays backward: c's start takes from 2 to 2.5, and its sum ends at 3.5."""
    found = play(program("c"), COSTS, Prices(SumPrice(1.0, begin=0.5)))
    assert found.seconds == 9.5 and found.waits == {0: 0.5} and found.backward == 6.0


def test_the_device_is_waited_for_before_a_sum_amid_other_work():
    prices = Prices(1.0, 1.0, 1.0)
    prices.synchronize = 0.125
    assert play(program("c", "b", "a"), COSTS, prices).seconds == 9.0 + 1.0 + 3 * 0.125
    assert play(program("c", "b", "a", scheme="blocking"), COSTS, prices).seconds == 9.0 + 3.0


def test_shards_are_updated_first_and_gathered_behind_forward():
    """Shards are updated first and gathered during forward.

    c is scattered 2-3, b 4-5, a 6-7; from 7 on a, b, c are updated, 0.25 each, each followed by its gather of 2 s.
    a arrives at 9.25, b at 11.25, c at 13.25; forward waits from 7.75 for a, at 10.25 for b, at 12.25 for c.
    """
    made = program("c", "b", "a", scheme="sharded")
    found = play(made, COSTS, Prices(1.0, 1.0, 1.0, update=0.25, gathers=(2.0, 2.0, 2.0)))
    assert found.seconds == pytest.approx(14.25)
    assert found.waits == pytest.approx({0: 1.0, 1: 1.0, 2: 1.0 + 1.5})
    assert found.update == 0.75


def replicating(seconds, whole=0.5):
    rows = {("b", "rows"): seconds[0], ("b", "errors"): seconds[1]}
    return Prices(1.0, 0.0, 0.0, update=0.25, rows=rows, whole=whole)


def test_a_replicated_layer_computes_its_gradient_where_it_is_needed():
    """The replicated layer b computes its gradient just before its forward pass.

    Its inputs are gathered from its previous forward pass on (-2 to 2), its errors from 6 (to 8). c's sum, ready at 2,
    follows: 2 to 3. Forward: a 6-7; b waits to 8, multiplies to 8.5, updates to 8.75.
    """
    made = program("c", "b", replicated=("b",))
    prices = replicating((4.0, 2.0))
    found = play(made, COSTS, prices)
    assert found.seconds == pytest.approx(8.75 + 1 + 0.25 + 1) and found.waits[1] == 1.0
    assert found.backward == 6.5 and found.forward == 3.0 and found.update == 0.5
    assert found.sums[1] == 6.0 and found.terms == {("b", "backward_filter"): 0.5}
    alone = program("b", replicated=("b",))
    assert play(alone, COSTS, replicating((9.5, 0.0))).waits == {0: 0.5}
    assert play(made, COSTS, prices, barrier=True).seconds == pytest.approx(11.75), "c is updated while E travels"


@pytest.mark.parametrize("scheme", ["blocking", "bucketed", "sharded"])
def test_every_scheme_starts_each_sum_once_and_updates_each_bucket_once(scheme):
    made = program("c", "b", "a", scheme=scheme)
    counts = {}
    for operation in made:
        counts[type(operation).__name__] = counts.get(type(operation).__name__, 0) + 1
    assert counts["Update"] == 3 and counts["BucketTotal"] == 6
    assert counts.get("ShardGather", 0) == (6 if scheme == "sharded" else 0)
    again = reduce_gradients(made, made.buckets, Scheme(scheme))
    assert [type(o) for o in again] == [type(o) for o in made], "a second pass takes the place of the first"
    assert replace(again, end=[]).buckets == made.buckets
