"""Tests of a run's log, event files and timelines: lines and readers, damage, bounded memory, sums of times."""

from __future__ import annotations

import errno
import importlib.util
import json
import logging
import os
import re
import resource
import struct
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from halograd.cli.run import run
from halograd.errors import UserError
from halograd.report.page import write_page
from halograd.report.status import read_record, status_of, status_text
from halograd.training import log as training_log
from halograd.training.log import RankLog, TensorBoard, parse_line, parse_lines, read_log, rewind_log, scalars_of
from halograd.training.run import train
from halograd.training.step_times import STEPS, StepTimes
from halograd.training.timeline import Timeline, kind_of, merge_traces, overlap_ratio, trace_events, write_trace
from tests.harness.limits import LIMIT, scaled
from tests.launch import find_mpiexec, mpiexec
from tests.support.terminal import on_terminal
from tests.training.launching import sets
from tests.training.runs import write_config

STEP = {"event": "step", "epoch": 0, "step": 1, "loss": 0.5, "learning_rate": 0.1, "seconds": 0.2}
STEP |= {"samples_per_second": 20.0, "time": 1e9}
VALIDATION = {"event": "validation", "epoch": 0, "step": 3, "loss": 0.25, "iou": None, "f1": 0.5, "time": 1e9}
PHASES = {"event": "phases", "step": 3, "steps": 3, "overlap": None, "phases": {"forward": {"seconds": 1.0}}}
PHASES["phases"] |= {"halo": {"communication": 2.0, "blocked": 0.5, "overlap": None}}
BEGIN = {"event": "begin", "step": 0, "epochs": 2, "steps_per_epoch": 3, "batch": 4, "hosts": {"n17": 2}, "job": None}
BEGIN |= {"config": {"output": {"log_steps": 1}, "model": {"widths": [4, 6]}}}
PREDICTION = {"event": "prediction", "steps": 2, "predicted_step_seconds": 0.1, "measured_step_seconds": 0.2}
PREDICTION |= {"data_seconds": 0.0, "waits": {"halo": 0.1}, "layers": {"a": {"predicted": 0.1, "measured": 0.0}}}
FAILED = {"event": "failed", "rank": 1, "host": "n17", "cause": "gone", "at_step": 2}
GOOD = [STEP, VALIDATION, PHASES, BEGIN, PREDICTION, FAILED, {"event": "stopped", "reason": "SIGTERM", "code": 75}]
GOOD += [{"event": "finished"}, {"event": "of another version", "what": [1, {"deep": 2}]}, {**STEP, "loss": np.nan}]
GOOD += [{**STEP, "learning_rate": 1e30}, {**BEGIN, "last_step": 6}]
GOOD += [{**VALIDATION, "loss": None}, {**VALIDATION, "samples": 0.5, "cut": None}]
DEEP = b'{"event": "x", "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
NOT_LINES = [b"[1,2]", b"12", b'"step"', b"null", b"{}", b'{"event": 3}', b'{"event": "step"', DEEP, b"\0" * 512]
NOT_LINES += [
    b'{"event": "x", "a": ' + b"[" * 250 + b"]" * 250 + b"}",
    b'{"event": "x", "step": 1' + b"0" * 5000 + b"}",
]
NOT_LINES += [json.dumps(STEP).encode().replace(b'"epoch"', b'"ep\xffch"'), b"\xef\xbb\xbf" + json.dumps(STEP).encode()]


def changed(entry, **values):
    return json.dumps({**entry, **values}).encode()


def without(entry, key):
    return json.dumps({k: v for k, v in entry.items() if k != key}).encode()


BAD = [*NOT_LINES]
BAD += [changed(STEP, step=v) for v in ("1", 1.5, True, None, -1, 10**30, [1], float("nan"))]
BAD += [changed(STEP, time=v) for v in ("now", None, float("inf"), float("nan"), 1e30, -1.0)]
BAD += [changed(STEP, seconds=float("nan")), changed(STEP, loss="0.5"), changed(STEP, learning_rate=None)]
BAD += [changed(STEP, learning_rate=float("inf")), changed(BEGIN, last_step="6")]
BAD += [changed(STEP, loss=None), changed(VALIDATION, loss="0.5"), changed(VALIDATION, step=None)]
BAD += [without(STEP, key) for key in ("step", "loss", "learning_rate", "seconds", "samples_per_second")]
BAD += [without(VALIDATION, "epoch"), changed(VALIDATION, iou="good"), changed(VALIDATION, f1=[1])]
BAD += [changed(PHASES, phases=v) for v in (None, [1], {"halo": 1}, {"halo": {"overlap": 1.0}}, {"forward": {}})]
BAD += [changed(BEGIN, config=v) for v in (1, {"output": 1}, {"output": {"log_steps": "1"}})]
BAD += [changed(BEGIN, hosts=["n17"]), changed(BEGIN, job=4711), changed(BEGIN, epochs="2"), without(FAILED, "host")]
BAD += [changed(PREDICTION, waits=[]), changed(PREDICTION, layers={"a": {"predicted": 1.0}}), b'{"event": "stopped"}']


@pytest.mark.parametrize("entry", GOOD, ids=lambda entry: entry["event"])
def test_good_lines(entry):
    assert repr(parse_line(json.dumps(entry).encode())) == repr(entry)  # NaN is not equal to itself


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:50].decode(errors="replace"))
def test_bad_lines(line):
    assert parse_line(line) is None
    assert parse_lines([line + b"\n", b"\n"]) == ([], 1)
    assert parse_lines([line]) == ([], 0), "it is being written"


def damaged(path, lines=BAD):
    """Write the log of a run of two epochs with a damaged line after each good one; return the good entries."""
    good = [{**BEGIN, "time": 1e9}]
    good += [{**STEP, "step": k, "epoch": (k - 1) // 3, "time": 1e9 + k} for k in range(1, 7)]
    good += [{**VALIDATION, "step": 3}, PHASES, PREDICTION, {"event": "finished", "step": 6}]
    bad = iter(lines)
    text = b"".join(json.dumps(entry).encode() + b"\n" + next(bad, b"") + b"\n" for entry in good)
    path.write_bytes(text + b"".join(line + b"\n" for line in bad) + b'{"event": "st')
    return good


def told(caplog, path, count):
    (message,) = [text for text in caplog.messages if "cannot be read" in text]
    caplog.clear()
    return message == f"{path}: {count} line(s) cannot be read and are skipped"


def test_every_reader(tmp_path, caplog, capsys):
    path = tmp_path / "log.jsonl"
    good = damaged(path)
    assert read_log(path) == good and told(caplog, path, len(BAD))
    assert read_log(path, "step") == good[1:7] and not caplog.messages, "said once for all that read it"
    training_log._warned.clear()
    record = read_record(tmp_path)
    assert (record.steps, record.events) == (good[1:7], [good[0], *good[7:]]) and told(caplog, path, len(BAD))
    assert status_text(status_of(record))[0].endswith("finished, step 6 of 6 (100 %), epoch 2 of 2")
    path.write_bytes(path.read_bytes() + "".join(json.dumps(entry) + "\n" for entry in good[1:7]).encode())
    assert read_record(tmp_path, 2).steps == good[5:7]
    write_page(record, tmp_path / "page.html")
    assert run(["status", str(tmp_path)]) == 0 and "finished, step 6 of 6" in capsys.readouterr().out
    assert run(["report", str(tmp_path)]) == 0


def test_a_validation_without_a_loss_and_an_end_without_a_step(tmp_path, caplog):
    """Undefined scores are gaps in plots and "none" in text, and an end without a step is accepted."""
    path, times = tmp_path / "log.jsonl", iter(range(10**9, 10**9 + 99))
    entries = [BEGIN, *({**STEP, "step": k} for k in (1, 2, 3)), {**VALIDATION, "loss": None}]
    entries += [*({**STEP, "step": k, "epoch": 1} for k in (4, 5, 6)), {**VALIDATION, "epoch": 1, "step": 6}]
    entries += [{"event": "no_best", "step": 6, "reason": "no position counts"}, {"event": "finished"}]
    path.write_text("".join(json.dumps({**entry, "time": next(times)}) + "\n" for entry in entries))
    record = read_record(tmp_path)
    assert [entry["loss"] for entry in record.all("validation")] == [None, 0.25] and not caplog.messages
    assert "finished" in status_text(status_of(record))[0]
    write_page(record, tmp_path / "page.html")
    assert "no position counts" in (tmp_path / "page.html").read_text()


def test_rewinding_leaves_good_lines_as_they_are(tmp_path, caplog):
    path = tmp_path / "log.jsonl"
    good = damaged(path)
    kept = [entry for entry in good if entry.get("step", 0) <= 3]
    rewind_log(path, 3)
    assert told(caplog, path, len(BAD))
    assert path.read_text() == "".join(json.dumps(entry) + "\n" for entry in kept)


@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_a_log(tmp_path):
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(UserError, match=r"directory of a run, .*: not a regular file"):
        read_record(tmp_path)
    with pytest.raises(OSError, match="not a regular file"):
        rewind_log(tmp_path / "log.jsonl", 3)
    with pytest.raises(UserError, match=r"not a regular file at .*log\.jsonl"):
        train(write_config(tmp_path, out="."))


ODD = [None, True, -1, 0, 1.5, 10**30, float("nan"), float("inf"), "", "text", [], [1], {}, {"a": 1}]


def flipped(data, rng):
    """Return the log with some bits flipped."""
    data = bytearray(data)
    for at in rng.integers(8 * len(data), size=int(rng.integers(1, 30))).tolist():
        data[at // 8] ^= 1 << at % 8
    return bytes(data)


def exchanged(data, rng):
    """Return the log with some values, at any depth, removed or replaced by other types; all lines are JSON."""
    entries = [json.loads(line) for line in data.splitlines()]
    for _ in range(int(rng.integers(1, 6))):
        place = entries[int(rng.integers(len(entries)))]
        while True:
            key = list(place)[int(rng.integers(len(place)))]
            if not isinstance(place[key], dict) or not place[key] or rng.random() < 0.3:
                break
            place = place[key]
        if rng.random() < 0.2 and len(place) > 1:
            del place[key]
        else:
            place[key] = ODD[int(rng.integers(len(ODD)))]
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()


def test_any_damage(tmp_path):
    """All readers accept a log with random damage; HALOGRAD_LOG_CASES sets the number of cases, each with a page."""
    train(write_config(tmp_path), ["output.timeline=true"])
    path = tmp_path / "out" / "log.jsonl"
    extra = [FAILED, PREDICTION, {"event": "stopped", "step": 9, "reason": "SIGTERM", "code": 75}]
    whole = path.read_bytes() + b"".join(json.dumps(entry).encode() + b"\n" for entry in extra)
    count = int(os.environ.get("HALOGRAD_LOG_CASES", "0"))
    for case in range(count or 300):
        rng = np.random.default_rng([3, case])
        path.write_bytes((flipped, exchanged)[case % 2](whole, rng))
        record = read_record(path.parent)
        status_text(status_of(record))
        if count or case in (100, 201):
            write_page(record, tmp_path / "page.html")
        rewind_log(path, int(rng.integers(12)))
        read_log(path)


@pytest.mark.mpi
def test_a_run_goes_on(comm, config, caplog):
    """A run with a damaged log resumes, reports the number of skipped lines, and appends valid lines."""
    train(config, ["training.epochs=1"], comm=comm)
    path = config.parent / "out" / "log.jsonl"
    if comm.rank == 0:
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([lines[0], *[line + b"\n" for line in BAD], *lines[1:], b'{"event": "st']))
    comm.Barrier()
    caplog.clear()
    train(config, ["training.epochs=2"], True, comm=comm)
    if comm.rank == 0:
        assert told(caplog, path, len(BAD))
        assert [entry["step"] for entry in read_log(path, "step")] == [1, 2, 3, 4, 5, 6]
        assert not caplog.messages


def test_what_goes_into_it(tmp_path, capsys):
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    listener = Listener()
    root, log = logging.getLogger(), logging.getLogger("halograd.test")
    level = root.level
    root.addHandler(listener)
    try:
        with RankLog(tmp_path, 3, 4):
            log.info("only in the file")
            log.warning("in both")
            print("printed")
            print("complained", file=sys.stderr)
        assert root.level == level and listener.level == logging.NOTSET
    finally:
        root.removeHandler(listener)
    log.warning("afterwards")
    text = (tmp_path / "rank-0003.log").read_text()
    assert heard == ["in both"]
    assert capsys.readouterr() == ("printed\n", "complained\n")
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d rank 3 of 4 on \S+, process \d+, cores [\d,-]+\n", text)
    assert "INFO halograd.test: only in the file\n" in text and "WARNING halograd.test: in both\n" in text
    assert "\nprinted\ncomplained\n" in text and "afterwards" not in text and text.endswith(" ends\n")


def test_what_ended_it(tmp_path):
    for message in ("expected a moon", "expected a sun"):
        with pytest.raises(UserError), RankLog(tmp_path, 0, 1):
            raise UserError(message)
    text = (tmp_path / "rank-0000.log").read_text()
    assert text.index("UserError: expected a moon") < text.index("UserError: expected a sun")  # continued


@pytest.mark.mpi
def test_a_run_with_a_log_of_every_rank(comm, config):
    train(config, ["output.rank_logs=true", "output.timeline=true", "training.epochs=2"], comm=comm)
    comm.Barrier()
    logs = sorted((config.parent / "out" / "logs").iterdir())
    assert [path.name for path in logs] == [f"rank-{rank:04d}.log" for rank in range(comm.size)]
    for path in logs:
        text = path.read_text()
        assert re.search(r"INFO halograd\.training\.run: step 6: waited \d+\.\d+ s for data", text)
        assert ("step 6: allreduce {'communication':" in text) == (comm.size > 1)


def test_only_rank_0_is_heard(tmp_path):
    """Only rank 0 prints; output of other ranks goes to their logs."""
    config = write_config(tmp_path)
    (tmp_path / "run.toml").write_text(config.read_text().replace("progress = false", "rank_logs = true"))
    done = mpiexec(2, ["-m", "halograd", "train", config, "--set", "training.epochs=1"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained to step 3") == 1 and done.stderr.count("2 rank(s)") == 1
    logs = [(tmp_path / "out" / "logs" / f"rank-000{rank}.log").read_text() for rank in (0, 1)]
    assert "epoch 1/1" in logs[0] and "epoch 1/1" not in logs[1] and "step 3: waited" in logs[1]


COMPLAINS = """
import logging
from mpi4py import MPI
from halograd.cli.run import run
run(["--version"], MPI.COMM_WORLD)
logging.warning("of rank %d", MPI.COMM_WORLD.rank)
logging.error("the disk of rank %d burns", MPI.COMM_WORLD.rank)
"""


def test_another_rank_says_which_it_is():
    """Rank 0 prints warnings and errors; other ranks print only errors, with their rank and host."""
    lines = mpiexec(2, ["-c", COMPLAINS]).stderr.splitlines()
    wanted = ["halograd: of rank 0", "halograd: the disk of rank 0 burns"]
    assert [line for line in lines if "rank 1" not in line] == wanted
    (line,) = (line for line in lines if "rank 1" in line)
    assert re.fullmatch(r"halograd: rank 1 of 2 on \S+: the disk of rank 1 burns", line)


def test_a_folder_that_cannot_be_made(tmp_path):
    config = write_config(tmp_path)
    (tmp_path / "out").write_text("")
    for settings in (["output.rank_logs=true"], []):
        with pytest.raises(UserError, match=r"output\.directory .*/out: .* written"):
            train(config, settings)


@pytest.mark.parametrize("name", ["log.jsonl", "logs/rank-0000.log", "tensorboard"])
def test_files_that_cannot_be_written(name, tmp_path):
    """A log that cannot be written, because another object is in its place, is an error that names it."""
    config = write_config(tmp_path)
    place = tmp_path / "out" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    sets = ["output.rank_logs=true"]
    if name == "tensorboard":
        pytest.importorskip("tensorboardX", reason="needs tensorboardX: pip install 'halograd[tensorboard]'")
        sets.append("output.tensorboard=true")
        place.touch()
    else:
        place.mkdir()
    with pytest.raises(UserError, match=rf"output\.directory .* at .*{name}.*\); "):
        train(config, sets)


BAR = "\u2501"
PROGRAM = "from halograd.comm.terminal import terminal_columns as columns; print('columns', columns(), flush=True)"


def through(*launcher: str) -> str:
    """Return what a process started by a launcher detects about its terminal."""
    code, shown = on_terminal([*launcher, sys.executable, "-c", PROGRAM])
    assert code == 0, shown
    return shown.strip()


def test_columns_behind_launchers():
    mpiexec = find_mpiexec()
    assert "columns 133" in through(mpiexec, "-n", "1")
    assert through("/bin/sh", "-c", '"$0" "$@"') == "columns 133"


@pytest.mark.parametrize("redirected", ["2>/dev/null", "2>&1 | cat"])
def test_no_columns_where_the_user_reads_a_file_or_another_program(redirected):
    assert "columns None" in through("/bin/sh", "-c", f'{find_mpiexec()} -n 1 "$0" "$@" {redirected}')
    assert "columns None" in through("/bin/sh", "-c", f'"$0" "$@" {redirected}')


def test_no_columns_where_a_program_catches_what_is_said():
    """A process whose output a program captures detects no terminal width, although that program has a terminal."""
    catching = "import subprocess, sys; print(subprocess.run(sys.argv[1:], capture_output=True, text=True).stdout)"
    assert "columns None" in through(sys.executable, "-c", catching)


def test_a_run_of_two_ranks_shows_its_bar(tmp_path):
    """A run of two ranks shows its progress bar on the terminal, and not in the logs of ranks."""
    command = [find_mpiexec(), "-n", "2", sys.executable, "-m", "halograd", "train", str(write_config(tmp_path))]
    code, shown = on_terminal([*command, *sets("output.progress=true", "output.rank_logs=true")])
    assert code == 0, shown
    assert BAR in shown and "\x1b[" in shown
    logs = [path.read_text() for path in tmp_path.glob("out/logs/*.log")]
    assert logs and not any(BAR in text for text in logs)


needs_writer = pytest.mark.skipif(
    importlib.util.find_spec("tensorboardX") is None, reason="needs tensorboardX: pip install 'halograd[tensorboard]'"
)


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of RFC 3720, computed bit by bit."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def records(path: Path) -> list[bytes]:
    """Return the payloads of a file after a check of their checksums."""
    data, found = path.read_bytes(), []
    while data:
        length, first = struct.unpack("<QI", data[:12])
        payload, (second,) = data[12 : 12 + length], struct.unpack("<I", data[12 + length : 16 + length])
        for part, told in ((data[:8], first), (payload, second)):
            rotated = (told - 0xA282EAD8) & 0xFFFFFFFF
            assert (rotated << 15 | rotated >> 17) & 0xFFFFFFFF == crc32c(part)
        found.append(payload)
        data = data[16 + length :]
    return found


@needs_writer
def test_records_by_hand(tmp_path):
    """Records have the expected bytes: version, start of the run, and scalars of a line, with checksums of RFC 3720."""
    assert crc32c(bytes(range(32))) == 0x46DD794E  # RFC 3720, B.4
    with TensorBoard(tmp_path, 6) as board:
        board({"event": "step", "step": 300, "loss": 0.5, "time": 2.0})
    (path,) = tmp_path.iterdir()
    version, start, scalar = records(path)
    now = version[:9]
    assert version == now + b"\x1a\x0dbrain.Event:2"
    assert start == now + b"\x10\x07\x3a\x02\x08\x01"
    value = b"\x0a\x0dtraining/loss\x15" + struct.pack("<f", 0.5)
    assert scalar == b"\x09" + struct.pack("<d", 2.0) + b"\x10\xac\x02\x2a\x16\x0a\x14" + value


def test_writing_needs_a_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX.proto.event_pb2", None)
    with pytest.raises(UserError, match=r"output\.tensorboard: .*\[tensorboard\]'"):
        train(write_config(tmp_path), ["output.tensorboard=true"])


def test_lines_of_the_log_that_are_drawn():
    step = {"event": "step", "epoch": 0, "step": 3, "loss": 0.5, "learning_rate": 1e-3, "seconds": 0.1, "time": 9.0}
    assert scalars_of(step) == {"training/loss": 0.5, "training/learning_rate": 1e-3, "speed/seconds_per_step": 0.1}
    phases = {"forward": {"seconds": 1.0}, "halo": {"communication": 2.0, "blocked": 1.0, "overlap": 50.0}}
    assert scalars_of({"event": "phases", "step": 3, "phases": phases}) == {"hidden_percent/halo": 50.0}
    assert scalars_of({"event": "checkpoint", "step": 3, "path": "x"}) == {}


def test_no_line_is_lost_on_a_full_disk(tmp_path, caplog):
    """Lines of any length of time without space are written when there is some, each once and in order."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with training_log.RunLog(tmp_path / "log.jsonl", True, bar=False) as log:
        log.write("step", step=1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            for step in range(2, 400):
                log.write("step", step=step, text="x" * 50)
            assert log.path.stat().st_size == 1000
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        log.write("step", step=400)
        entries = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [entry["step"] for entry in entries] == list(range(1, 401))
    assert len(caplog.messages) == 1 and "cannot be written now" in caplog.messages[0]


@pytest.mark.parametrize("taken", ["full", "closed"])
def test_a_run_whose_output_is_not_taken(tmp_path, taken):
    """A full disk below the file of stderr, or the end of the program that reads it, does not end a run."""
    config = write_config(tmp_path)
    if taken == "full":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        end, out = os.pipe()
        os.close(end)
    command = [sys.executable, "-m", "halograd", "train", config, "--set", "output.progress=true"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=out, timeout=LIMIT, check=False)
    os.close(out)
    assert done.returncode == 0 and b"trained to step 9" in done.stdout
    assert len(read_log(tmp_path / "out" / "log.jsonl", "finished")) == 1


@needs_writer
def test_a_full_disk_does_not_end_a_run(tmp_path, monkeypatch, caplog):
    board = TensorBoard(tmp_path, 0)

    def full(self, **event):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TensorBoard, "_write", full)
    for step in (1, 2):
        board({"event": "step", "step": step, "loss": 1.0, "time": 1.0})
    assert caplog.messages == ["the TensorBoard file can no longer be written: No space left on device"]


@needs_writer
def test_a_run_as_tensorboard_reads_it(tmp_path):
    """TensorBoard shows every step of a stopped and resumed run once, with the values of the log."""
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard (make oracle)"
    )
    config = write_config(tmp_path)
    sets = ["output.tensorboard=true", "output.checkpoint_steps=4", "training.clip_norm=1.0"]
    train(config, [*sets, "training.epochs=2"])  # 6 steps
    for path in (tmp_path / "out" / "checkpoints").glob("step-00000006.h5"):
        path.unlink()
    (tmp_path / "out" / "checkpoints" / "latest.h5").unlink()
    train(config, sets, resume=True)  # again from 4, to 9
    assert len(list((tmp_path / "out" / "tensorboard").iterdir())) == 2
    board = reader.EventAccumulator(str(tmp_path / "out" / "tensorboard"), size_guidance={reader.SCALARS: 0})
    board.Reload()
    log = tmp_path / "out" / "log.jsonl"
    assert {tag for tag in board.Tags()["scalars"] if tag.startswith(("training", "speed"))} == {
        "training/loss",
        "training/learning_rate",
        "training/gradient_norm",
        "speed/samples_per_second",
        "speed/seconds_per_step",
    }
    for tag, event, key in (("training/loss", "step", "loss"), ("validation/iou", "validation", "iou")):
        wanted = {entry["step"]: entry[key] for entry in read_log(log, event)}
        assert [e.step for e in board.Scalars(tag)] == list(wanted)
        assert [e.value for e in board.Scalars(tag)] == pytest.approx(list(wanted.values()), rel=1e-6)
    assert json.loads(log.read_text().splitlines()[0])["event"] == "begin"


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


def test_spans_of_another_thread_while_sums_are_read():
    """The prefetch thread may record the first span of a name at any time."""
    timeline, threads = example(), []

    class Phases(dict):
        """Sums during whose iteration another thread records a span."""

        def _each(self, items):
            for item in items:
                threads.append(threading.Thread(target=timeline.span, args=(f"read {len(threads)}", "io", 0.0, 1.0)))
                threads[-1].start()
                threads[-1].join(scaled(0.02))
                yield item

        def items(self):
            return self._each(super().items())

        def __iter__(self):
            return self._each(super().__iter__())

    expected = timeline.seconds("communication"), timeline.kinds()
    timeline.phases = Phases(timeline.phases)
    assert (timeline.seconds("communication"), timeline.kinds()) == expected
    for thread in threads:
        thread.join()
    assert sum(phase.count for phase in dict.values(timeline.phases)) == timeline.recorded


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


def run_timeline(first: int, last: int, paused: bool = True):
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
    measured, result = run_timeline(first, last)
    assert measured == expected and result.steps == len(expected)


def test_a_resumed_run_that_is_over_measures_nothing():
    assert run_timeline(4, 4) == ([], None)


def test_spans_become_times_of_layers():
    _, result = run_timeline(0, 6)  # of steps 1 to 4 the middle half: 2 and 3, whose layers take 3 s and 4 s
    parts = {"conv": (0.5, 0.125, 0.0625), "dense": (0.25 + 0.125, 0.0, 0.0)}
    assert result.layers == {name: tuple(3.5 * part for part in own) for name, own in parts.items()}
    assert sum(map(sum, result.layers.values())) == 3.5 * 1.0625
    assert result.step_seconds == 7.5 and result.data == 7.0
    assert result.waits == {"allreduce": 1.0, "statistics": 2.0} and result.update == 3.0


def test_a_timeline_that_is_on_stays_on():
    measured, result = run_timeline(0, 6, paused=False)
    assert measured == list(range(6)), "somebody else wants all steps"
    assert result.steps == 4 and sum(map(sum, result.layers.values())) == 3.5 * 1.0625
