"""The code in the documentation runs."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.M | re.S)


@pytest.mark.mpi(min_size=1)
def test_custom_layer_tutorial():
    """All blocks of the page, one after the other, on the ranks of this run."""
    found = blocks("custom_layers.md")
    assert len(found) == 4
    space: dict = {"__name__": "tutorial"}
    for code in found:
        exec(compile(code, "custom_layers.md", "exec"), space)


@pytest.mark.mpi(min_size=1)
def test_readme_example_trains():
    (code,) = re.findall(r"^```python\n(.*?)^```", (DOCS.parent / "README.md").read_text(), flags=re.M | re.S)
    assert len(code.strip().splitlines()) <= 16
    space: dict = {}
    exec(compile(code, "README.md", "exec"), space)
    losses = space["losses"]
    assert losses[-1] < 0.7 * losses[0]
