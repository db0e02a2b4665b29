"""Tests of timelines and step times: sums, bounded memory, overlap (Eq. 11), trace files, times of layers."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from halograd.errors import UserError
from halograd.training.step_times import STEPS, StepTimes
from halograd.training.timeline import Timeline, kind_of, merge_traces, overlap_ratio, trace_events, write_trace


def example(rank=0):
    timeline = Timeline(rank)
    timeline.span("conv1", "forward", 10.0, 10.004)
    timeline.span("halo", "communication", 10.000, 10.010)
    timeline.span("halo", "wait", 10.008, 10.010)
    timeline.span("allreduce", "communication", 10.020, 10.050)
    timeline.span("allreduce", "wait", 10.044, 10.050)
    timeline.span("read", "io", 10.050, 10.051)
    return timeline


def test_overlap_ratio():
    """The overlap ratio is the share of communication that does not block: 80 % for 40 ms with waits of 8 ms."""
    timeline = example()
    assert timeline.overlap("halo") == pytest.approx(80.0)
    assert timeline.overlap("allreduce") == pytest.approx(80.0)
    timeline.span("allreduce", "communication", 11.0, 11.010)
    timeline.span("allreduce", "wait", 11.0, 11.010)
    assert timeline.overlap("allreduce") == pytest.approx(100 * (40 - 16) / 40)
    assert timeline.overlap() == pytest.approx(100 * (50 - 18) / 50)


def test_no_communication():
    assert overlap_ratio(0.0, 0.0) is None and Timeline().overlap() is None


def test_sums_outlive_spans():
    timeline = Timeline(capacity=3)
    for i in range(10):
        timeline.span("conv1", "forward", i, i + 0.5)
    assert [s[2] for s in timeline.spans()] == [7.0, 8.0, 9.0]
    assert timeline.phases["conv1", "forward"].count == 10
    assert timeline.seconds("forward") == pytest.approx(5.0)
    timeline.paused = True
    timeline.span("conv1", "forward", 20, 21)
    assert timeline.seconds("forward") == pytest.approx(5.0)
    timeline.clear()
    assert timeline.seconds("forward") == 0 and not list(timeline.spans())


def test_measure_and_table():
    timeline = example()
    with timeline.measure("sgd", "update"):
        pass
    lines = timeline.table(steps=2).splitlines()
    assert lines[1].split() == ["forward", "2.00"]
    assert lines[-2].split() == ["allreduce", "15.00", "3.00", "80.0", "%"]
    assert lines[-1].split() == ["halo", "5.00", "1.00", "80.0", "%"]


def test_capacity():
    with pytest.raises(ValueError, match="capacity: expected at least 1, got 0"):
        Timeline(capacity=0)


@pytest.mark.parametrize("name, kind", [("halo", "halo"), ("running statistics: bn1", "running statistics")])
def test_kind(name, kind):
    assert kind_of(name) == kind


def test_merge(tmp_path):
    parts = [tmp_path / f"part{r}" for r in range(2)]
    for rank, part in enumerate(parts):
        part.write_text(json.dumps(list(trace_events(example(rank), 5.0 + rank))))
    merge_traces(parts, tmp_path / "trace.json")
    check_trace(tmp_path, 2)
    spans = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert min(e["ts"] for e in spans) == 0
    first = [e["ts"] for e in spans if e["name"] == "conv1"]
    assert sorted(first) == pytest.approx([0.0, 1e6])  # the origins were a second apart


def check_trace(folder, ranks):
    """Check that a folder contains only a valid trace file, with the rows of every rank."""
    assert [p.name for p in folder.iterdir()] == ["trace.json"]
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for rank in range(ranks):
        own = [e for e in events if e["pid"] == rank and e["ph"] == "X"]
        assert {(e["name"], e["cat"]): rows[rank, e["tid"]] for e in own} == {
            ("conv1", "forward"): "compute",
            ("halo", "communication"): "halo",
            ("halo", "wait"): "wait",
            ("allreduce", "communication"): "gradient sums",
            ("allreduce", "wait"): "wait",
            ("read", "io"): "I/O",
        }
        assert all(e["dur"] > 0 and e["ts"] >= 0 for e in own)


def test_sums_of_gradients_have_a_row_of_their_own():
    kinds = ("loss", "statistics: bn1", "running statistics: bn1", "metrics", "reduce_scatter", "redistribution")
    timeline = Timeline(0)
    for kind in kinds:
        timeline.span(kind, "communication", 10.0, 10.1)
    rows = {e["tid"]: e["args"]["name"] for e in trace_events(timeline, 0.0) if e["name"] == "thread_name"}
    found = [rows[e["tid"]] for e in trace_events(timeline, 0.0) if e["ph"] == "X"]
    assert found == ["other sums"] * 4 + ["gradient sums", "other"]


@pytest.mark.mpi
def test_write(comm, tmp_path):
    from halograd.comm import Communicator

    with Communicator(comm) as ranks:
        folder = type(tmp_path)(ranks.bcast(str(tmp_path)))
        write_trace(example(ranks.rank), ranks, folder / "trace.json")
        ranks.barrier()
        check_trace(folder, ranks.size)
        events = json.loads((folder / "trace.json").read_text())["traceEvents"]
        assert {e["pid"] for e in events} == set(range(ranks.size))


@pytest.mark.mpi
def test_no_folder(comm, tmp_path):
    from halograd.comm import Communicator

    with Communicator(comm) as ranks, pytest.raises(UserError, match="No such file"):
        write_trace(example(ranks.rank), ranks, tmp_path / "none" / "trace.json")


def test_nothing_travels_on_one_rank():
    """Sums on one rank do not count as communication that could overlap."""
    timeline = Timeline(alone=True)
    for category in ("forward", "communication", "wait"):
        timeline.span("halo: conv", category, 0.0, 1.0)
    assert timeline.kinds() == [] and timeline.overlap() is None and timeline.seconds("forward") == 1.0


NAMES = ("conv", "conv->sample=2", "dense")  # the second is a redistribution


def executor():
    """Return a stub of an executor with its steps, and the steps that are layers of the network."""
    steps = [SimpleNamespace(name=name) for name in NAMES]
    return SimpleNamespace(
        spans=SimpleNamespace(finish=lambda: None),
        program=SimpleNamespace(steps=steps),
        network=SimpleNamespace(layers={"conv": None, "dense": None}),
    )


def run(first: int, last: int, paused: bool = True):
    """Run steps of which number n takes n + 1 s in the layers; return the measured steps and the report."""
    timeline = Timeline()
    timeline.paused = paused
    times = StepTimes(executor(), timeline, first, last)
    measured = []
    for step in range(first, last):
        times.begin(step)
        measured += [] if timeline.paused else [step]
        for name, share in zip(NAMES, (0.5, 0.25, 0.125)):
            timeline.span(name, "forward", 0.0, share * (step + 1))
        timeline.span("conv (sum)", "backward", 0.0, 0.125 * (step + 1))
        timeline.span("conv (again)", "again", 0.0, 0.0625 * (step + 1))
        timeline.span("allreduce", "wait", 0.0, 1.0)
        timeline.span("statistics: bn", "wait", 0.0, 2.0)
        timeline.span("update", "update", 0.0, 3.0)
        times.end(step, step + 5.0, 7.0)
        assert timeline.paused is paused
    return measured, times.result()


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [(0, 1, [0]), (0, 2, [1]), (5, 8, [6]), (0, 6, [1, 2, 3, 4]), (10, 40, list(range(19, 19 + STEPS)))],
)
def test_steps_in_the_middle_are_measured(first, last, expected):
    measured, result = run(first, last)
    assert measured == expected and result.steps == len(expected)


def test_a_resumed_run_that_is_over_measures_nothing():
    assert run(4, 4) == ([], None)


def test_spans_become_times_of_layers():
    _, result = run(0, 6)  # of steps 1 to 4 the middle half: 2 and 3, whose layers take 3 s and 4 s
    parts = {"conv": (0.5, 0.125, 0.0625), "dense": (0.25 + 0.125, 0.0, 0.0)}
    assert result.layers == {name: tuple(3.5 * part for part in own) for name, own in parts.items()}
    assert sum(map(sum, result.layers.values())) == 3.5 * 1.0625
    assert result.step_seconds == 7.5 and result.data == 7.0
    assert result.waits == {"allreduce": 1.0, "statistics": 2.0} and result.update == 3.0


def test_a_timeline_that_is_on_stays_on():
    measured, result = run(0, 6, paused=False)
    assert measured == list(range(6)), "somebody else wants all steps"
    assert result.steps == 4 and sum(map(sum, result.layers.values())) == 3.5 * 1.0625
