"""Tests of runs that start with given weights, on any number of ranks, and of exports of a run."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest

import halograd as hg
from halograd.cli.run import run
from halograd.data import ChannelStatistics
from halograd.errors import UserError
from halograd.exporting import export_run
from halograd.interchange import load_weights, save_weights
from halograd.models import build
from halograd.training.checkpoint import read_header
from halograd.training.directory import checkpoint_of
from halograd.training.run import train
from tests.interchange.support import predicted
from tests.training.runs import write_config, write_own, write_shared

safetensors = pytest.importorskip("safetensors", reason="needs safetensors: pip install 'halograd[interchange]'")
onnx = pytest.importorskip("onnx", reason="needs onnx: pip install 'halograd[interchange]'")

MODEL = {"resolution": 16, "channels": 3, "widths": [4, 6], "convs": 1, "decoder": True, "pos_weight": 2.0}
STAY = ["schedule.warmup_start=0", "schedule.learning_rate=1e-30", "training.epochs=2", "optimizer.weight_decay=0"]
NET = """
import halograd as hg


def build():
    net = hg.onnx.load("net.onnx")
    logits = net.outputs["prediction"]
    target = hg.Input(logits.shape, "target")
    return hg.Network({"prediction": logits, "loss": hg.BinaryCrossEntropyWithLogits()(logits, target)})
"""


def _latest(folder) -> dict[str, np.ndarray]:
    """Return the parameters of the last checkpoint."""
    found: dict[str, np.ndarray] = {}

    def note(name, entry):
        if isinstance(entry, h5py.Dataset):
            found[name] = entry[()]

    with h5py.File(checkpoint_of(folder / "out" / "checkpoints" / "latest.h5")) as file:
        file["params"].visititems(note)
    return found


def _drawn_by(seed: int) -> tuple[hg.Network, dict[str, np.ndarray]]:
    network = build("mesh", **MODEL)
    return network, network.initial_values(seed)


def _write_weights(comm, folder) -> tuple[dict[str, np.ndarray], str]:
    """Write the files of a run and a file of weights; return the weights and the override with its name. Collective."""
    network, arrays = _drawn_by(99)
    if comm.rank == 0:
        save_weights(network, arrays, folder / "w.safetensors")
    write_shared(comm, folder)
    return arrays, f'training.init="{folder / "w.safetensors"}"'


@pytest.mark.ranks(1, 2, 4)
def test_a_run_begins_with_the_weights_of_a_file(comm, shared):
    """A step with learning rate 0 keeps the weights of a file; layers in `init_fresh` have the values of the seed."""
    arrays, init = _write_weights(comm, shared)
    sets = [*STAY, init, 'training.init_fresh=["predict"]']
    cut = "strategy.height=2" if comm.size > 1 else "strategy.height=1"
    train(shared / "run.toml", [*sets, cut], comm=comm)
    _, others = _drawn_by(7)  # the seed of the run
    if comm.rank == 0:
        for name, array in _latest(shared).items():
            np.testing.assert_allclose(
                array, (others if "predict" in name else arrays)[name], rtol=1e-12, atol=1e-25, err_msg=name
            )


def test_a_run_begins_with_weights_from_the_command_line(tmp_path, capsys):
    network, arrays = _drawn_by(99)
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    save_weights(network, arrays, tmp_path / "w.safetensors")
    sets = [word for one in STAY for word in ("--set", one)]
    config = str(write_config(tmp_path))
    assert run(["train", config, "--init", str(tmp_path / "w.safetensors"), *sets]) == 0
    for name, array in _latest(tmp_path).items():
        np.testing.assert_allclose(array, arrays[name], rtol=1e-12, atol=1e-25, err_msg=name)
    assert run(["train", config, "--set", 'training.init_fresh=["predict"]']) == 2
    assert "init_fresh: expected a file of weights (init) with it, got none" in capsys.readouterr().err


@pytest.mark.ranks(1, 2)
def test_a_run_that_is_resumed_does_not_read_the_file(comm, shared):
    _, init = _write_weights(comm, shared)
    train(shared / "run.toml", ["training.epochs=1", init], comm=comm)
    comm.barrier()
    if comm.rank == 0:
        (shared / "w.safetensors").unlink()
    comm.barrier()
    result = train(shared / "run.toml", ["training.epochs=2", init], resume=True, comm=comm)
    assert result["steps"] == 6
    with pytest.raises(UserError, match="expected a safetensors file, got none"):
        train(shared / "run.toml", [init, f'output.directory="{shared / "other"}"'], comm=comm)


@pytest.mark.ranks(1, 2, 4)
def test_a_network_of_a_file_trains_and_goes_on_under_another_cut(comm, working):
    """A network from `hg.onnx.load` in a user function starts with the file's weights; another cut resumes the run."""
    network, arrays = _drawn_by(99)
    if comm.rank == 0:
        bare = hg.Network({"prediction": network.outputs["prediction"]})
        hg.onnx.save(bare, arrays, working / "net.onnx", dtype="float64")
        write_own(working, NET)
    comm.barrier()
    cut = "strategy.height=2" if comm.size > 1 else "strategy.height=1"
    train(working / "run.toml", [*STAY, "training.epochs=1", cut], comm=comm)
    comm.barrier()
    if comm.rank == 0:
        found = _latest(working)
        imported = hg.onnx.load(working / "net.onnx")
        for name, array in imported.initial_values().items():
            if name in found:
                np.testing.assert_allclose(found[name], array, rtol=1e-12, atol=1e-25, err_msg=name)
        assert sum(a.size for a in found.values()) == sum(p.size for p in network.parameters().values())
    result = train(working / "run.toml", [*STAY, f"strategy.width={min(comm.size, 2)}"], resume=True, comm=comm)
    assert result["steps"] == 6


@pytest.mark.ranks(2)
def test_files_that_differ_between_ranks_are_refused(comm, working):
    network, arrays = _drawn_by(comm.rank)
    folder = working / str(comm.rank)
    folder.mkdir()
    bare = hg.Network({"prediction": network.outputs["prediction"]})
    hg.onnx.save(bare, arrays, folder / "net.onnx")
    if comm.rank == 0:
        net = NET.replace('"net.onnx"', 'f"{MPI.COMM_WORLD.rank}/net.onnx"')
        write_own(working, f"from mpi4py import MPI\n{net}")
    comm.barrier()
    with pytest.raises(
        UserError, match=r"model: expected initial values from net.onnx \w{8} as on rank 0, got net.onnx"
    ):
        train(working / "run.toml", ["strategy.height=2"], comm=comm)


def test_a_run_is_exported_with_its_normalization(tmp_path, capsys):
    write_config(tmp_path)
    from mpi4py import MPI

    train(tmp_path / "run.toml", ["training.epochs=1"], comm=MPI.COMM_SELF)
    out = tmp_path / "mesh.onnx"
    assert run(["export", str(tmp_path / "out"), str(out), "--normalize"]) == 0
    assert capsys.readouterr().out == f"{out}: onnx of step 3\n"
    assert run(["export", str(tmp_path / "out"), str(tmp_path / "w.safetensors"), "--to", "safetensors"]) == 0
    progress, _ = read_header(tmp_path / "out" / "checkpoints" / "latest.h5")
    (state,) = progress.normalization.values()
    with safetensors.safe_open(tmp_path / "w.safetensors", "numpy") as weights:
        (kept,) = json.loads(weights.metadata()["normalization"]).values()
    assert kept == {key: state[key] for key in ("mean", "std", "transforms")}
    with h5py.File(tmp_path / "data.h5") as file:
        raw = file["inputs"][:2]
    x = raw.astype(np.float64)
    ChannelStatistics.from_state_dict(state).apply(x)
    network = build("mesh", **MODEL)
    network.begin_with(load_weights(network, tmp_path / "w.safetensors"))
    bare = hg.Network({"prediction": network.outputs["prediction"]})
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'halograd[interchange]'")
    session = runtime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    (found,) = session.run(["prediction"], {"x": np.moveaxis(raw, -1, 1)})
    np.testing.assert_allclose(np.moveaxis(found, 1, -1), predicted(bare, x)["prediction"], rtol=0, atol=1e-4)


def test_what_export_refuses(tmp_path):
    from mpi4py import MPI

    write_config(tmp_path)
    train(tmp_path / "run.toml", ["training.epochs=1"], comm=MPI.COMM_SELF)
    other = tmp_path / "other.onnx"
    other.write_text("a letter")
    with pytest.raises(UserError, match="expected no file there, or a network that halograd wrote, got another"):
        export_run(tmp_path / "out", "onnx", other)
    with pytest.raises(UserError, match="--to: expected one of onnx, safetensors, got 'pickle'"):
        export_run(tmp_path / "out", "pickle", other)
    with pytest.raises(UserError, match="--normalize: expected --to onnx with it"):
        export_run(tmp_path / "out", "safetensors", other, normalize=True)
    assert other.read_text() == "a letter"
    assert export_run(tmp_path / "out", "onnx", tmp_path / "m.onnx", ["model.resolution=32"]) == 3
    shape = onnx.load(str(tmp_path / "m.onnx")).graph.input[0].type.tensor_type.shape
    assert [dim.dim_value for dim in shape.dim] == [0, 3, 32, 32]
    assert export_run(tmp_path / "out", "onnx", tmp_path / "m.onnx") == 3  # our own file is replaced
