"""Registries of extensions: one registry per kind, in which each extension is a class with a name."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from pydantic import GetCoreSchemaHandler, TypeAdapter
from pydantic_core import core_schema

from .documents import shown
from .errors import UserError
from .schema import build, nearest
from .user_code import SCRIPT, describe, is_location, load

__all__ = ["Chosen", "Registry"]

Kind = TypeVar("Kind")


class Registry(Generic[Kind]):
    """Registry of the classes of one kind by name: those of the library, of users, and of installed packages. Local. ::

        CODECS = Registry("codec", Codec, key="reduction.payload")

        @CODECS.register
        @dataclass(frozen=True)
        class BFloat16(Codec):       # in the library
            name = "bfloat16"

        CODECS["bfloat16"]           # this class
        CODECS["codec.py:Mine"]      # a class in a file or module of the user, which needs no registration
        CODECS["mine"]               # one of an installed package, by its entry point in the group "halograd.codec"

    The settings of a class are its fields: it is a frozen dataclass with ``__pydantic_config__ = STRICT``, or it has
    such a class as its attribute ``Settings``.

    Parameters
    ----------
    kind
        Name of the kind, for messages and for the group of entry points.
    base
        Base class of the registered classes.
    key
        Entry of the configuration that names a class, for messages.
    """

    def __init__(self, kind: str, base: type[Any], key: str) -> None:
        self.kind, self.base, self.key = kind, base, key
        self._classes: dict[str, type[Kind]] = {}
        self._later: dict[str, Callable[[], type[Kind]]] = {}
        self._objects: dict[str, Any] = {}

    def register(self, cls: type[Kind]) -> type[Kind]:
        """Add a class under its attribute `name`; return the class. Raises ValueError if another class has the name."""
        name = getattr(cls, "name", "")
        if not isinstance(name, str) or not name or is_location(name):
            raise ValueError(f"{cls.__name__}.name: expected a string without ':', got {name!r}")
        if self._classes.get(name, cls) is not cls or name in self._later:
            other = self._classes[name].__name__ if name in self._classes else "a class of halograd"
            raise ValueError(f"{self.kind} {name!r}: expected a name that is not taken, got that of {other}")
        self._classes[name] = cls
        return cls

    def register_later(self, name: str, load: Callable[[], type[Kind]]) -> None:
        """Add a class that `load` imports at first use: its module loads libraries that most runs do not need."""
        if self._classes.get(name) is not None or name in self._later:
            raise ValueError(f"{self.kind} {name!r}: expected a name that is not taken")
        self._later[name] = load

    def give(self, value: Any) -> str:
        """Register a class, or an object, that a script has made; return its name for a configuration. Local.

        Every rank calls it. The name is known in this process only. Every :meth:`make` returns a copy of an object.
        """
        kind = value if isinstance(value, type) else type(value)
        if not issubclass(kind, self.base):
            raise UserError(f"{self.key}: expected a {self.base.__name__}, or a class derived from it, got {value!r}")
        name = f"{SCRIPT}:{kind.__name__}"
        # Another class or object of this name stays known, because an earlier configuration may name it.
        while self._objects.get(name, value) is not value:
            name += "_"
        self._objects[name] = value
        return name

    @cached_property
    def _installed(self) -> Mapping[str, EntryPoint]:
        # Reads the metadata of all installed packages, so this waits until a name is needed.
        return {point.name: point for point in entry_points(group=f"halograd.{self.kind}")}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the registered classes, then those of installed packages."""
        return tuple(dict.fromkeys([*self._classes, *self._later, *self._installed]))

    def __contains__(self, name: object) -> bool:
        """Return whether `name` is registered or installed, or has the form of a location."""
        return isinstance(name, str) and (name in self.names or is_location(name))

    def __getitem__(self, name: str) -> type[Kind]:
        return self.find(name)

    def find(self, name: str, at: str = "") -> type[Kind]:
        """Return the class of this name, or at this location. Local.

        `at` is the name of the entry in messages (an option of a command, ...), by default `key`.

        Raises
        ------
        UserError
            If there is no such class, if it cannot be imported, is abstract, or is not derived from `base`.
        """
        at = at or self.key
        if name in self._classes:
            return self._classes[name]
        # Not kept in `_classes`: Python imports a module once, so every call returns the same class.
        if name in self._later:
            return self._later[name]()
        if name in self._objects:
            entry = self._objects[name]
            return self._checked(entry if isinstance(entry, type) else type(entry), name, at)
        # It has the form of a location, but names no file: it was made by another script.
        if name.startswith(f"{SCRIPT}:"):
            raise UserError(
                f"{at}: {name.partition(':')[2]!r} was made by a script, and is known only there (halograd.fit); use it"
                f' there, or name another by --set {at}=..., as "FILE.py:CLASS" for one of your own'
            )
        if is_location(name):
            return self._checked(load(name, at, "class"), name, at)
        if name in self._installed:
            try:
                kind = self._installed[name].load()
            except Exception as error:
                raise UserError(f"{at}: {shown(name)} cannot be imported: {describe(error)}") from error
            return self._checked(kind, name, at)
        expected = f'{", ".join(self.names)}, or "FILE.py:CLASS"'
        raise UserError(f"{at}: expected {expected}, got {shown(name)}{nearest(name, self.names)}")

    def _checked(self, kind: Any, name: str, at: str) -> type[Kind]:
        if not (isinstance(kind, type) and issubclass(kind, self.base)):
            raise UserError(f"{at}: {name}: expected a class derived from {self.base.__name__}, got {kind!r}")
        missing = sorted(getattr(kind, "__abstractmethods__", ())) if inspect.isabstract(kind) else []
        if missing:
            raise UserError(f"{at}: {name}: expected a class that defines {', '.join(missing)}")
        return kind

    def make(self, text: str, at: str = "") -> Kind:
        """Return the object that a string names, with its settings: ``NAME`` or ``NAME:key=value,key=value``. Local. ::

            TRANSPORTS.make("emulated:alpha=1e-3,beta=1e-9")
            CODECS.make("half.py:Half:scale=1024")

        A value is a number, ``true`` or ``false``, else a string. `at` is the name of the entry in messages, by default
        `key`. Raises UserError for an unknown name, and for settings that its class does not permit.
        """
        at = at or self.key
        if text in self._objects and not isinstance(self._objects[text], type):
            # A copy, because objects such as metrics have state, and a run may make several.
            return copy.deepcopy(self._objects[text])
        name, values = _split(text)
        # A string such as `mpi:4` would otherwise be searched as `4` in a module `mpi`.
        head = name.partition(":")[0]
        if head in self.names and head != name:
            raise UserError(f'{at}: expected settings of {head} as in "{head}:key=value,key=value", got {shown(text)}')
        cls = self.find(name, at)
        has_settings = dataclasses.is_dataclass(cls) and len(dataclasses.fields(cls)) > 0
        if values and not has_settings:
            raise UserError(f"{at}: expected {name}, which has no settings, got {shown(text)}; remove them")
        return build(cls, values, at=at) if has_settings else cls()

    def settings_class(self, name: str) -> type[Any]:
        """Return the class of the settings: the attribute ``Settings`` of the class of this name, else the class."""
        cls = self[name]
        return getattr(cls, "Settings", cls)

    def settings(self, name: str, values: Mapping[str, Any], at: str = "", source: str = "") -> Any:
        """Build the settings of the class of this name from plain data. Local.

        `at` is the entry of the configuration that has the values, `source` its file. Raises UserError as
        :func:`halograd.schema.build` does.
        """
        return build(self.settings_class(name), dict(values), source, at)


def _split(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the settings of a string.

    >>> _split("half.py:Half:scale=1024,signed=true")
    ('half.py:Half', {'scale': 1024, 'signed': True})
    >>> _split("half.py:Half"), _split("mpi")
    (('half.py:Half', {}), ('mpi', {}))
    """
    # The last colon begins the settings; a location has another one before it.
    name, _, rest = text.rpartition(":")
    if "=" not in rest or not name:
        return text, {}
    pairs = (item.partition("=") for item in rest.split(","))
    return name, {key.strip(): _value(value.strip()) for key, _, value in pairs}


def _value(text: str) -> Any:
    # In this order: `int` refuses 1e-3, and `float` would turn 4 into 4.0.
    for read in (int, float, {"true": True, "false": False}.__getitem__):
        try:
            return read(text)
        except (ValueError, KeyError):
            continue
    return text


class Chosen:
    """Type of a table whose key ``kind`` names a class of a registry: ``Annotated[Base, Chosen(OPTIMIZERS)]``. Local.

    The built object is an instance of the settings of that class; its field `kind` is the name.

    Parameters
    ----------
    registry
        Registry of the classes. Its `key` is the entry that has the name, ``"optimizer.kind"``.
    default
        Name if the table has no key ``kind``; None: the key is required.
    """

    def __init__(self, registry: Registry[Any], default: str | None = None) -> None:
        self.registry, self.default = registry, default

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        # The class is known only when a table is read, so there is no schema of its fields here.
        return core_schema.no_info_plain_validator_function(self._settings)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        tables = []
        for kind, names in self.tables.items():
            table = TypeAdapter(kind).json_schema()
            table = _without_references(table, table.get("$defs", {}))
            table["properties"]["kind"]["enum"] = list(names)
            tables.append(table)
        return {"oneOf": tables}

    @property
    def tables(self) -> dict[type[Any], tuple[str, ...]]:
        """Classes of settings, each with the names of the registered classes that use it."""
        tables: dict[type[Any], tuple[str, ...]] = {}
        for name in self.registry.names:
            kind = self.registry.settings_class(name)
            tables[kind] = (*tables.get(kind, ()), name)
        return tables

    def _settings(self, table: Any) -> Any:
        at = self.registry.key.removesuffix(".kind")
        if not isinstance(table, Mapping):
            raise UserError(f"{at}: expected a table, got {shown(table)}")
        kind = table.get("kind", self.default)
        if kind is None:
            raise UserError(f"{at}.kind: expected a value, got nothing; this key is required")
        if not isinstance(kind, str):
            raise UserError(f"{at}.kind: expected a text in quotes, got {shown(kind)}")
        return self.registry.settings(kind, {**table, "kind": kind}, at)


def _without_references(schema: Any, tables: Mapping[str, Any]) -> Any:
    """Return a JSON schema with its tables in place of references, because another schema will contain it."""
    if isinstance(schema, list):
        return [_without_references(part, tables) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _without_references(tables[schema["$ref"].rpartition("/")[2]], tables)
    return {key: _without_references(part, tables) for key, part in schema.items() if key != "$defs"}
