"""The site builds without broken links, and contains every public name, configuration key, command and page."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import halograd
from halograd.layers import Strategy
from halograd.models import MODELS, options_of
from halograd.perfmodel.machine import MachineTable
from halograd.training.config import Config
from tests.harness.limits import LIMIT

ROOT = Path(__file__).resolve().parents[2]
NEEDS = "needs MkDocs: pip install 'halograd[docs]'"
#: Packages of commands, which `commands.md` documents.
COMMANDS = {"halograd.cli", "halograd.demo", "halograd.report"}

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site, built as `make docs` does it; warnings are errors."""
    for module in ("mkdocs", "material", "mkdocstrings_handlers"):
        pytest.importorskip(module, reason=NEEDS)
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def build(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run MkDocs, without --quiet, which would hide warnings from --strict."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder), *options],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def anchors(page: Path) -> set[str]:
    return set(re.findall(r'\bid="([^"]+)"', page.read_text(encoding="utf-8")))


def inventory(site: Path) -> set[str]:
    """Return the dotted names with an entry in the built site, under all exported paths."""
    data = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split()[0] for line in zlib.decompress(data).decode().splitlines()}


def public_names() -> Iterator[str]:
    """Return the names in ``__all__`` of all packages, or of the modules of a package without one."""
    yield from (f"halograd.{name}" for name in halograd.__all__)
    for module in ("onnx", "testing"):
        yield from (f"halograd.{module}.{n}" for n in importlib.import_module(f"halograd.{module}").__all__)
    for found in pkgutil.walk_packages(halograd.__path__, "halograd."):
        parent = ".".join(found.name.split(".")[:2])
        by_module = parent in ("halograd.lowering", "halograd.perfmodel", "halograd.program")
        if parent in COMMANDS or not (found.ispkg or by_module):
            continue
        above = importlib.import_module(found.name.rpartition(".")[0])
        if found.ispkg or not hasattr(above, "__all__"):
            module = importlib.import_module(found.name)
            yield from (f"{found.name}.{name}" for name in getattr(module, "__all__", ()))


def keys_of(schema: dict[str, Any], before: str = "") -> Iterator[str]:
    """Return the dotted keys of a JSON schema made by pydantic, independently of the reference's code."""

    def inner(node: Any, place: str) -> Iterator[str]:
        for part in node.get("anyOf", ()) or node.get("oneOf", ()):
            yield from inner(part, place)
        if "additionalProperties" in node and isinstance(node["additionalProperties"], dict):
            yield from inner(node["additionalProperties"], f"{place}.NAME")
        reference = node.get("$ref")
        table = schema["$defs"][reference.rpartition("/")[2]] if reference else node
        kind = table.get("properties", {}).get("kind", {})
        several = place in ("optimizer", "schedule") and (kind.get("const") or kind.get("enum", [""])[0])
        for key, field in table.get("properties", {}).items():
            found = list(inner(field, f"{place}.{key}".lstrip(".")))
            yield from found or [".".join(filter(None, (place, several, key)))]

    yield from (f"{before}{key}" for key in inner(schema, ""))


def test_every_public_name_has_an_entry(site):
    names = set(public_names())
    assert len(names) > 350
    missing = names - inventory(site) - {"halograd.__version__"}
    assert not missing, f"expected an entry for every public name, got none for {sorted(missing)}"


def test_every_key_of_a_configuration_is_explained(site):
    from docs.generator import configuration

    keys = set(keys_of(Config.model_json_schema()))
    keys |= set(keys_of(MachineTable.model_json_schema(), "machine."))
    assert {"data.augment.flips", "optimizer.lars.trust", "model.name", "machine.links.node.alpha"} <= keys
    missing = keys - anchors(site / "configuration.html")
    assert not missing, f"expected every key on the page, got none of {sorted(missing)}"
    for table, before in ((Config, ""), (MachineTable, "machine"), (Strategy, "strategy-file")):
        for section in configuration.sections(table, before):
            silent = [key.name for key in section.keys if not key.text]
            assert not silent, f"expected a docstring below every field of {section.heading}, got none for {silent}"


def test_every_option_of_a_model_is_listed(site):
    page = (site / "models.html").read_text(encoding="utf-8")
    by_hand = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    for name in MODELS:
        assert f"<code>{name}</code>" in page
        for option in options_of(name):
            assert f"<code>{option}</code>" in page and f"`{option}`" in by_hand, f"{name}: {option}"


def test_every_command_is_listed(site):
    from docs.generator import commands

    page = (site / "commands.html").read_text(encoding="utf-8")
    found = dict(commands.all_commands())
    assert {"halograd train", "halograd generate mesh-tangling", "halograd plan"} <= set(found)
    for name, command in found.items():
        assert name.replace(" ", "-") in anchors(site / "commands.html")
        for parameter in command.params:
            assert all(f"<code>{word}</code>" in page or f">{word} " in page for word in parameter.opts if "-" in word)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[here](index.md#known)", ""),
        ("[there](no_such_page.md)", "no_such_page.md"),
        ("[there](index.md#no-such-place)", "no-such-place"),
        ("[there](../examples/no_such_file.py)", "no_such_file.py"),
        ("[`Conv`][halograd.no_such_name]", "no_such_name"),
        ("a page that the menu leaves out", "other.md"),
    ],
)
def test_what_leads_nowhere_fails_the_build(tmp_path, text, message):
    """A link without a target in a page makes the build fail; valid links do not."""
    pytest.importorskip("material", reason=NEEDS)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Known {{#known}}\n\n{text}\n")
    if message == "other.md":
        (tmp_path / "docs" / "other.md").write_text("# Other\n")
    (tmp_path / "mkdocs.yml").write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: docs\nnav: [index.md]\nhooks: []\nplugins: [search, autorefs]\n"
    )
    done = build(tmp_path / "site", "--config-file", str(tmp_path / "mkdocs.yml"))
    assert (done.returncode == 0) is (not message), done.stdout + done.stderr
    assert message in done.stderr


def test_nothing_is_loaded_from_elsewhere(site):
    """Pages load scripts, styles, fonts and pictures from the site only, because machines may be offline."""
    found = set()
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        found |= set(re.findall(r'<(?:script|img|iframe)[^>]*\bsrc="?(?:https?:)?//[^">\s]+', text))
        found |= set(re.findall(r'<link[^>]*\bhref="?(?:https?:)?//[^">\s]+', text))
    assert not found, f"expected nothing from the network, got {found}"
    assert (site / "assets" / "iframe-worker.js").exists() and (site / "search" / "search_index.js").exists()


def test_no_sign_of_a_markup_is_left(site):
    """Pages contain no unconverted Sphinx roles, marks of generated parts or literal blocks."""
    for page in site.rglob("*.html"):
        text = re.sub(r"<pre.*?</pre>|<code.*?</code>", "", page.read_text(encoding="utf-8"), flags=re.S)
        found = re.findall(r":(?:class|func|meth|attr|data|mod):|<!-- generated|``|&lt;autoref", text)
        assert not found, f"{page.relative_to(site)}: {set(found)}"
