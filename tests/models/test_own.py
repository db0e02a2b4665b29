"""Networks of the user: functions in files and modules, their options, and error messages."""

import os
import sys

import pytest

from halograd.cli.run import run
from halograd.errors import UserError
from halograd.layers import Network
from halograd.models import build
from halograd.models.own import load_function, source_of
from halograd.training.config import parse_config
from tests.training.runs import CONFIG

NET = """
from __future__ import annotations
from collections.abc import Sequence
from typing import TYPE_CHECKING
import halograd as hg
import parts_of_mine

if TYPE_CHECKING:
    from nowhere import Unknown

def build(resolution: int = 16, widths: Sequence[int] = (4, 6), act=None, **others) -> hg.Network:
    x = y = hg.Input((resolution, resolution, 3), name="x")
    for width in widths:
        y = parts_of_mine.block(y, width)
    logits = hg.Conv(1, 1, name="head")(y)
    target = hg.Input(logits.shape, name="target")
    loss = hg.BinaryCrossEntropyWithLogits(name="bce")(logits, target) + 0.5 * hg.Dice()(logits, target)
    return hg.Network({"prediction": logits, "loss": loss}, name=others.get("name", "mine"))

def strict(width: int = 4):
    return build(widths=[width])

def unknown_types(width: Unknown = 4):
    return build(widths=[width])

def nothing():
    pass

def broken():
    return [][1]
"""
PARTS = """
import halograd as hg

def block(x, width):
    return hg.Conv(width, 3, padding=1, activation="relu")(x)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "parts_of_mine.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [n for n in sys.modules if n in ("net", "parts_of_mine") or n.startswith("halograd_own_")]:
        del sys.modules[name]


@pytest.mark.parametrize("where", ["net.py:build", "./net.py:build", "net:build", "net.py:unknown_types"])
def test_a_function_makes_the_network(folder, where):
    network = build(where)
    assert isinstance(network, Network) and network.name == "mine"
    assert network.outputs["prediction"].shape == (16, 16, 1)


def test_options_are_those_of_the_function(folder):
    network = build("net.py:build", resolution=32, widths=[2], act="relu", name="other")
    assert network.inputs["x"].shape == (32, 32, 3) and network.name == "other"
    for options, message in (
        ({"resolution": "32"}, "model.resolution: expected a whole number, got '32'"),
        ({"widths": 3}, "model.widths: expected a list, got 3"),
    ):
        with pytest.raises(UserError, match=message):
            build("net.py:build", **options)
    with pytest.raises(UserError, match=r"model.widths: .*unknown"):
        build("net.py:strict", widths=3)


def test_a_file_is_executed_once_until_it_is_changed(folder):
    before, mark = load_function("net.py:build"), source_of("net.py:build")
    assert load_function(str(folder / "net.py") + ":build") is before
    (folder / "net.py").write_text(NET.replace('"mine"', '"changed"'))
    os.utime(folder / "net.py", ns=(1, 1))
    assert build("net.py:build").name == "changed"
    assert source_of("net.py:build") != mark and mark[0] == "net.py:build"


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("none.py:build", "model.file: expected a Python file, got 'none.py' .no such file or directory.*folder"),
        ("net.py:make", "expected a function 'make' in net.py, got build, strict, unknown_types, nothing, broken"),
        ("net.py:", 'expected "FILE.py:FUNCTION" or "MODULE:FUNCTION"'),
        ("net.py:nothing", "expected a function that returns a halograd.Network, got NoneType"),
        ("net.py:broken", r"failed: IndexError: list index out of range \(.*net.py, line 30\)"),
        ("no_such_module:build", "'no_such_module' cannot be imported: ModuleNotFoundError: No module named"),
        ("syntax.py:build", r"syntax.py cannot be imported: SyntaxError: .*\(syntax.py, line 1\)"),
        (
            "raises.py:build",
            r"raises.py cannot be imported: ZeroDivisionError: division by zero \(.*raises.py, line 2\)",
        ),
    ],
)
def test_mistakes_are_one_line(folder, where, message):
    (folder / "syntax.py").write_text("def build(:\n")
    (folder / "raises.py").write_text("import math\n1 / 0\n")
    with pytest.raises(UserError, match=message) as caught:
        build(where)
    assert "\n" not in str(caught.value)


def test_a_configuration_names_a_model_or_a_file():
    text = CONFIG.format(edge=16, channels=3, data="data.h5", out="out")
    own = text[text.index("[data]") :]
    config = parse_config('[model]\nfile = "net.py:build"\nresolution = 16\n' + own)
    assert config.model.source == "net.py:build" and config.model.options == {"resolution": 16}
    for model, message in (
        ("resolution = 16", 'model.name: expected a model, or file = "net.py:build", got neither'),
        ('name = "mesh"\nfile = "net.py:build"', "model.file: expected no name with it"),
        ('file = "net.py"', 'model.file: expected "FILE.py:FUNCTION" or "MODULE:FUNCTION", got \'net.py\''),
    ):
        with pytest.raises(UserError, match=message):
            parse_config(f"[model]\n{model}\n" + own)


def test_it_is_planned_explained_and_predicted(folder, capsys):
    small = ["net.py:build", "--machine", "lassen", "--batch", "2"]
    assert run(["plan", *small, "--option", "widths=[8]", "--ranks", "4", "-o", "plan.json"]) == 0
    assert run(["explain", "plan.json"]) == 0
    assert run(["predict", *small, "--ranks", "2,4"]) == 0
    assert "mine on 4 ranks of lassen" in capsys.readouterr().out
