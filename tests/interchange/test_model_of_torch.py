"""Runs with ``model.torch``: trained, resumed, evaluated and exported from the graph in their folder."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import halograd as hg
from halograd.errors import UserError
from halograd.exporting import export_run
from halograd.models import build
from halograd.training import evaluate, train
from halograd.training.build import NAME
from halograd.training.config import ModelConfig
from halograd.user_code import load
from tests.interchange.support import first, keep_operators, last, predicted, samples, torch
from tests.training.runs import write_own

pytestmark = pytest.mark.torch

NET = """
import torch

import halograd as hg


def make(filters: int = 4):
    torch.manual_seed(1)
    parts = [torch.nn.Conv2d(3, filters, 3, padding=1), torch.nn.BatchNorm2d(filters), torch.nn.ReLU()]
    return torch.nn.Sequential(*parts, torch.nn.Conv2d(filters, 1, 1)), torch.zeros(1, 3, 16, 16)


def alone():
    return make()[0]


def double(network):
    y = network.outputs["output"]
    return hg.Network({"prediction": y, "loss": 2.0 * hg.MeanSquaredError()(y, hg.Input(y.shape, "target"))})
"""


@pytest.fixture(autouse=True)
def _exporters():
    torch()
    keep_operators()


def _write(folder) -> None:
    path = write_own(folder, NET)
    model = 'torch = "net.py:make"\nloss = "BinaryCrossEntropyWithLogits"\nfilters = 6'
    path.write_text(path.read_text().replace('file = "net.py:build"', model))


@pytest.mark.ranks(1, 2)
def test_a_run_needs_torch_only_once(comm, working, monkeypatch):
    """Without torch and the function's file, a run goes on, is evaluated and exported, and may be moved."""
    module, _ = _module(comm, working)
    cut = f"strategy.height={comm.size}"
    before = train(working / "run.toml", ["training.epochs=1", cut], comm=comm)
    comm.barrier()
    if comm.rank == 0:
        (working / "net.py").unlink()
    comm.barrier()
    hidden = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torch"}
    with monkeypatch.context() as without:
        for name in hidden:
            without.setitem(sys.modules, name, None)
        result = train(working / "run.toml", ["training.epochs=2", cut], resume=True, comm=comm)
        assert result["steps"] == 2 * before["steps"]
        comm.barrier()
        if comm.rank == 0:
            (working / "out").rename(working / "moved")
        comm.barrier()
        found = evaluate(working / "moved", [cut], comm=comm)
        assert found["loss"] == pytest.approx(result["validation"]["loss"], rel=1e-12)
        if comm.rank == 0:
            export_run(working / "moved", "onnx", working / "trained.onnx")
    if comm.rank == 0:
        hg.to_torch(working / "moved", module.double())
        x = samples(16, 16, 3)
        ours = predicted(hg.onnx.load(working / "trained.onnx"), x)["prediction"]
        np.testing.assert_allclose(last(module.eval()(first(x))), ours, rtol=0, atol=1e-5)


def _module(comm, folder):
    """Write the files of a run, and return what its function makes. Collective."""
    if comm.rank == 0:
        _write(folder)
    comm.barrier()
    return load("net.py:make", "test")(filters=6)


def test_losses_of_an_imported_network(working):
    """By name, with a target of its kind, or from a function; from torch and from an ONNX file."""
    _write(working)
    network = build("torch:net.py:make", loss="SoftmaxCrossEntropy", filters=5)
    assert network.inputs["target"].shape == (16, 16, 1) and network.inputs["target"].dtype == "int32"
    assert network.parameters()["0/w"].shape == (5, 3, 3, 3)
    hg.onnx.save(hg.Network({"output": network.outputs["prediction"]}), None, working / NAME)
    for source in ("torch:net.py:make", f"onnx:{NAME}"):
        network = build(source, loss="net.py:double")
        assert list(network.outputs) == ["prediction", "loss"]
    for source, options, message in (
        ("torch:net.py:alone", {"loss": "Huber"}, r"expected .* a torch.nn.Module and an example, got Sequential"),
        ("torch:net.py:make", {}, "model.loss: expected one of .*, got None; .*--option loss="),
        ("torch:net.py:make", {"loss": "Hubert"}, "model.loss: expected one of .*, got 'Hubert'"),
        ("torch:net.py:make", {"loss": "net.py:alone"}, "model.loss: net.py:alone failed: TypeError"),
        ("torch:net.py:make", {"loss": "Huber", "width": 3}, "model.torch: net.py:make failed: TypeError"),
    ):
        with pytest.raises(UserError, match=message):
            build(source, **options)


def test_keys_that_do_not_go_together():
    assert ModelConfig(torch="net.py:make", loss="Huber", width=3).options == {"loss": "Huber", "width": 3}
    for keys, message in (
        ({"torch": "net.py:make"}, "loss: expected a loss with torch"),
        ({"torch": "net.py", "loss": "Huber"}, "torch: expected "),
        ({"torch": "net.py:make", "name": "mesh", "loss": "Huber"}, "torch: expected no name with it"),
        ({"onnx": "net.onnx", "loss": "Huber", "width": 3}, "width: expected no option but loss with onnx"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelConfig(**keys)
