"""Tests of a run on the double of a device: uploads ahead, logs, timeline, checkpoints to and from the host."""

import itertools
import json
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.errors import UserError
from halograd.kernels.cudnn.graphs import Arithmetic
from halograd.training import checkpoints, session
from halograd.training.backend import open_kernels
from halograd.training.config import parse_config
from halograd.training.inputs import DeviceFeed
from halograd.training.log import RunLog, read_log
from halograd.training.memory import Memory
from halograd.training.run import train
from halograd.training.trained import apply, evaluate
from tests.support.fake_device import FakeBackend
from tests.training.runs import CONFIG, EDGE, write_config

CONSTANT = ['schedule={kind="constant", learning_rate=0.01}']


@pytest.fixture
def on_device(monkeypatch):
    """Return a function that selects whether runs open the double of a device; it returns the opened ones."""
    opened = []

    def switch(on):
        def fake(config, comm):
            opened.append(FakeBackend())
            return opened[-1]

        monkeypatch.setattr(session, "open_kernels", fake if on else open_kernels)
        return opened

    return switch


def run(path, out, epochs, resume=False, more=()):
    overrides = [f"output.directory={out}", f"training.epochs={epochs}", *CONSTANT, *more]
    return train(path, overrides, resume=resume, comm=MPI.COMM_SELF)


def weights(out):
    with h5py.File(sorted((out / "checkpoints").glob("step-*.h5"))[-1]) as file:
        found = {}
        file["params"].visititems(
            lambda name, item: found.update({name: item[...]}) if hasattr(item, "shape") else None
        )
        return found


def test_a_run_goes_from_the_host_to_the_device_and_back(tmp_path, on_device):
    path = write_config(tmp_path)
    expected = run(path, tmp_path / "host", 3)
    run(path, tmp_path / "moving", 1)
    opened = on_device(True)
    run(path, tmp_path / "moving", 2, resume=True)
    on_device(False)
    found = run(path, tmp_path / "moving", 3, resume=True)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    assert found["validation"] == pytest.approx(expected["validation"], rel=1e-12)
    for name, array in weights(tmp_path / "host").items():
        np.testing.assert_allclose(weights(tmp_path / "moving")[name], array, rtol=0, atol=1e-12, err_msg=name)
    assert opened and opened[0].device.waits > 0


def test_a_run_goes_from_float32_on_the_host_to_bfloat16_on_the_device_and_back(tmp_path, on_device):
    """A run continues between float32 on the host and bfloat16 on a device; checkpoints are in float32."""
    path, single = write_config(tmp_path), ['training.dtype="float32"']
    expected = run(path, tmp_path / "host", 3, more=single)
    run(path, tmp_path / "moving", 1, more=single)
    on_device(True)
    run(path, tmp_path / "moving", 2, resume=True, more=['training.dtype="bfloat16"'])
    middle = weights(tmp_path / "moving")
    on_device(False)
    found = run(path, tmp_path / "moving", 3, resume=True, more=single)
    assert {array.dtype for array in middle.values()} == {np.dtype(np.float32)}
    assert found["loss"] == pytest.approx(expected["loss"], rel=0.05)
    moved = weights(tmp_path / "moving")
    assert any((moved[name] != array).any() for name, array in middle.items())
    for name, array in weights(tmp_path / "host").items():
        bound = 0.05 * max(1.0, np.abs(array).max())
        np.testing.assert_allclose(moved[name], array, rtol=0, atol=bound, err_msg=name)


def test_evaluation_and_predictions_of_bfloat16(tmp_path, on_device):
    path, low = write_config(tmp_path), ['training.dtype="bfloat16"']
    on_device(True)
    run(path, tmp_path / "low", 1, more=low)
    result = evaluate(tmp_path / "low", comm=MPI.COMM_SELF, predictions=tmp_path / "p.h5")
    apply(tmp_path / "low", [str(tmp_path / "data.h5")], tmp_path / "a.h5", what="probabilities", comm=MPI.COMM_SELF)
    data, window = [str(tmp_path / "data.h5")], (EDGE, EDGE)  # one window per sample
    apply(tmp_path / "low", data, tmp_path / "w.h5", window=window, comm=MPI.COMM_SELF)
    on_device(False)
    single = evaluate(tmp_path / "low", ['training.dtype="float32"'], comm=MPI.COMM_SELF, predictions=tmp_path / "q.h5")
    assert result["loss"] == pytest.approx(single["loss"], rel=0.02)
    with h5py.File(tmp_path / "p.h5") as low_file, h5py.File(tmp_path / "q.h5") as file:
        assert low_file["prediction"].dtype == np.float32
        np.testing.assert_array_equal(low_file["target"][...], file["target"][...])
        with h5py.File(tmp_path / "a.h5") as applied:
            order = np.argsort(low_file["sample"])
            want = 1 / (1 + np.exp(-low_file["prediction"][...][order]))
            np.testing.assert_allclose(applied["prediction"][low_file["sample"][...][order]], want, rtol=1e-6)
        with h5py.File(tmp_path / "w.h5") as windows:
            found = windows["prediction"][low_file["sample"][...][order]]
            np.testing.assert_allclose(found, low_file["prediction"][...][order], rtol=1e-6)
        largest = np.abs(file["prediction"][...]).max()
        assert np.abs(low_file["prediction"][...] - file["prediction"][...]).max() < 0.05 * largest


def test_bfloat16_on_the_cpu_is_refused_in_one_line(tmp_path):
    path = write_config(tmp_path)
    with pytest.raises(UserError, match=r'training.dtype: .*"numpy".*, got "bfloat16"'):
        run(path, tmp_path / "out", 1, more=['training.dtype="bfloat16"'])
    emulated = ['training.dtype="bfloat16"', "backend.emulate=true"]
    found = run(path, tmp_path / "emulated", 1, more=emulated)
    assert found["loss"] == pytest.approx(run(path, tmp_path / "wide", 1)["loss"], rel=0.05)


def test_log_timeline_and_evaluation(tmp_path, on_device):
    path = write_config(tmp_path)
    host = run(path, tmp_path / "host", 2)
    on_device(True)
    device = run(path, tmp_path / "device", 2, more=["output.timeline=true", "training.clip_norm=1.0"])
    clipped = run(path, tmp_path / "clipped", 2, more=["training.clip_norm=1000.0"])
    assert clipped["loss"] == pytest.approx(host["loss"], rel=1e-9)
    assert np.isfinite(device["loss"])
    steps = [json.loads(line) for line in (tmp_path / "device" / "log.jsonl").read_text().splitlines()]
    steps = [entry for entry in steps if entry.get("event", entry.get("kind")) == "step"]
    assert steps and all(np.isfinite([entry["loss"], entry["gradient_norm"]]).all() for entry in steps)
    events = json.loads((tmp_path / "device" / "timeline.json").read_text())["traceEvents"]
    assert {"forward", "backward", "update"} <= {event.get("cat") for event in events}
    result = evaluate(tmp_path / "clipped", comm=MPI.COMM_SELF, predictions=tmp_path / "p.h5")
    assert result["loss"] == pytest.approx(clipped["validation"]["loss"], rel=1e-12)
    with h5py.File(tmp_path / "p.h5") as file:
        assert np.isfinite(file["prediction"][...]).all()


@pytest.mark.parametrize(("dtype", "says"), [("float32", True), ("bfloat16", False)])
def test_the_first_line_says_whether_float32_takes_tensor_cores(tmp_path, on_device, monkeypatch, dtype, says):
    lines = []
    monkeypatch.setattr(RunLog, "print", lambda log, text: lines.append(text))
    monkeypatch.setattr(FakeBackend, "describe_arithmetic", lambda kernels, dtype: Arithmetic().describe(dtype))
    on_device(True)
    run(write_config(tmp_path), tmp_path / "out", 1, more=[f'training.dtype="{dtype}"'])
    (begin,) = read_log(tmp_path / "out" / "log.jsonl", "begin")
    for line in (lines[0], begin["kernels"]):
        assert ('per rank, float32 without tensor cores (backend.precision = "tf32"' in line) == says


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_one_checkpoint_per_interval(tmp_path, on_device, monkeypatch, device):
    """Each interval has one checkpoint, although votes arrive a step later on a device."""
    clock = itertools.count()
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    on_device(device)
    more = ["output.log_steps=1000", "output.checkpoint_epochs=0", f"output.checkpoint_minutes={4 / 60}"]
    total = run(write_config(tmp_path), tmp_path / "out", 6, more=more)["steps"]
    steps = [entry["step"] for entry in read_log(tmp_path / "out" / "log.jsonl", "checkpoint")]
    assert len(steps) > 2 and steps[-1] == total
    assert min(np.diff(steps[:-1])) > 2, steps


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("device = 1", 'backend.device: expected kernels = "cudnn" with it, got "numpy"; remove device'),
        ("graph = true", 'backend.graph: expected kernels = "cudnn" with it, got "numpy"; remove graph'),
        ('precision = "tf32"', "backend.kernels: expected precision strict for the backend numpy, got 'tf32'"),
    ],
)
def test_what_needs_a_gpu_is_refused_without(tmp_path, keys, message):
    path = write_config(tmp_path)
    path.write_text(path.read_text().replace('kernels = "numpy"', f'kernels = "numpy"\n{keys}'))
    with pytest.raises(UserError) as caught:
        train(path, [f"output.directory={tmp_path / 'out'}"], comm=MPI.COMM_SELF)
    assert message in str(caught.value)


def test_keys_of_the_backend():
    text = CONFIG.format(edge=4, channels=1, data="d.h5", out="out")
    found = parse_config(text.replace('kernels = "numpy"', 'kernels = "cudnn"\ndevice = [1, 0]\ndeterministic = true'))
    assert (found.backend.device, found.backend.deterministic, found.backend.precision) == ([1, 0], True, "strict")


def test_the_first_upload_comes_behind_the_zeros_of_its_target(monkeypatch):
    kernels, after = FakeBackend(), []
    monkeypatch.setattr(kernels.device, "upload_ahead", lambda pairs, ticket: after.append(ticket))
    x, target = (kernels.zeros(shape, "float32") for shape in ((2, 3), (2, 1)))
    inputs = {"x": x, "target": target}
    feed = DeviceFeed(Memory(kernels), inputs, 2, np.dtype("float32"))
    for slot in range(2):
        feed.after_fill(slot, {name: np.ones(array.shape, "float32") for name, array in inputs.items()})
    assert [ticket.number for ticket in after] == [kernels.device.number] * 2
    kernels.close()
