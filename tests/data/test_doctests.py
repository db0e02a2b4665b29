"""The examples in the docstrings run."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize(("name", "examples"), [("sampler", 1), ("targets", 1), ("verdict", 1)])
def test_examples(name: str, examples: int) -> None:
    result = doctest.testmod(importlib.import_module(f"halograd.data.{name}"))
    assert result.failed == 0 and result.attempted >= examples
