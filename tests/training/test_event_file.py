"""Tests of event files: their records are read by the test itself and by TensorBoard."""

from __future__ import annotations

import errno
import importlib.util
import json
import struct
import sys
from pathlib import Path

import pytest

from halograd.errors import UserError
from halograd.training.log import TensorBoard, read_log, scalars_of
from halograd.training.run import train
from tests.training.runs import write_config

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
