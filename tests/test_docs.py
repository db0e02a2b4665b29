"""The code in the documentation is executed."""

import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import halograd
from halograd import SGD, Communicator, Constant, Executor, Trainer, get_backend
from halograd.data import ArrayDataset
from halograd.layers import Strategy
from halograd.models import vgg_a
from halograd.training.evaluation import Evaluation
from tests.layers.losses import check, run_loss

ROOT = Path(__file__).resolve().parent.parent

DOCS = Path(__file__).parent.parent / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.M | re.S)


@pytest.mark.mpi(min_size=1)
def test_custom_layer_tutorial():
    """All blocks of custom_layers.md run in sequence, on the ranks of this run, and its losses are exact under cuts."""
    found = blocks("custom_layers.md")
    assert len(found) == 12
    space: dict = {"__name__": "tutorial"}
    for code in found:
        exec(compile(code, "custom_layers.md", "exec"), space)
        if "Quartic" in code:
            given = [np.full((1, 4, 3, 2), value) for value in (3.0, 1.0)]
            with Communicator(MPI.COMM_WORLD) as comm:
                value, _ = run_loss(space["Quartic"], given, comm, {"height": comm.size})
            assert value == 32
    x, t = np.random.default_rng(1).random((2, 2, 9, 7, 1))
    w = (np.arange(63).reshape(1, 9, 7, 1) % 20 > 0) * np.ones((2, 1, 1, 1))
    with Communicator(MPI.COMM_WORLD) as comm, Communicator(MPI.COMM_SELF) as alone:
        want = run_loss(space["Curvature"], (x, t, w), alone, {})
        check(run_loss(space["Curvature"], (x, t, w), comm, {"height": comm.size}), want)
        step = 1e-6 * np.random.default_rng(2).random(x.shape)
        above, below = (run_loss(space["Curvature"], (x + d, t, w), alone, {})[0] for d in (step, -step))
    assert np.sum(want[1] * step) == pytest.approx((above - below) / 2, rel=1e-6)


@pytest.mark.mpi(min_size=1)
def test_networks_of_ones_own_train():
    """The networks of networks.md train on the ranks of this run, and the loss falls."""
    first, part, _, again, _, second, neighbors, weighted, _ = blocks("networks.md")
    space: dict = {}
    exec(compile(first, "networks.md", "exec"), space)
    exec(compile(part, "networks.md", "exec"), space)
    build, plain = space["build"], space["block"]
    space["block"] = lambda x, width: space["convnext"](plain(x, width), width)
    network = build(resolution=16, width=4)
    exec(compile(again, "networks.md", "exec"), space)
    exec(compile(second, "networks.md", "exec"), space)
    tasks = space["network"]
    exec(compile(neighbors, "networks.md", "exec"), space)
    sharp = space["network"]
    exec(compile(weighted, "networks.md", "exec"), space)
    with Communicator(MPI.COMM_WORLD) as comm:
        for made in (network, tasks, sharp, space["network"]):
            strategy = Strategy({"height": comm.size})
            with Executor(made, comm, get_backend("numpy"), 1, strategy, "float64") as executor:
                trainer = Trainer(executor, SGD(executor.store), Constant(0.1))
                for name, node in made.inputs.items():
                    values = np.random.default_rng(1).random((1, *node.shape))
                    executor.set_input(name, values if node.dtype == "compute" else np.floor(4 * values))
                losses = [trainer.step() for _ in range(10)]
                assert losses[-1] < losses[0]


@pytest.mark.mpi(min_size=1)
def test_a_metric_of_ones_own_counts():
    """The metric of networks.md equals NumPy's on the ranks of this run, and declares which scores are better."""
    space: dict = {"hg": halograd}
    exec(compile(blocks("networks.md")[-1], "networks.md", "exec"), space)
    x, target = halograd.Input((9, 4, 1), "x"), halograd.Input((9, 4, 1), "target")
    y = halograd.Clamp(-1, 1)(x)
    network = halograd.Network({"prediction": y, "loss": space["Height"]()(y, target)})
    values, wanted = np.random.default_rng(1).normal(size=(2, 2, 9, 4, 1))
    with Communicator(MPI.COMM_WORLD) as comm:
        strategy = Strategy({"height": comm.size})
        with Executor(network, comm, get_backend("numpy"), 2, strategy, "float64", trainable=False) as executor:
            evaluation = Evaluation(executor)
            executor.set_input("x", values)
            executor.set_input("target", wanted)
            evaluation.begin()
            executor.forward(training=False)
            evaluation.add()
            found = evaluation.finish()
            assert evaluation.names["relative error"] == "lower"
            evaluation.close()
    expected = np.abs(np.clip(values, -1, 1) - wanted).sum() / np.abs(wanted).sum()
    np.testing.assert_allclose(found["relative error"], expected, rtol=1e-12)


@pytest.mark.mpi(min_size=1)
def test_the_script_of_the_page_trains(shared, monkeypatch, capsys):
    """The training script of a documentation page trains on the ranks of this run, with data of the right shape."""
    comm = MPI.COMM_WORLD
    if comm.rank == 0:
        rng = np.random.default_rng(1)
        with h5py.File(shared / "mesh.h5", "w") as file:
            file.create_dataset("inputs", data=rng.random((20, 32, 32, 3))).attrs["layout"] = "NHWC"
            file["mask"] = rng.integers(0, 2, (20, 32, 32))
    comm.barrier()
    monkeypatch.chdir(shared)
    first, _, script, *_ = blocks("networks.md")
    space: dict = {}
    exec(compile(first, "networks.md", "exec"), space)
    exec(compile(script, "networks.md", "exec"), space)
    assert space["run"].best["step"] in space["run"].history["step"] and "epoch 1: " in capsys.readouterr().out
    with h5py.File(shared / "predicted.h5") as file:
        assert file["prediction"].shape == (20, 32, 32, 1)


@pytest.mark.torch
def test_a_model_of_torch_comes_and_goes(tmp_path, monkeypatch):
    """All blocks of torch.md run in sequence; the written and the read model have the same outputs as torch."""
    torch = pytest.importorskip("torch", reason="needs torch as oracle: pip install 'halograd[oracle]'")
    for name in ("onnx", "onnxscript", "safetensors"):
        pytest.importorskip(name, reason="needs what exchanges with torch: pip install 'halograd[oracle]'")
    monkeypatch.chdir(tmp_path)
    x, target = np.zeros((8, 8, 8, 3)), np.zeros((8, 8, 8, 1), np.int32)
    space: dict = {
        "model": torch.nn.Conv2d(3, 4, 1),
        "x": torch.zeros(1, 3, 8, 8),
        "data": ArrayDataset({"input": x, "target": target}),
    }
    for code in blocks("torch.md"):
        exec(compile(code, "torch.md", "exec"), space)
    network, again, model = space["network"], space["again"], space["model"].eval()
    assert network.parameter_count == sum(p.numel() for p in model.parameters())
    assert again.inputs["x"].shape == (32, 32, 3)
    x = np.random.default_rng(1).random((2, 32, 32, 3))
    with (
        Communicator(MPI.COMM_SELF) as alone,
        Executor(again, alone, get_backend("numpy"), 2, dtype="float64", trainable=False) as executor,
    ):
        executor.set_input("x", x)
        executor.forward(training=False)
        found = executor.gather(again.names[again.outputs["prediction"]])
    want = model(torch.tensor(np.moveaxis(x, -1, 1)).float()).detach().numpy()
    np.testing.assert_allclose(np.moveaxis(found, -1, 1), want, rtol=0, atol=1e-5)


def test_the_strategy_with_cut_channels_fits_its_network(tmp_path):
    (text,) = re.findall(r"^```json\n(.*?)^```", (DOCS / "layers.md").read_text(), flags=re.M | re.S)
    (tmp_path / "strategy.json").write_text(text)
    Strategy.load(tmp_path / "strategy.json").validate(vgg_a(classes=10, resolution=64, width=0.25), 4)


@pytest.mark.mpi(min_size=1)
def test_readme_example_trains(capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```", (DOCS.parent / "README.md").read_text(), flags=re.M | re.S)
    assert len(code.strip().splitlines()) <= 18
    space: dict = {}
    exec(compile(code, "README.md", "exec"), space)
    losses = space["losses"]
    assert losses[-1] < 0.7 * losses[0]
    said = f"loss {losses[0]:.4f} -> {losses[-1]:.4f}\n"
    assert capsys.readouterr().out == ("" if MPI.COMM_WORLD.rank else said)


@pytest.mark.mpi(min_size=1)
def test_ten_lines_of_the_first_page_train(shared, monkeypatch):
    monkeypatch.chdir(shared)
    (code,) = blocks("index.md")
    assert len(code.strip().splitlines()) == 10
    space: dict = {}
    exec(compile(code, "index.md", "exec"), space)
    losses = [*space["run"].losses.values()]
    assert losses[-1] < losses[0]
    with h5py.File(shared / "predicted.h5") as file:
        assert file["prediction"].shape == (1, 64, 64, 1)
