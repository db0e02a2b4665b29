"""Registries: built-in classes, classes of installed packages, and classes in a file of the user."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest

from halograd.errors import UserError
from halograd.registry import Registry
from halograd.schema import STRICT, Below1


class Filter(ABC):
    name = ""

    @abstractmethod
    def apply(self, x): ...


@dataclass(frozen=True)
class Scale(Filter):
    __pydantic_config__ = STRICT
    name = "scale"
    factor: Below1 = 0.5

    def apply(self, x):
        return self.factor * x


@pytest.fixture
def filters():
    made = Registry("filter", Filter, "data.filter")
    made.register(Scale)
    return made


OWN = """
from dataclasses import dataclass
from tests.test_registry import Filter

class Shift(Filter):
    @dataclass(frozen=True)
    class Settings:
        by: int = 1
    def apply(self, x):
        return x + 1

class Nothing(Filter):
    pass

class Other:
    pass
"""


def test_a_class_has_a_name_and_settings(filters):
    assert filters["scale"] is Scale and "scale" in filters and filters.names == ("scale",)
    assert filters.settings("scale", {"factor": 0.25}) == Scale(0.25)
    with pytest.raises(UserError, match=r"run.toml: data.filter.factor: expected .* got 2"):
        filters.settings("scale", {"factor": 2}, "data.filter", "run.toml")
    with pytest.raises(UserError, match=r"expected scale, or .*scales.*; did you mean scale\?"):
        filters["scales"]


def test_a_name_is_taken_once(filters):
    assert filters.register(Scale) is Scale
    with pytest.raises(ValueError, match="not taken"):
        filters.register(type("Again", (Filter,), {"name": "scale"}))
    filters.register_later("later", lambda: Scale)
    with pytest.raises(ValueError, match="not taken"):
        filters.register(type("Earlier", (Filter,), {"name": "later"}))
    with pytest.raises(ValueError, match="without ':'"):
        filters.register(type("Named", (Filter,), {"name": "a:b"}))


def test_a_class_in_a_file_of_the_user(filters, tmp_path):
    path = tmp_path / "filters.py"
    path.write_text(OWN)
    assert filters[f"{path}:Shift"]().apply(1) == 2
    assert filters.settings(f"{path}:Shift", {"by": 3}).by == 3
    for name, message in [
        ("Nothing", "defines apply"),
        ("Other", "derived from Filter"),
        ("Shft", "expected a class 'Shft' .* got Shift, Nothing, Other"),
    ]:
        with pytest.raises(UserError, match=f"^data.filter: .*{message}"):
            filters[f"{path}:{name}"]
    with pytest.raises(UserError, match="expected a Python file"):
        filters[f"{tmp_path}/none.py:Shift"]


def test_a_class_of_an_installed_package(filters, monkeypatch):
    points = [EntryPoint("half", "tests.test_registry:Scale", "halograd.filter")]
    points.append(EntryPoint("gone", "no_such_package:Scale", "halograd.filter"))
    monkeypatch.setattr("halograd.registry.entry_points", lambda group: points if group == "halograd.filter" else [])
    assert filters.names == ("scale", "half", "gone") and filters["half"] is Scale
    with pytest.raises(UserError, match="cannot be imported: ModuleNotFoundError"):
        filters["gone"]
