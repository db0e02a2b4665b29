"""The examples run as their first lines say."""

from pathlib import Path

import pytest

from halograd.models import build
from halograd.training.config import load_config
from tests.launch import mpiexec


@pytest.mark.parametrize("ranks", [1, 4])
def test_heat_equation_is_that_of_one_process(ranks):
    done = mpiexec(ranks, ["-m", "examples.heat_equation"])
    assert done.returncode == 0, done.stderr
    assert f"{ranks} ranks, 100 steps: largest difference from one process 0" in done.stdout


def test_configuration_is_valid():
    config = load_config(Path(__file__).parent.parent / "examples" / "mesh.toml")
    network = build(config.model.name, **config.model.options)
    assert network.outputs["prediction"].shape == (16, 16, 1)
