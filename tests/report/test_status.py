"""Tests of the state of a run, from logs of every kind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from halograd.errors import UserError
from halograd.report import status as module
from halograd.report.status import read_record, status_of, status_text
from tests.support.clock import DrivenClock

NOW = 2e9  # [s], later than all times without a given age
PER_EPOCH, EPOCHS, BATCH = 10, 4, 8
BEGIN = {
    "event": "begin",
    "step": 0,
    "epochs": EPOCHS,
    "steps_per_epoch": PER_EPOCH,
    "batch": BATCH,
    "ranks": 4,
    "hosts": {"n17": 2, "n18": 2},
    "cut": "2 sample x 2 height",
    "job": "4711",
    "config": {"output": {"log_steps": 1}},
}


@pytest.fixture(autouse=True)
def now(monkeypatch):
    """Stop the clock, on which the state of a run depends."""
    DrivenClock(tick=0.0).drive(monkeypatch, module).seconds = NOW


def log_of(steps: int, seconds: float = 0.5, validation: float = 5.0, begin: int = 0, at: float = 1000.0) -> list[dict]:
    """Return the log of a job with these steps and a validation after every epoch; it begins at `at` [s]."""
    lines: list[dict] = [{**BEGIN, "step": begin, "time": at}]
    for step in range(begin + 1, steps + 1):
        at += seconds
        lines.append({"event": "step", "epoch": (step - 1) // PER_EPOCH, "step": step, "loss": 1 / step})
        lines[-1] |= {"learning_rate": 0.1, "seconds": seconds, "samples_per_second": BATCH / seconds, "time": at}
        if step % PER_EPOCH == 0:
            at += validation
            lines.append({"event": "validation", "epoch": step // PER_EPOCH - 1, "step": step, "loss": 0.25})
            lines[-1] |= {"iou": 0.75, "recall": None, "time": at}
    return lines


def write(folder: Path, lines: list[dict], tail: str = "", age: float = 0.0) -> Path:
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    written(folder / "log.jsonl", age)
    return folder


def written(path: Path, age: float = 0.0) -> None:
    """Set the modification time of a file to `age` seconds ago."""
    os.utime(path, (NOW - age, NOW - age))


def test_a_run_under_way(tmp_path):
    """The status of a running job has its speed: 0.5 s per step, plus the share of a validation of 5 s."""
    folder = write(tmp_path, log_of(35), '{"event": "st')
    phases = {"halo": {"communication": 2.0, "blocked": 0.5, "overlap": 75.0}, "forward": {"seconds": 1.0}}
    with (folder / "log.jsonl").open("a") as file:
        file.write('\n{"event": "phases", "step": 30, "steps": 30, "phases": ' + json.dumps(phases) + "}\n")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step-00000030.h5").write_bytes(bytes(2048))
    (folder / "checkpoints" / "latest.h5").symlink_to("step-00000030.h5")
    written(folder / "log.jsonl")
    written(folder / "checkpoints" / "step-00000030.h5", 7.0)
    status = status_of(read_record(folder))
    assert (status.state, status.step, status.steps, status.epoch, status.epochs) == ("running", 35, 40, 4, 4)
    assert status.loss == pytest.approx(1 / 35) and status.validation["iou"] == 0.75
    assert status.seconds_per_step == pytest.approx(0.5 + 2 * 5.0 / 20)
    assert status.seconds_left == pytest.approx(5 * status.seconds_per_step)
    assert status.samples_per_second == pytest.approx(BATCH / status.seconds_per_step)
    assert status.overlap == {"halo": 75.0} and status.hosts == ["n17", "n18"] and status.job == "4711"
    assert (status.checkpoint_step, status.checkpoint_bytes) == (30, 2048)
    text = status_text(status)
    assert text[0] == f"{folder}: running, step 35 of 40 (87 %), epoch 4 of 4"
    for part in (
        "loss        0.028571; validation after epoch 3: loss 0.25, iou 0.75",
        "speed       1 s/step, 8 samples/s (last two epochs, all included)",
        "time left   5 s, until ",
        "checkpoint  step 30, 7 s ago, 2 KiB: ",
        "hidden      halo 75.0 %",
        "ranks       4 on n17, n18, 2 sample x 2 height; job 4711",
    ):
        assert any(part in line for line in text), text


def test_the_end_of_a_long_log_says_the_same(tmp_path):
    folder = write(tmp_path, log_of(35))
    assert status_of(read_record(folder, 25)) == status_of(read_record(folder))
    assert len(read_record(folder, 25).steps) == 25


ENDS = [
    ([{"event": "finished", "step": 40, "time": 1.0}], "finished", ""),
    ([{"event": "stopped", "step": 35, "reason": "SIGUSR1 to rank 0 of 4", "code": 75}], "stopped", "SIGUSR1 to rank"),
    ([{"event": "stopped", "step": 35, "reason": "step 35: the loss is nan"}], "failed", "the loss is nan"),
    (
        [{"event": "failed", "rank": 2, "host": "n17", "cause": "its process is gone", "at_step": 35}],
        "failed",
        "rank 2 on n17: its process is gone",
    ),
    (
        [
            {"event": "interrupted", "reason": "SIGINT to rank 2 of 4", "host": "n17", "at_step": 35},
            {"event": "failed", "rank": 2, "host": "n17", "cause": "its process is gone", "at_step": 35},
        ],
        "interrupted",
        "SIGINT to rank 2 of 4 on n17; go on with --resume",
    ),
    ([{"event": "checkpoint_failed", "step": 35, "reason": "the disk is full"}], "running", ""),
]


@pytest.mark.parametrize("lines, state, detail", ENDS)
def test_how_a_run_ended(tmp_path, lines, state, detail):
    status = status_of(read_record(write(tmp_path, [*log_of(35), *lines])))
    assert status.state == state and detail in status.detail
    assert (status.seconds_left is None) == (state != "running")


def test_a_run_that_goes_on_after_a_failure(tmp_path):
    """The status of a restarted run ignores state and speed of the previous job."""
    failed = {"event": "failed", "rank": 2, "host": "n17", "cause": "gone", "at_step": 20}
    status = status_of(read_record(write(tmp_path, [*log_of(20), failed, *log_of(26, 2.0, begin=20, at=9000.0)])))
    assert status.state == "running" and status.seconds_per_step == pytest.approx(2.0)


def test_a_run_that_goes_on_with_another_batch(tmp_path):
    """Steps and epochs count by the size of the batches of each job: 20 steps were two epochs, 5 more are one."""
    again = {**BEGIN, "step": 20, "steps_per_epoch": 5, "batch": 2 * BATCH, "last_step": 30, "time": 2000.0}
    steps = [{**line, "epoch": 2 + (k > 25)} for k, line in enumerate(log_of(26, begin=20)[1:], 21)]
    record = read_record(write(tmp_path, [*log_of(20), again, *(s for s in steps if s["event"] == "step")]))
    status = status_of(record)
    assert (status.step, status.steps, status.epoch, status.epochs) == (26, 30, 4, 4)
    assert status.seconds_left == pytest.approx(4 * status.seconds_per_step)
    assert record.epochs_of(record.steps)[:20] == pytest.approx([k / 10 for k in range(1, 21)])
    assert record.epochs_of(record.steps)[20:] == pytest.approx([2 + k / 5 for k in range(1, 7)])


def test_a_job_that_has_nothing_to_train(tmp_path):
    """A complete run that is resumed has no speed: that of its last step was of another job, or machine."""
    ends = [{**BEGIN, "step": 40, "last_step": 40, "time": 9000.0}, {"event": "finished", "step": 40, "time": 9001.0}]
    status = status_of(read_record(write(tmp_path, [*log_of(40), *ends])))
    assert (status.state, status.step, status.steps, status.epoch) == ("finished", 40, 40, 4)
    assert status.seconds_per_step is status.samples_per_second is None and status.loss == pytest.approx(1 / 40)
    assert not any(line.startswith("  speed") for line in status_text(status))


@pytest.mark.parametrize("every", [5, 15])
def test_the_speed_of_a_log_of_some_steps(tmp_path, every):
    """The speed is that of the last two epochs if each fifth step is logged, or that of the last three lines."""
    lines = log_of(90, 2.0, 0.0, at=0.0) + log_of(120, 0.5, 0.0, begin=90, at=180.0)[1:]
    logged = [line for line in lines[1:] if line["event"] == "step" and line["step"] % every == 0]
    status = status_of(read_record(write(tmp_path, [lines[0], *logged])))
    assert status.seconds_per_step == pytest.approx(0.5)


@pytest.mark.parametrize("seconds, age, state", [(0.5, 100, "running"), (0.5, 130, "quiet"), (60.0, 1000, "running")])
def test_a_run_of_which_nothing_is_heard(tmp_path, seconds, age, state):
    status = status_of(read_record(write(tmp_path, log_of(5, seconds), age=age)))
    assert status.state == state
    assert (state == "quiet") == ("nothing was logged for 2 min 10 s" in status.detail)


def test_a_loss_that_is_not_finite(tmp_path):
    """It is printed as it is; JSON for other programs has null."""
    lines = log_of(12)
    for line in lines[-3:]:
        line["loss"] = float("nan")
    lines[-3]["iou"] = float("inf")  # the validation after step 10
    status = status_of(read_record(write(tmp_path, lines)))
    assert any("loss        nan; validation after epoch 1: loss nan, iou inf" in line for line in status_text(status))
    data = status.as_dict()
    assert data["loss"] is data["validation"]["loss"] is data["validation"]["iou"] is None and data["step"] == 12


def test_a_run_that_has_just_begun(tmp_path):
    status = status_of(read_record(write(tmp_path, [{**BEGIN, "time": 1.0}])))
    assert (status.step, status.loss, status.seconds_left, status.checkpoint) == (0, None, None, None)
    text = "\n".join(status_text(status))
    assert "step 0 of 40 (0 %), epoch 1 of 4" in text and "checkpoint  none yet" in text


def test_a_log_of_an_old_version(tmp_path):
    lines = [{k: v for k, v in line.items() if k != "time"} for line in log_of(20)[1:]]
    status = status_of(read_record(write(tmp_path, lines)))
    assert (status.steps, status.step, status.seconds_per_step, status.ranks) == (None, 20, 0.5, None)
    assert status_text(status)[0].endswith(": running, step 20")


def test_a_checkpoint_that_has_just_been_removed(tmp_path):
    """If a run removes its newest checkpoint meanwhile, the status reports the next newest one, or none."""
    folder = write(tmp_path, log_of(35)) / "checkpoints"
    folder.mkdir()
    (folder / "latest.h5").symlink_to("step-00000030.h5")
    assert status_of(read_record(tmp_path)).checkpoint is None
    (folder / "step-00000020.h5").write_bytes(bytes(100))
    assert status_of(read_record(tmp_path)).checkpoint_step == 20
    (folder / "step-00000030.h5").symlink_to("best.h5")
    (folder / "best.h5").write_bytes(bytes(100))
    os.utime(folder / "best.h5", (2e9, 2e9))  # a clock is ahead
    status = status_of(read_record(tmp_path))
    assert (status.checkpoint, status.checkpoint_step) == (str(folder / "best.h5"), None)
    assert any(line.startswith("  checkpoint  0 s ago, 100 B: ") for line in status_text(status))


def test_what_is_no_run(tmp_path):
    message = r"expected the directory of a run, which has a log\.jsonl: there is none"
    with pytest.raises(UserError, match=rf"{message}, as before the first step of a run; give"):
        read_record(tmp_path)
    with pytest.raises(UserError, match=rf"{message}; give"):
        read_record(tmp_path / "none")
