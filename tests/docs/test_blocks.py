"""Every code block of every page has a language, and is executed, read or parsed; so are inline commands."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from halograd.cli.commands import app
from halograd.documents import parse_toml
from halograd.layers import Strategy
from halograd.perfmodel.machine import Machine
from halograd.training.config import check_config
from tests.docs.pages import PAGES, ROOT, Block, blocks, commands_of, write_files

# Tests that run the Python of a page, and their ranks.
RUN_BY = {
    "README.md": "tests/test_docs.py",
    "index.md": "tests/test_docs.py",
    "custom_layers.md": "tests/test_docs.py",
    "networks.md": "tests/test_docs.py",
    "torch.md": "tests/test_docs.py",
    "kernels.md": "tests/kernels/test_interface.py",
    "machines.md": "tests/perfmodel/test_machine.py",
    "planners.md": "tests/perfmodel/planners/test_planners_interface.py",
    "first_day.md": "tests/docs/test_first_day.py",
    "extending.md": "tests/training/test_extensions.py",
    "data.md": "test_data_sets_of_other_formats",
    "performance_model.md": "test_a_plan_is_made_and_saved",
}
LANGUAGES = {"python", "toml", "json", "sh", "console", "text"}
LAUNCHERS = {"mpirun", "mpiexec", "srun", "watch"}
#: External programs: a test can neither run them nor check their arguments.
OTHERS = {"apptainer", "apt-get", "cd", "cp", "export", "git", "module", "scancel", "sbatch", "source", "tensorboard"}
#: A configuration with all required keys, to which a page's lines are added.
WHOLE: dict[str, dict[str, Any]] = {
    "model": {"name": "mesh"},
    "data": {"path": "mesh.h5"},
    "optimizer": {"kind": "sgd"},
    "schedule": {"learning_rate": 0.1},
    "training": {"epochs": 1, "batch": 1},
    "output": {"directory": "runs/mesh"},
}


def checked(tables: dict[str, Any], sets: list[str], place: str) -> None:
    """Raise for unknown keys and values in a configuration of these tables, completed by `WHOLE`."""
    whole: dict[str, Any] = {name: dict(table) for name, table in WHOLE.items()}
    for name, table in tables.items():
        if name == "model" and {"file", "torch", "onnx"} & set(table):
            whole["model"] = {}
        whole[name] = whole.get(name, {}) | table if isinstance(table, dict) else table
    check_config(whole, sets, place)


def parsed(words: list[str]) -> Any:
    """Return the context of a ``halograd`` command after parsing; its ``--set`` options are checked too."""
    command: Any = typer.main.get_command(app)
    words = list(words)
    while getattr(command, "commands", None):
        assert words and words[0] in command.commands, f"no command {' '.join(words[:1])!r}"
        command = command.commands[words.pop(0)]
    context = command.make_context("halograd", words)
    init = {"training": {"init": str(context.params["init"])}} if context.params.get("init") else {}
    checked(init, list(context.params.get("sets") or ()), " ".join(words))
    return context


def check_command(words: list[str], folder: Path = ROOT) -> None:
    """Raise unless a command of a page, in a folder, is valid."""
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]
    name = words[0] if words else "cd"
    if name in LAUNCHERS:
        starts = [i for i, word in enumerate(words) if word in ("halograd", "python") or word.endswith("/python")]
        return check_command(words[starts[0] :], folder)
    if Path(name).name == "halograd":
        parsed(words[1:])
    elif name == "make":
        targets = [word for word in words[1:] if "=" not in word]
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets), targets
    elif name == "pip":
        known = parse_toml((ROOT / "pyproject.toml").read_text(encoding="utf-8"), "pyproject.toml")["project"]
        extras = re.findall(r"\[([\w,]+)\]", " ".join(words))
        assert {extra for part in extras for extra in part.split(",")} <= set(known["optional-dependencies"]), words
    elif Path(name).name in ("python", "python3"):
        assert _exists(words[1:], folder), words
    else:
        assert name in OTHERS, f"expected a program that is known here, got {name!r}"


def _exists(words: list[str], folder: Path) -> bool:
    if words[0] == "-m":
        return words[1] == "pytest" or importlib.util.find_spec(words[1]) is not None
    return (folder / words[0]).exists()


def test_every_block_says_its_language():
    wrong = [f"{b.place} {b.language!r}" for b in blocks() if b.language not in LANGUAGES]
    assert not wrong, f"expected a language of {sorted(LANGUAGES)} behind ```, got {wrong}"


def test_the_python_of_every_page_is_run():
    assert {block.page.name for block in blocks("python")} == set(RUN_BY)
    for page, runner in RUN_BY.items():
        assert page in (ROOT / runner).read_text(encoding="utf-8") if "/" in runner else runner in globals()


@pytest.mark.parametrize("block", blocks("toml"), ids=lambda block: block.place)
def test_toml_is_a_configuration_or_a_machine(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_files(block.page.name, tmp_path)
    monkeypatch.chdir(tmp_path)
    tables = parse_toml(block.text, block.place)
    if "devices_per_node" in tables:
        Machine.parse(block.text, block.place)
    elif "topology" in tables:  # optional tables of the machine file on the same page
        machine = next(b for b in blocks("toml") if b.page == block.page and "devices_per_node" in b.text)
        Machine.parse(f"{machine.text}\n{block.text}", block.place)
    else:
        checked(tables, [], block.place)


@pytest.mark.parametrize("block", blocks("json"), ids=lambda block: block.place)
def test_json_is_a_strategy(block: Block, tmp_path: Path):
    (tmp_path / "strategy.json").write_text(block.text)
    Strategy.load(tmp_path / "strategy.json")


@pytest.mark.parametrize("block", blocks("sh", "console"), ids=lambda block: block.place)
def test_commands_can_be_meant(block: Block):
    folder = ROOT
    for words in commands_of(block):
        check_command(words, folder)
        if words[0] == "cd" and (folder / words[1]).is_dir():
            folder /= words[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_within_a_line_can_be_meant(page: Path):
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for found in re.findall(r"`((?:mpirun|mpiexec|halograd|make) [^`]+)`", text.replace("\n", " ")):
        if "..." in found or (found.startswith("mpi") and "halograd" not in found):
            continue
        words = found.split()
        if words[0] == "halograd" and len(words) > 1 and words[1].isupper():
            continue  # `halograd COMMAND --help`
        (line,) = commands_of(Block(page, 0, "sh", found)) if ";" not in found else [words]
        try:
            check_command(line)
        except Exception as error:
            # A command that a sentence only mentions, such as `halograd plan`, lacks its arguments.
            if not re.search("Missing|requires an argument", str(error)):
                raise AssertionError(f"{page.name}: {found}: {error}") from error


@pytest.mark.parametrize(
    "line",
    [
        "halograd trian mesh.toml",
        "halograd train mesh.toml --sets a.b=1",
        "mpirun -n 4 halograd train mesh.toml --set strategy.heigth=4",
        "make tset",
        "pip install 'halograd[orakel]'",
        "python examples/first_week.py",
        "halogard train mesh.toml",
    ],
)
def test_the_check_of_commands_sees_mistakes(line: str):
    with pytest.raises(Exception, match=r"."):
        check_command(next(commands_of(Block(ROOT / "README.md", 1, "sh", line))))


def test_data_sets_of_other_formats(tmp_path, monkeypatch):
    """The page's block about other formats runs with a double of Zarr, which the tests do not install."""
    import numpy as np

    x, target = np.ones((4, 8, 8, 4), np.float32), np.zeros((4, 8, 8, 1), np.float32)
    group = {"run1": {"fields": x, "mask": target}}
    monkeypatch.setitem(sys.modules, "zarr", SimpleNamespace(open=lambda path, mode: group))
    (block,) = (b for b in blocks("python") if b.page.name == "data.md" and "import zarr" in b.text)
    space: dict[str, Any] = {}
    exec(compile(block.text, block.place, "exec"), space)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "t.npy", target)
    for data in (space["open"]("fields.zarr", group="run1"), space["mapped"](tmp_path)):
        assert len(data) == 4 and set(data.fields) == {"x", "target"}


def test_a_plan_is_made_and_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (block,) = (b for b in blocks("python") if b.page.name == "performance_model.md")
    exec(compile(block.text, block.place, "exec"), {})
    assert (tmp_path / "plan.json").exists() and len(capsys.readouterr().out.split()) == 3
