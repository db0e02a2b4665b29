"""What a profile found: a machine file, and beside it what a machine file has no room for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from halograd.documents import read_json, shown_path
from halograd.errors import UserError
from halograd.files import write_whole
from halograd.perfmodel.machine import Machine, Runtime
from halograd.perfmodel.profile.fit import Fit
from halograd.schema import STRICT, Count, NotNegative, build

__all__ = ["Profile", "record_path"]

_VERSION = 1
_BY_LEVEL = ("channel", "face", "strided")
_BY_RANKS = ("reduction", "reduction_behind", "reduction_exposed")


def record_path(machine_file: str | Path) -> Path:
    """The record that belongs to a machine file: ``machine.toml`` -> ``machine.profile.json``."""
    return Path(machine_file).with_suffix(".profile.json")


@dataclass(frozen=True)
class Profile:
    """Measured times of messages and overheads, by the library's own communicator.

    Attributes
    ----------
    machine
        With what was measured put in.
    ranks, transport
        Of the run that measured.
    channel
        Level ("node", "across") -> messages both ways between pairs, without packing.
    face, strided
        Level -> exchanges of faces, packed and unpacked: rows that are contiguous, and columns.
    copy
        Copies within memory.
    reduction
        Ranks -> all-reduce that is waited for.
    reduction_behind
        Ranks -> all-reduce behind computation, from start to arrival; as `reduction` where nothing happens behind.
    reduction_exposed
        Ranks -> what ``finish`` takes however long was computed since ``start``.
    update
        Optimizer (SGD with momentum) per byte of parameters [s/B].
    layer_overhead
        What each forward or backward of a layer takes longer within a step: the loop, and colder code [s].
    """

    machine: Machine
    ranks: int
    transport: str
    channel: Mapping[str, Fit] = field(default_factory=dict)
    face: Mapping[str, Fit] = field(default_factory=dict)
    strided: Mapping[str, Fit] = field(default_factory=dict)
    copy: Fit | None = None
    reduction: Mapping[int, Fit] = field(default_factory=dict)
    reduction_behind: Mapping[int, Fit] = field(default_factory=dict)
    reduction_exposed: Mapping[int, Fit] = field(default_factory=dict)
    update: float = 0.0
    layer_overhead: float = 0.0

    def with_overheads(self, update: float, layer_overhead: float) -> Profile:
        """With what the executor adds, which goes into the machine file with the sums that were measured.

        Parameters
        ----------
        update, layer_overhead
            See the attributes.
        """
        sums = {ranks: fit.link("all-reduce") for ranks, fit in self.reduction.items()}
        work = {ranks: fit.link("made where it is waited for") for ranks, fit in self.reduction_exposed.items()}
        runtime = Runtime(update, layer_overhead, packed=True, sums=sums, work=work)
        machine = replace(self.machine, runtime=runtime)
        return replace(self, machine=machine, update=update, layer_overhead=layer_overhead)

    def pack(self, level: str = "node", strided: bool = False) -> float:
        """What packing and unpacking adds to a message, per byte [s/B]; 0 where it was not measured.

        The links of the measured machine have the contiguous part in them, an emulated network does not.
        """
        packed = (self.strided if strided else self.face).get(level)
        bare = self.channel.get(level)
        return max(0.0, packed.beta - bare.beta) if packed and bare else 0.0

    def save(self, path: str | Path) -> None:
        """Write the machine file `path` and the record beside it.

        Raises
        ------
        UserError
            If they cannot be written.
        """
        try:
            self.machine.save(path)
            write_whole(record_path(path), json.dumps(self.to_dict(), indent=1) + "\n")
        except OSError as error:
            raise UserError(
                f"--out {path}: expected a path that can be written, got an error ({error.strerror}); choose another"
            ) from error

    @classmethod
    def load(cls, machine_file: str | Path) -> Profile:
        """Read what `save` wrote.

        Raises
        ------
        UserError
            If there is no machine file or no record beside it, or one of them is damaged.
        """
        machine, path = Machine.load(machine_file), record_path(machine_file)
        return cls.from_dict(machine, read_json(path, "profile"), f"profile {shown_path(path)}")

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, without the machine."""
        fits = {k: _out(getattr(self, k)) for k in (*_BY_LEVEL, *_BY_RANKS)}
        numbers = {k: getattr(self, k) for k in ("ranks", "transport", "update", "layer_overhead")}
        return {"version": _VERSION, **numbers, "copy": self.copy and self.copy.to_dict(), **fits}

    @classmethod
    def from_dict(cls, machine: Machine, data: object, source: str = "profile") -> Profile:
        """What `to_dict` gave; `source` is named in errors, as of `load`."""
        try:
            record = build(_Record, data, source)
        except UserError as error:
            raise UserError(f"{error}; run `halograd profile` again") from None
        return cls(machine, **{key: value for key, value in vars(record).items() if key != "version"})


@dataclass(frozen=True)
class _Record:
    """What a file has of a profile."""

    __pydantic_config__ = STRICT

    version: Literal[1]
    ranks: Count
    transport: str
    update: NotNegative
    layer_overhead: NotNegative
    copy: Fit | None
    channel: dict[str, Fit]
    face: dict[str, Fit]
    strided: dict[str, Fit]
    reduction: dict[Count, Fit]
    reduction_behind: dict[Count, Fit]
    reduction_exposed: dict[Count, Fit]


def _out(fits: Mapping[Any, Fit]) -> dict[str, Any]:
    return {str(key): fit.to_dict() for key, fit in fits.items()}
