"""Examples in docstrings of the whole library are run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import halograd


def modules_with_examples() -> list[str]:
    """Return the modules of the library whose source contains an interactive example."""
    found = []
    for module in pkgutil.walk_packages(halograd.__path__, "halograd."):
        spec = module.module_finder.find_spec(module.name, None)
        source = spec.loader.get_source(module.name) if spec and hasattr(spec.loader, "get_source") else ""
        found += [module.name] if source and ">>> " in source else []
    return found


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_of_a_module(name: str):
    done = doctest.testmod(importlib.import_module(name))
    assert done.attempted and not done.failed


def test_examples_are_found():
    assert {"halograd.dtensor.box", "halograd.layers.dense", "halograd.documents"} <= set(
        modules_with_examples()
    )
