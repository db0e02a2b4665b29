"""Docstrings are converted to Markdown, and their roles have existing targets."""

from pathlib import Path

import pytest

griffe = pytest.importorskip("griffe", reason="needs mkdocstrings: pip install 'halograd[docs]'")
from docs.generator.docstrings import to_markdown, unresolved_roles  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def package():
    return griffe.load("halograd", search_paths=[str(ROOT)], docstring_parser="numpy", resolve_aliases=True)


def test_what_docstrings_name_is_there(package):
    missing = unresolved_roles(package)
    assert not missing, "expected names of the library in roles, got\n" + "\n".join(missing)


@pytest.mark.parametrize(
    ("text", "target", "shown"),
    [
        (":class:`Stencil`", "halograd.layers.needs.Stencil", "Stencil"),
        (":meth:`lower`", "halograd.layers.convolution.Conv.lower", "lower"),
        (":meth:`input_boxes`", "halograd.layers.layer.Layer.input_boxes", "input_boxes"),
        (":class:`~halograd.comm.Communicator`", "halograd.comm.communicator.Communicator", "Communicator"),
        (":mod:`.flow`", None, ".flow"),
        (":class:`NoSuchThing`", None, "NoSuchThing"),
    ],
)
def test_roles_become_links(package, text, target, shown):
    made, missing = to_markdown(text, package["layers.convolution.Conv"])
    if target is None and missing:
        assert made == f"`{shown}`" and missing == [shown]
    elif target is not None:
        assert made == f'<autoref optional identifier="{target}"><code>{shown}</code></autoref>' and not missing


def test_pictures_and_prompts_become_code(package):
    text = "A halo::\n\n    | a | b |\n\nand\n\n>>> 1 + 1\n2\n\nbehind <it>."
    made, _ = to_markdown(text, package)
    assert " ".join(made.split()) == "A halo: ```text | a | b | ``` and ```pycon >>> 1 + 1 2 ``` behind &lt;it>."
