"""Machine files: TOML in which every quantity carries its unit (``"1.2 us"``, ``"16 GiB"``), checked key by key."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from halograd.documents import parse_toml, read_toml, shown, shown_path, to_toml
from halograd.errors import UserError
from halograd.schema import LARGEST, MOST, Count, Table, build

from .machine_parts import FOLDER, LEVELS, MACHINES, Efficiency, Link, Overheads

__all__ = ["UNITS", "format_quantity", "machine_to_toml", "parse_machine", "parse_quantity", "read_machine"]

#: Unit -> the measured quantity, and an example.
UNITS = {
    "s": ("a time", "1.2 us"),
    "s/B": ("a time per byte", "25.7 ps/B"),
    "B": ("a size", "16 GiB"),
    "B/s": ("a bandwidth", "12.5 GB/s"),
    "flop": ("a number of operations", "300 Mflop"),
    "flop/s": ("a rate of operations", "15.7 Tflop/s"),
}
_DECIMAL = {"p": 1e-12, "n": 1e-9, "u": 1e-6, "µ": 1e-6, "m": 1e-3, "": 1.0}
_LARGE = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_PREFIXES = {
    "s": _DECIMAL,
    "s/B": _DECIMAL,
    "B": _LARGE | _BINARY,
    "B/s": _LARGE | _BINARY,
    "flop": _LARGE,
    "flop/s": _LARGE,
}
_QUANTITY = re.compile(r"\s*(?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)\s*(?P<unit>\S*)\s*", re.ASCII)
_LONGEST = 100  # characters


def parse_quantity(text: object, unit: str) -> float:
    """Return the number in `text`, converted to `unit`.

    Parameters
    ----------
    text
        A number and a unit with an optional prefix: ``p n u m`` (or none) before seconds, ``k M G T P`` before
        bytes and operations, ``Ki Mi Gi Ti`` before bytes. The space between the two may be left out.
    unit
        One of `UNITS`: "s", "s/B", "B", "B/s", "flop", "flop/s".

    Returns
    -------
    float
        At least 0, in `unit`.

    Raises
    ------
    ValueError
        If it is not a text, has no unit or a unit of another kind, or is negative.

    Examples
    --------
    >>> parse_quantity("16GiB", "B") == 16 * 2**30
    True
    >>> parse_quantity("15.7 Tflop/s", "flop/s")
    15700000000000.0
    """
    kind, example = UNITS[unit]
    expected = f'expected {kind} with its unit, such as "{example}", got {shown(text)}'
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) and len(text) <= _LONGEST else None
    if match is None:
        raise ValueError(f"{expected}; write a number and a unit in quotes")
    scales = {prefix + unit: scale for prefix, scale in _PREFIXES[unit].items()}
    if match["unit"] not in scales:
        raise ValueError(f"{expected}; the unit must be one of {', '.join(dict.fromkeys(scales))}")
    value = _scaled(float(match["number"]), scales[match["unit"]])
    if value < 0 or not math.isfinite(value):
        raise ValueError(f"{expected}; it must be finite and not negative")
    return value


def _scaled(value: float, scale: float) -> float:
    """Scale a number to base units.

    It divides by 1e6 instead of multiplying by 1e-6: "1.2 us" then becomes exactly the float 1.2e-06.
    """
    return value / round(1 / scale) if scale < 1 else value * scale


def format_quantity(value: float, unit: str) -> str:
    """Return `value` [`unit`] as a text that `parse_quantity` converts back to exactly the same float."""
    return f"{value!r} {unit}" if value != int(value) or value >= 2**53 else f"{int(value)} {unit}"


def _read_as(unit: str) -> BeforeValidator:
    return BeforeValidator(partial(parse_quantity, unit=unit))


# Bounds far beyond any machine: within them no cost overflows or divides by 0.
Seconds = Annotated[float, Field(le=LARGEST), _read_as("s")]
SecondsPerByte = Annotated[float, Field(le=LARGEST), _read_as("s/B")]
Bytes = Annotated[float, Field(ge=1, le=LARGEST), _read_as("B")]
BytesPerSecond = Annotated[float, Field(ge=1 / LARGEST, le=LARGEST), _read_as("B/s")]
Flops = Annotated[float, Field(le=LARGEST), _read_as("flop")]
FlopsPerSecond = Annotated[float, Field(ge=1 / LARGEST, le=LARGEST), _read_as("flop/s")]
Fraction = Annotated[float, Field(ge=1e-6, le=1)]
Ranks = Annotated[int, Field(ge=2, le=MOST)]


class LinkTable(Table):
    """``[links.LEVEL]``: `alpha`, and either `beta` or `bandwidth`."""

    alpha: Seconds
    """Time of a message without bytes."""
    beta: SecondsPerByte | None = None
    """Time per byte."""
    bandwidth: BytesPerSecond | None = None
    """Bandwidth, the inverse of `beta`."""
    note: str = ""
    """Text on the source of the numbers."""
    shared: bool | None = None
    """Whether the link is memory that ranks share, in which no message travels while they compute."""
    emulated: bool | None = None
    """Whether the link is the emulated network, on which messages travel independently of each other."""

    @model_validator(mode="after")
    def _one_of_both(self) -> LinkTable:
        if (self.beta is None) == (self.bandwidth is None):
            got = "neither" if self.beta is None else "both"
            raise ValueError(f'expected one of beta ("25.7 ps/B") and bandwidth ("12.5 GB/s"), got {got}')
        return self

    def link(self) -> Link:
        """Return the link of the cost model."""
        # Files of earlier versions have the transport in the note only.
        shared = self.note.startswith(("shared", "auto")) if self.shared is None else self.shared
        emulated = self.note.startswith("emulated") if self.emulated is None else self.emulated
        beta = (self.beta or 0.0) if self.bandwidth is None else 1 / self.bandwidth
        return Link(self.alpha, beta, self.note, shared, emulated)


class EfficiencyTable(Table):
    """``[device.efficiency]``: the fractions of its peak rates that the device reaches."""

    compute: Fraction
    half: Flops
    exponent: Fraction
    least: Annotated[float, Field(ge=0, le=1)]
    memory: Fraction


class DeviceTable(Table):
    """``[device]``: one device, which is one rank."""

    name: str = ""
    """Name of the product."""
    memory: Bytes
    """Memory of the device, the default limit of a plan."""
    memory_bandwidth: BytesPerSecond
    """Peak bandwidth of the memory."""
    launch: Seconds
    """Minimum time of a kernel."""
    peak_flops: Annotated[dict[str, FlopsPerSecond], Field(min_length=1)]
    """Peak rate of every dtype of plans: ``float32 = "19.5 Tflop/s"``."""
    efficiency: EfficiencyTable


class RuntimeTable(Table):
    """``[runtime]``: overheads of the library itself, as ``halograd profile`` has measured them."""

    update: SecondsPerByte = 0.0
    layer: Seconds = 0.0
    step: Seconds = 0.0
    synchronize: Seconds = 0.0
    packed: bool = False
    sums: dict[Ranks, LinkTable] = Field(default_factory=dict)
    work: dict[Ranks, LinkTable] = Field(default_factory=dict)

    def runtime(self) -> Overheads:
        """Return the overheads of the cost model."""
        sums, work = ({n: table.link() for n, table in found.items()} for found in (self.sums, self.work))
        return Overheads(self.update, self.layer, self.step, self.packed, sums, work, self.synchronize)


class LinksTable(Table):
    """``[links]``: a table for each level at which data travel.

    `device` is a copy on a device; `node` connects two devices of a node; `switch` two nodes of a switch, per adapter;
    `across` any two nodes.
    """

    device: LinkTable
    node: LinkTable
    switch: LinkTable
    across: LinkTable


class MachineTable(Table):
    """A whole machine file."""

    name: Annotated[str, Field(min_length=1)]
    """Name of the machine in tables and pictures."""
    source: Annotated[str, Field(min_length=1)]
    """Text on the source of the numbers."""
    devices_per_node: Count
    """Number of devices per node. A device is one rank: a GPU, or a CPU node or socket with all its cores."""
    nodes_per_switch: Count
    """Number of nodes below one leaf switch."""
    rails: Count = 1
    """Number of network adapters per node that work at the same time."""
    device: DeviceTable
    links: LinksTable
    runtime: RuntimeTable = RuntimeTable()

    def values(self) -> dict[str, Any]:
        """Return the arguments of :class:`~halograd.perfmodel.machine.Machine`."""
        device, links = self.device, self.links
        return {
            "name": self.name,
            "source": self.source,
            "devices_per_node": self.devices_per_node,
            "nodes_per_switch": self.nodes_per_switch,
            "peak_flops": dict(device.peak_flops),
            "memory_bandwidth": device.memory_bandwidth,
            "memory": int(device.memory),
            "launch": device.launch,
            "links": {level: getattr(links, level).link() for level in LEVELS},
            "efficiency": Efficiency(**device.efficiency.model_dump()),
            "rails": self.rails,
            "device": device.name,
            "runtime": self.runtime.runtime(),
        }


def read_machine(name_or_path: str | Path) -> dict[str, Any]:
    """Return the arguments of a machine from its file; see `Machine.load`."""
    path = Path(name_or_path)
    if path.suffix != ".toml":
        if str(name_or_path) not in MACHINES:
            raise UserError(_unknown(str(name_or_path)))
        path = FOLDER / f"{name_or_path}.toml"
    return _values(read_toml(path, "machine"), f"machine {shown_path(path)}")


def parse_machine(text: str, where: str = "machine file") -> dict[str, Any]:
    """Return the arguments of the machine in the TOML `text`; see `Machine.parse`."""
    return _values(parse_toml(text, where), where)


def _values(tables: dict[str, Any], where: str) -> dict[str, Any]:
    return build(MachineTable, tables, where).values()


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, MACHINES, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else "write the path of your own machine file"
    return f"machine: expected one of {', '.join(MACHINES)} or the path of a .toml file, got {shown(name)}; {hint}"


def machine_to_toml(values: Mapping[str, Any]) -> str:
    """Return the text of a machine's file from its arguments; see `Machine.to_toml`.

    Base units are used, so that numbers are read back exactly.
    """
    machine = SimpleNamespace(**values)
    curve = machine.efficiency
    lines = [
        f"name = {to_toml(machine.name)}",
        f"source = {to_toml(machine.source)}",
        f"devices_per_node = {machine.devices_per_node}",
        f"nodes_per_switch = {machine.nodes_per_switch}",
        f"rails = {machine.rails}",
        "",
        "[device]",
        f"name = {to_toml(machine.device)}",
        f"memory = {_value(machine.memory, 'B')}",
        f"memory_bandwidth = {_value(machine.memory_bandwidth, 'B/s')}",
        f"launch = {_value(machine.launch, 's')}",
        "",
        "[device.peak_flops]",
        *(f"{_key(dtype)} = {_value(peak, 'flop/s')}" for dtype, peak in machine.peak_flops.items()),
        "",
        "[device.efficiency]",
        f"compute = {float(curve.compute)!r}",
        f"half = {_value(curve.half, 'flop')}",
        f"exponent = {float(curve.exponent)!r}",
        f"least = {float(curve.least)!r}",
        f"memory = {float(curve.memory)!r}",
    ]
    for level in LEVELS:
        lines += _link(f"links.{level}", machine.links[level])
    return "\n".join(lines + _runtime(machine.runtime)) + "\n"


def _link(table: str, link: Link) -> list[str]:
    lines = ["", f"[{table}]", f"alpha = {_value(link.alpha, 's')}", f"beta = {_value(link.beta, 's/B')}"]
    if not link.note:
        return lines
    flags = (f"{key} = {to_toml(getattr(link, key))}" for key in ("shared", "emulated"))
    return [*lines, f"note = {to_toml(link.note)}", *flags]


def _runtime(runtime: Overheads) -> list[str]:
    if runtime == Overheads():
        return []
    lines = ["", "[runtime]", f"update = {_value(runtime.update, 's/B')}"]
    lines += [f"{key} = {_value(getattr(runtime, key), 's')}" for key in ("layer", "step", "synchronize")]
    lines += [f"packed = {str(runtime.packed).lower()}"]
    for table in ("sums", "work"):
        for ranks, link in getattr(runtime, table).items():
            lines += _link(f"runtime.{table}.{ranks}", link)
    return lines


def _value(value: float, unit: str) -> str:
    return f'"{format_quantity(value, unit)}"'


def _key(text: str) -> str:
    """Return a TOML key, in quotes if necessary."""
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else to_toml(text)
