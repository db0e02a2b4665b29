"""Tests that the example in docs/kernels.md runs, and that its table equals that in the code."""

import re
from pathlib import Path

from halograd.kernels.onednn import DELEGATED

TEXT = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()


def test_the_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    exec(compile(code, "docs/kernels.md", "exec"), {})
    assert capsys.readouterr().out.startswith("numpy:im2col + numpy:relu 0 ")


def test_the_table_is_complete():
    table = re.findall(r"^\| (`.*?`) \|", TEXT, re.M)
    assert set(re.findall(r"`(\w+)`", " ".join(table))) == set(DELEGATED)
