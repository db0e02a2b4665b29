"""The examples run as described in their first lines."""

import json
import os
import re
from pathlib import Path

import pytest

from halograd.data.mesh_tangling import generate
from halograd.models import build
from halograd.training.config import load_config
from tests.launch import mpiexec


@pytest.mark.parametrize("ranks", [1, 4])
def test_heat_equation_is_that_of_one_process(ranks):
    done = mpiexec(ranks, ["-m", "examples.heat_equation"])
    assert done.returncode == 0, done.stderr
    assert f"{ranks} ranks, 100 steps: largest difference from one process 0" in done.stdout


def test_training_by_hand_is_that_of_one_process():
    done = {ranks: mpiexec(ranks, ["-m", "examples.train_by_hand", "--list"]) for ranks in (1, 3)}
    assert [one.returncode for one in done.values()] == [0, 0], done
    found = [re.findall(r"(\d) ranks: loss (.*) after", one.stdout)[0] for one in done.values()]
    (alone, losses), (many, others) = found
    assert (alone, many, losses) == ("1", "3", others)
    first, last = map(float, losses.split(" -> "))
    assert last < first / 20
    listing = done[3].stdout.splitlines()
    for operation in ("start halo", "conv_forward", "start sum", "finish sum", "update bucket 0"):
        assert any(operation in line for line in listing), operation


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_first_day(tmp_path, ranks):
    """A torch U-Net is imported and trained on forty files with missing values; its export has the same outputs."""
    for name in ("torch", "onnxscript", "onnxruntime", "safetensors"):
        pytest.importorskip(name, reason="needs torch as oracle: pip install 'halograd[oracle]'")
    done = mpiexec(ranks, ["-m", "examples.first_day", str(tmp_path / "day")])
    assert done.returncode == 0, done.stderr
    first, best = map(
        float, re.findall(r"held-out IoU ([\d.]+) after the first epoch, ([\d.]+) at best", done.stdout)[0]
    )
    (difference,) = re.findall(r"torch and halograd differ by ([\de.+-]+) in logits", done.stdout)
    assert 0.5 < first <= best <= 1 and float(difference) < 1e-4
    assert "data.invalid: 4 of 160 samples are left out" in done.stderr + done.stdout
    assert (tmp_path / "day/run/checkpoints/best.h5").exists() and (tmp_path / "day/unet.onnx").exists()


#: Double of MLflow that records its calls.
MLFLOW = """
import json, sys

def __getattr__(name):
    def call(*given, **options):
        with open(CALLS, "a") as file:
            file.write(json.dumps([name, given, options]) + chr(10))
    return call
"""


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_tracking(tmp_path, ranks):
    """The tracking example records every score of every epoch and the best checkpoint, from one rank."""
    calls = tmp_path / "calls.jsonl"
    (tmp_path / "mlflow.py").write_text(f"CALLS = {str(calls)!r}\n" + MLFLOW)
    generate(tmp_path / "mesh.h5", resolution=32, samples=12)
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])}
    done = mpiexec(ranks, ["-m", "examples.tracking", str(tmp_path / "mesh.h5"), str(tmp_path / "run")], 240, env)
    assert done.returncode == 0, done.stderr
    called = [json.loads(line) for line in calls.read_text().splitlines()]
    assert [name for name, *_ in called].count("start_run") == 1
    assert called[1] == ["log_params", [{"epochs": 3, "batch": 4}], {}]
    metrics = [(given[0], options["step"]) for name, given, options in called if name == "log_metrics"]
    steps = [step for values, step in metrics if "loss" in values]
    ends = [step for values, step in metrics if "validation loss" in values]
    assert len(ends) == 3 and steps == list(range(2, ends[-1] + 1, 2))
    (*_, best) = [given for name, given, _ in called if name == "log_artifact"]
    assert Path(best[0]).exists() and best[1] == "best"


@pytest.mark.nightly
def test_notebook(monkeypatch):
    """All cells of the notebook run in sequence; its run becomes better, and its pictures are drawn."""
    matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib, which the picture of the notebook takes")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    notebook = json.loads((Path(__file__).parents[1] / "examples/first_steps.ipynb").read_text(encoding="utf-8"))
    shown, space = [], {}
    monkeypatch.setattr(plt, "show", lambda: (shown.append(len(plt.gcf().axes)), plt.close("all")))
    for cell in notebook["cells"]:
        assert not cell.get("outputs")
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "first_steps.ipynb", "exec"), space)
    assert shown == [1, 2] and space["run"].history["loss"][-1] < space["run"].history["loss"][0]
    assert space["found"].shape == (64, 64) and 0 <= space["found"].min() <= space["found"].max() <= 1


def test_configuration_is_valid():
    config = load_config(Path(__file__).parent.parent / "examples" / "mesh.toml")
    network = build(config.model.name, **config.model.options)
    assert network.outputs["prediction"].shape == (16, 16, 1)
