"""The code in the documentation runs."""

import re
from pathlib import Path

import pytest
from mpi4py import MPI

from halograd.layers import Strategy
from halograd.models import vgg_a

DOCS = Path(__file__).parent.parent / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.M | re.S)


@pytest.mark.mpi(min_size=1)
def test_custom_layer_tutorial():
    """All blocks of the page, one after the other, on the ranks of this run."""
    found = blocks("custom_layers.md")
    assert len(found) == 5
    space: dict = {"__name__": "tutorial"}
    for code in found:
        exec(compile(code, "custom_layers.md", "exec"), space)


def test_the_strategy_with_cut_channels_fits_its_network(tmp_path):
    (text,) = re.findall(r"^```json\n(.*?)^```", (DOCS / "architecture.md").read_text(), flags=re.M | re.S)
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
