"""Machines: the rates of one device, and the time of a message between two devices.

A machine is data. The shipped machines are in ``perfmodel/machines/``; `halograd profile` writes one for the machine
that it runs on. A machine file is TOML, in which every quantity has its unit (``"1.2 us"``, ``"16 GiB"``);
`docs/machines.md` explains how to write one by hand.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from halograd.documents import parse_toml, read_toml, shown, shown_path, to_toml, write_whole
from halograd.errors import UserError
from halograd.schema import MOST, Count, Table, build

from .quantities import Bytes, BytesPerSecond, Flops, FlopsPerSecond, Seconds, SecondsPerByte, format_quantity

__all__ = [
    "FOLDER",
    "LEVELS",
    "MACHINES",
    "SUMS",
    "Efficiency",
    "GroupStage",
    "Link",
    "Machine",
    "MachineTable",
    "Overheads",
    "Protocol",
    "Topology",
    "Variation",
    "expected_maximum",
]

FOLDER = Path(__file__).parent / "machines"
#: Names of the shipped machines.
MACHINES = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))

#: Link levels, nearest first: the same device, the same node, the same switch, anywhere.
LEVELS = ("device", "node", "switch", "across")
#: Times of sums in `Overheads`, by the number of ranks.
SUMS = ("sums", "short_sums", "work")
#: Phases of the kernels of a layer with weights.
PHASES = ("forward", "backward_data", "backward_filter")


@dataclass(frozen=True)
class Link:
    """Link on which one message of n bytes takes ``alpha + beta * n`` [s] (Hockney's model).

    Parameters
    ----------
    alpha
        Start-up time of one message [s].
    beta
        Time per byte [s/B].
    note
        Note on the link: the transport, the kind of cable, the error of a fit.
    shared
        Whether the link is memory that ranks share: messages do not overlap with computation.
    emulated
        Whether the link is the emulated network: messages travel independently of each other.
    """

    alpha: float
    beta: float
    note: str = field(default="", compare=False)
    shared: bool = field(default=False, compare=False)
    emulated: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if not (self.alpha >= 0 and self.beta >= 0):
            raise ValueError(f"link: expected alpha >= 0 s and beta >= 0 s/B, got {self.alpha} and {self.beta}")

    @property
    def bandwidth(self) -> float:
        """Bandwidth of long messages [B/s]; infinite if a byte costs nothing."""
        return 1 / self.beta if self.beta else float("inf")

    def seconds(self, nbytes: float) -> float:
        """Return the time of one message of `nbytes` [B], in [s]."""
        return self.alpha + self.beta * nbytes

    def shared_by(self, messages: float) -> Link:
        """Return the link as seen by each of `messages` equal messages that travel at the same time."""
        return self if messages == 1 else dataclasses.replace(self, beta=self.beta * messages)

    def table(self) -> dict[str, Any]:
        """Return the link as the table of a machine file."""
        return vars(self) | {"alpha": format_quantity(self.alpha, "s"), "beta": format_quantity(self.beta, "s/B")}


class GroupStage(NamedTuple):
    """One level of a group of ranks: `size` members joined by `link`, which belongs to `level`.

    `sharing` is the number of members (of all groups that send at once) that share one link to the next level.
    """

    level: str
    size: int
    link: Link
    sharing: int = 1


@dataclass(frozen=True)
class Efficiency:
    """Fractions of its peak rates that a device reaches.

    A kernel of f flops runs at ``peak * compute * max(1 / (1 + (half / f) ** exponent), least)`` [flop/s]. With an
    exponent of 1 this is Hockney's half-performance curve ``f / (f + half)``. A smaller exponent lets the rate decrease
    more slowly over more decades, as observed when tiles, waves and algorithms change with the size. Because of the
    lower limit, the few operations of an elementwise kernel do not have the rate of a nearly empty device.

    Parameters
    ----------
    compute
        Fraction of the peak that the largest kernels reach. It may be larger than 1 for convolutions, because
        operations are counted by the definition, and Winograd's algorithm saves more than half of them.
    half
        Operations at which a kernel reaches half of `compute` [flop].
    exponent
        Steepness, in (0, 1]; with at most 1, a larger kernel never takes less time.
    least
        Lower limit of the curve, as a fraction of `compute`, in [0, 1].
    memory
        Fraction of the memory bandwidth that streaming kernels reach, in (0, 1].
    """

    compute: float = 1.0
    half: float = 0.0
    exponent: float = 1.0
    least: float = 0.0
    memory: float = 1.0

    def curve(self, flops: float) -> float:
        """Return the fraction of the peak that a kernel of `flops` > 0 [flop] reaches."""
        return self.compute * max(1 / (1 + (self.half / flops) ** self.exponent), self.least)


@dataclass(frozen=True)
class Topology:
    """Links that messages share.

    If a machine has a topology, everything that uses a link at the same time shares it: sums over different groups
    of ranks, and halos during sums of gradients.

    Parameters
    ----------
    node_links
        Number of messages that travel between devices of a node at the same time at full bandwidth; 0: all of them,
        because every pair of devices has a link of its own.
    network
        Bandwidth of a node into the network, if several of its devices send [B/s]; 0: that of the link, on each of the
        `rails` of the machine.
    uplink
        A node's share of the bandwidth between its switch and other switches, if all nodes use it [B/s]; 0: no limit
        (a tree without taper).
    """

    node_links: int = 0
    network: float = 0.0
    uplink: float = 0.0


@dataclass(frozen=True)
class Protocol:
    """All-reduce of a library of collectives; of several protocols, the fastest one for the size is used.

    With P ranks on N nodes, n bytes take ``start + 2 (P/N - 1) node + 2 floor(lg N) network + n / bandwidth`` [s] on a
    tree, and ``start + 2 (P - 1) network + 2 n (P - 1)/P / bandwidth`` on a ring. On one node, `node` and
    `node_bandwidth` replace `network` and `bandwidth`. The library chooses by these times. A tree in chunks takes
    longer: every hop but the first passes a whole chunk on, upwards and downwards, before the next hop can begin.

    Parameters
    ----------
    algorithm
        ``"tree"`` or ``"ring"``.
    node, network
        Times of one hop, to another device of the node and to another node [s].
    node_bandwidth, bandwidth
        Rates of the formulas within a node and between nodes [B/s].
    start
        Time to start the operation [s].
    most
        Size of the largest vector that the library sums by this protocol [B]; 0: no limit.
    channels
        Number of parts of the vector that trees sum at the same time.
    chunk, least_chunk
        Size of the chunks of a part on a tree, and the size down to which it is halved for vectors of few chunks
        (:func:`halograd.perfmodel.collectives.chunk_bytes`) [B]; 0: bytes are passed on one by one.
    """

    algorithm: Literal["tree", "ring"]
    node: float
    network: float
    node_bandwidth: float
    bandwidth: float
    start: float = 0.0
    most: int = 0
    channels: int = 1
    chunk: int = 0
    least_chunk: int = 0


@dataclass(frozen=True)
class Variation:
    """Variation of times between equal devices, and from kernel to kernel; normal distributions.

    Parameters
    ----------
    devices
        Standard deviation of the speed of equal devices, as a fraction of their mean: a slow device is always slow.
    kernels
        Standard deviation of the time of a kernel, as a fraction of its mean, independent of other kernels.
    measured
        Number of ranks that were measured together: times of kernels are those of the slowest of them. 1: they are
        times of a typical device.
    """

    devices: float = 0.0
    kernels: float = 0.0
    measured: int = 1

    def last(self, ranks: int) -> float:
        """Return how much later than the known time the last of `ranks` is expected, in standard deviations."""
        return max(0.0, expected_maximum(ranks) - expected_maximum(self.measured))

    def slowdown(self, ranks: int) -> float:
        """Return the expected time of the slowest of `ranks` devices, as a multiple of the known time."""
        return 1 + self.devices * self.last(ranks)


@dataclass(frozen=True)
class Overheads:
    """Overheads of the library itself, measured on a machine; by default they are unknown.

    Parameters
    ----------
    update
        Time of the optimizer, SGD with momentum, per byte of parameters [s/B]; 0: computed from the memory bandwidth.
    layer, step
        Time that the executor adds to each forward or backward of a layer, and to a step [s].
    packed
        Whether the times of the links include packing and unpacking.
    sums
        Number of ranks of a node -> time of their all-reduce; for other numbers the formulas of the collectives are
        used.
    short_sums
        Number of ranks -> time of their all-reduce by the algorithm for few bytes, where it is faster.
    work
        Number of ranks -> the part of this time that does not overlap with computation: additions during the wait for
        the sum.
    synchronize
        Time that the start of a gradient sum waits for the device in the middle of backward [s]: ``t_as`` of Le et al.
        2018, Section 3.2.
    """

    update: float = 0.0
    layer: float = 0.0
    step: float = 0.0
    packed: bool = False
    sums: Mapping[int, Link] = field(default_factory=dict)
    short_sums: Mapping[int, Link] = field(default_factory=dict)
    work: Mapping[int, Link] = field(default_factory=dict)
    synchronize: float = 0.0


@dataclass(frozen=True)
class Machine:
    """Cluster of equal nodes, each with equal devices; rank r runs on device r, node by node.

    Parameters
    ----------
    name
        Name of the machine on the command line, in tables and pictures.
    source
        Source of the data.
    devices_per_node
        Devices on one node. A device is one rank: a GPU, or a CPU node or socket with all its cores.
    nodes_per_switch
        Nodes below one switch of the first level.
    peak_flops
        Dtype -> peak rate of one device [flop/s], for every dtype of plans: ``float32 = "19.5 Tflop/s"``.
    memory_bandwidth
        Peak memory bandwidth of one device [B/s].
    memory
        Memory of one device, the default limit of a plan [B].
    launch
        Minimum time of a kernel [s].
    links
        Link of each of `LEVELS`. Between nodes ("switch", "across") a link is one network adapter: devices of a
        node that send at the same time share the adapters.
    efficiency
        Fractions of the peak rates that kernels reach.
    weighted
        The same for kernels of layers with weights, by phase: "forward", "backward_data", "backward_filter"; other
        phases have `efficiency`.
    topology
        Links that messages share; None: sums of different groups, and halos and sums, do not slow each other down.
    collectives
        Protocols of the library of collectives, by name; if there are none, the formulas of `collectives.py` are used.
    variation
        Variation of times between devices and kernels.
    rails
        Network adapters of a node that work at the same time, each with the link of "switch" and "across".
    device
        Description of a device.
    runtime
        Overheads of the library, if they were measured.
    rounds_gradients
        Whether kernels write gradients of weights in 16 bits if activations have 16 bits: on GPUs, not on processors
        (:attr:`halograd.kernels.Backend.rounds_gradients`).
    """

    name: str
    source: str
    devices_per_node: int
    nodes_per_switch: int
    peak_flops: Mapping[str, float]
    memory_bandwidth: float
    memory: int
    launch: float
    links: Mapping[str, Link]
    efficiency: Efficiency = field(default_factory=Efficiency)
    rails: int = 1
    device: str = ""
    runtime: Overheads = field(default_factory=Overheads)
    weighted: Mapping[str, Efficiency] = field(default_factory=dict)
    topology: Topology | None = None
    collectives: Mapping[str, Protocol] = field(default_factory=dict)
    variation: Variation = field(default_factory=Variation)
    rounds_gradients: bool = True

    def __hash__(self) -> int:
        # Mappings among the other fields have no hash. Equal hashes of different machines only cost a comparison.
        return hash((self.name, self.devices_per_node, self.nodes_per_switch, self.memory))

    @classmethod
    def load(cls, name_or_path: str | Path) -> Machine:
        """Return a shipped machine by its name, or one from a TOML file.

        Parameters
        ----------
        name_or_path
            One of `MACHINES`, or the path of a file (it ends in ``.toml``).

        Raises
        ------
        UserError
            If there is no such machine or file, or the file has a wrong unit, an unknown key or a missing level.
        """
        path = Path(name_or_path)
        if path.suffix != ".toml":
            name = str(name_or_path)
            if name not in MACHINES:
                near = difflib.get_close_matches(name, MACHINES, n=3, cutoff=0.4)
                hint = f"did you mean {' or '.join(near)}?" if near else "write the path of your own machine file"
                known = f"one of {', '.join(MACHINES)} or the path of a .toml file"
                raise UserError(f"machine: expected {known}, got {shown(name)}; {hint}")
            path = FOLDER / f"{name}.toml"
        where = f"machine {shown_path(path)}"
        return build(MachineTable, read_toml(path, "machine"), where).machine()

    @classmethod
    def parse(cls, text: str, where: str = "machine file") -> Machine:
        """Return the machine in the TOML `text`; errors name `where`.

        Raises
        ------
        UserError
            If the text is invalid. The message is one line with the path of the key, the expected and the actual value.
        """
        return build(MachineTable, parse_toml(text, where), where).machine()

    def to_toml(self) -> str:
        """Return the text of a machine file, from which `load` creates an equal machine.

        Base units are used, so that numbers are read back exactly.
        """
        runtime = self.runtime
        tables: dict[str, Any] = {
            **{key: getattr(self, key) for key in ("name", "source", "devices_per_node", "nodes_per_switch", "rails")},
            "device": {
                "name": self.device,
                "memory": format_quantity(self.memory, "B"),
                "memory_bandwidth": format_quantity(self.memory_bandwidth, "B/s"),
                "launch": format_quantity(self.launch, "s"),
                "rounds_gradients": self.rounds_gradients,
                "peak_flops": {dtype: format_quantity(peak, "flop/s") for dtype, peak in self.peak_flops.items()},
                "efficiency": {
                    **_efficiency(self.efficiency),
                    **{phase: _efficiency(entry) for phase, entry in self.weighted.items()},
                },
            },
            "links": {level: self.links[level].table() for level in LEVELS},
        }
        if self.topology is not None:
            tables["topology"] = _quantities(self.topology, network="B/s", uplink="B/s")
        if self.collectives:
            tables["collectives"] = {name: _protocol(entry) for name, entry in self.collectives.items()}
        if self.variation != Variation():
            tables["variation"] = vars(self.variation)
        if runtime != Overheads():
            tables["runtime"] = {
                "update": format_quantity(runtime.update, "s/B"),
                **{key: format_quantity(getattr(runtime, key), "s") for key in ("layer", "step", "synchronize")},
                "packed": runtime.packed,
                **{key: {n: link.table() for n, link in getattr(runtime, key).items()} for key in SUMS},
            }
        return "\n".join(_lines(tables)) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the machine file `path`; its folder must exist."""
        write_whole(path, self.to_toml())

    @property
    def has_emulated_links(self) -> bool:
        """Whether the ranks communicate over the emulated network."""
        # A profile on one node measures the link within it; a described network of nodes has the link across.
        return any(self.links[level].emulated for level in ("node", "across"))

    def emulated(self, alpha: float, beta: float, name: str = "", node: int = 1) -> Machine:
        """Return this machine with one network between all its devices, as in the ``emulated`` transport.

        Parameters
        ----------
        alpha, beta
            Parameters of the link at every level except "device", and "node" if `node` > 1 [s], [s/B].
        name
            Name; by default this machine's name with these parameters.
        node
            Number of devices that share memory, as in the transport's string: they use the link "node" of this machine,
            and the network is between them and other devices.
        """
        link = Link(alpha, beta, "emulated", emulated=True)
        links = dict.fromkeys(LEVELS, link) | {"device": self.links["device"]}
        name = name or f"{self.name}+{alpha:g}s+{beta:g}s/B" + (f"+{node}/node" if node > 1 else "")
        source = f"{self.source} Network emulated: alpha {alpha:g} s, beta {beta:g} s/B."
        # Sums, topology and library are those of the real links: on the emulated network they are unknown.
        unknown: Any = {key: {} for key in SUMS}
        runtime = dataclasses.replace(self.runtime, **unknown)
        machine = dataclasses.replace(
            self, name=name, source=source, links=links, runtime=runtime, topology=None, collectives={}
        )
        if node == 1:
            return machine
        return dataclasses.replace(machine, devices_per_node=node, links=links | {"node": self.links["node"]})

    def level(self, a: int, b: int) -> str:
        """Return the link level between two ranks: one of `LEVELS`."""
        if a == b:
            return "device"
        if a // self.devices_per_node == b // self.devices_per_node:
            return "node"
        per_switch = self.devices_per_node * self.nodes_per_switch
        return "switch" if a // per_switch == b // per_switch else "across"

    def span(self, ranks: Iterable[int]) -> str:
        """Return the slowest level within a group; "device" for a group of one or none.

        The ranks of nodes and switches are contiguous, so the first and the last rank determine the level.
        """
        if isinstance(ranks, range):
            return self.level(ranks[0], ranks[-1]) if ranks else "device"
        members = tuple(ranks)
        return self.level(min(members), max(members)) if members else "device"

    def stages(self, ranks: Iterable[int], groups: int = 1) -> tuple[GroupStage, ...]:
        """Return the stages of a group of ranks on the machine, from the inside out.

        Parameters
        ----------
        ranks
            Ranks of the group.
        groups
            Number of such groups on a node that communicate at the same time.

        Returns
        -------
        tuple of GroupStage
            The number of devices of a node, of nodes of a switch, and of switches that take part, with the link between
            them. Each number is the largest of any node or switch, so that an uneven group costs as much as its fullest
            part. Levels with one member are left out, so a group of one rank has no stages.
        """
        members = ranks if isinstance(ranks, range) else tuple(ranks)
        counts = _counts(members, self.devices_per_node, self.nodes_per_switch)
        sharing = (-(-counts[0] * groups // self.rails), 1, 1)  # nodes of a switch have adapters of their own
        links = dict(self.links)
        # Without a stage within the node, `sharing` has no effect: here it is the groups that share the adapters.
        if groups > 1 and counts[0] == 1 and not (self.topology and self.topology.network):
            for level in ("switch", "across"):
                links[level] = links[level].shared_by(-(-groups // self.rails))
        if self.topology is not None and self.topology.node_links:
            # At least 1: one message does not travel faster if there are more links than messages.
            links["node"] = links["node"].shared_by(max(1.0, counts[0] * groups / self.topology.node_links))
        if self.topology is not None and self.topology.network:
            sharing = (counts[0], 1, 1)
            for level in ("switch", "across"):
                devices = counts[0] * groups
                # Together the devices send at most at `network`, and each of them at most at the bandwidth of its link.
                beta = groups * max(1 / self.topology.network, links[level].beta / devices)
                links[level] = dataclasses.replace(links[level], beta=beta)
        if self.topology is not None and self.topology.uplink:
            # The nodes that take part share the uplinks of all nodes of their switch; so do the groups on these nodes.
            share = groups * counts[1] / (self.nodes_per_switch * self.topology.uplink)
            links["across"] = dataclasses.replace(links["across"], beta=max(links["across"].beta, share))
        stages = zip(LEVELS[1:], counts, sharing)
        return tuple(GroupStage(level, n, links[level], share) for level, n, share in stages if n > 1)

    def roofline(self, flops: float, nbytes: float, dtype: str, phase: str = "") -> float:
        """Return the time of one kernel on one device [s].

        ``launch + max(flops / (peak * curve(flops)), nbytes / (memory_bandwidth * efficiency.memory))``, with the curve
        of `Efficiency`. The time never decreases when flops or bytes increase.

        Parameters
        ----------
        flops
            Operations [flop]; a multiplication and an addition count as two.
        nbytes
            Bytes read and written, each array once [B].
        dtype
            Name of the dtype of the arithmetic.
        phase
            Phase of a kernel of a layer with weights, a key of `weighted`; "" for other kernels.

        Raises
        ------
        UserError
            If the machine file has no peak rate for `dtype`.

        References
        ----------
        Williams, Waterman, Patterson 2009, "Roofline"; Hockney 1983 for the half-performance length.
        """
        # Without operations, the curve would divide by 0.
        arithmetic = flops / self.rate(flops, dtype, phase) if flops > 0 else 0.0
        memory = self.weighted.get(phase, self.efficiency).memory
        return self.launch + max(arithmetic, nbytes / (self.memory_bandwidth * memory))

    def rate(self, flops: float, dtype: str, phase: str = "") -> float:
        """Return the rate [flop/s] of a compute-bound kernel of `flops` > 0 [flop]; `phase` as in :meth:`roofline`."""
        if dtype not in self.peak_flops:
            raise UserError(
                f"machine {self.name}: expected a data type with a peak rate ({', '.join(self.peak_flops)}), "
                f"got {dtype}; add it to [device.peak_flops] of a copy of the machine file"
            )
        return self.peak_flops[dtype] * self.weighted.get(phase, self.efficiency).curve(flops)


@lru_cache(maxsize=4096)
def expected_maximum(count: int) -> float:
    """Return the expected maximum of `count` independent standard normal variables.

    References
    ----------
    David, Nagaraja 2003, "Order Statistics", Section 3.1: the integral of ``1 - F(x)**n`` over x > 0, less that of
    ``F(x)**n`` over x < 0.
    """
    if count < 2:
        return 0.0
    # Midpoint rule on [-8, 8]: beyond it, F differs from 0 or 1 by less than 1e-15.
    step = 1 / 64
    cdf = [0.5 * math.erfc(-(i + 0.5) * step / math.sqrt(2)) for i in range(-512, 512)]
    return step * sum((1 if i >= 512 else 0) - value**count for i, value in enumerate(cdf))


def _efficiency(efficiency: Efficiency) -> dict[str, Any]:
    return vars(efficiency) | {"half": format_quantity(efficiency.half, "flop")}


def _protocol(protocol: Protocol) -> dict[str, Any]:
    times, rates = (
        dict.fromkeys(("start", "node", "network"), "s"),
        dict.fromkeys(("node_bandwidth", "bandwidth"), "B/s"),
    )
    return _quantities(protocol, **times, **rates, most="B", chunk="B", least_chunk="B")


def _quantities(record: Any, **units: str) -> dict[str, Any]:
    """Return the fields as keys of a file, with their units; rates and sizes of 0, the default, are left out."""
    # A file cannot contain rates and sizes of 0: its types reject them.
    values = {key: value for key, value in vars(record).items() if value or units.get(key, "s") == "s"}
    return {key: format_quantity(value, units[key]) if key in units else value for key, value in values.items()}


def _lines(table: Mapping[Any, Any], section: str = "") -> Iterator[str]:
    """Yield the lines of TOML of a table, then those of the tables within it."""
    names = {key: str(key) if re.fullmatch(r"[A-Za-z0-9_-]+", str(key)) else to_toml(key) for key in table}
    # In TOML, keys after the header of a table belong to this table, so the tables come last.
    inner = [key for key in table if isinstance(table[key], Mapping)]
    yield from (f"{names[key]} = {to_toml(table[key])}" for key in table if key not in inner)
    for key in inner:
        yield from ("", f"[{section}{names[key]}]", *_lines(table[key], f"{section}{names[key]}."))


@lru_cache(maxsize=65536)
def _counts(ranks: range | tuple[int, ...], per_node: int, per_switch: int) -> tuple[int, int, int]:
    """Return the maximum number of ranks on a node and of nodes on a switch, and the number of switches."""
    nodes = Counter(rank // per_node for rank in ranks)
    switches = Counter(node // per_switch for node in nodes)
    return max(nodes.values(), default=1), max(switches.values(), default=1), len(switches)


# -- machine files ----------------------------------------------------------------------------------

# The descriptions of most keys are those of `Machine`, `Link`, `Efficiency` and `Overheads`.


Fraction = Annotated[float, Field(ge=1e-6, le=1)]
Ranks = Annotated[int, Field(ge=2, le=MOST)]


class LinkTable(Table):
    """``[links.LEVEL]``: `alpha`, and either `beta` or `bandwidth`."""

    alpha: Seconds
    beta: SecondsPerByte | None = None
    bandwidth: BytesPerSecond | None = None
    """Bandwidth, the inverse of `beta`."""
    note: str = ""
    shared: bool | None = None
    emulated: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> LinkTable:
        if (self.beta is None) == (self.bandwidth is None):
            got = "neither" if self.beta is None else "both"
            raise ValueError(f'expected one of beta ("25.7 ps/B") and bandwidth ("12.5 GB/s"), got {got}')
        return self

    def link(self) -> Link:
        """Return the table as a :class:`Link`."""
        # Files of earlier versions have the transport in the note only.
        shared = self.note.startswith(("shared", "auto")) if self.shared is None else self.shared
        emulated = self.note.startswith("emulated") if self.emulated is None else self.emulated
        beta = (self.beta or 0.0) if self.bandwidth is None else 1 / self.bandwidth
        return Link(self.alpha, beta, self.note, shared, emulated)


class CurveTable(Table):
    """``[device.efficiency.PHASE]``: the fractions of the peak rates that kernels of layers with weights reach.

    PHASE is `forward`, `backward_data` or `backward_filter`; a phase without a table has that of the device.
    """

    # Winograd's algorithm multiplies 2.25 (2 x 2 outputs of 3 x 3 kernels) to 4 times (4 x 4) less than is counted.
    compute: Annotated[float, Field(ge=1e-6, le=4)]
    half: Flops
    exponent: Fraction
    least: Annotated[float, Field(ge=0, le=1)]
    memory: Fraction

    def efficiency(self) -> Efficiency:
        """Return the table as an :class:`Efficiency`."""
        return Efficiency(**{key: getattr(self, key) for key in CurveTable.model_fields})


class EfficiencyTable(CurveTable):
    """``[device.efficiency]``: the fractions of its peak rates that the device reaches."""

    compute: Fraction
    forward: CurveTable | None = None
    backward_data: CurveTable | None = None
    backward_filter: CurveTable | None = None

    def weighted(self) -> dict[str, Efficiency]:
        """Return, by phase, the fractions of the peak rates that kernels of layers with weights reach."""
        tables = {phase: getattr(self, phase) for phase in PHASES}
        return {phase: table.efficiency() for phase, table in tables.items() if table is not None}


class DeviceTable(Table):
    """``[device]``: one device, which is one rank."""

    name: str = ""
    """Name of the product."""
    memory: Bytes
    memory_bandwidth: BytesPerSecond
    launch: Seconds
    rounds_gradients: bool = True
    """Whether kernels write gradients of weights in 16 bits, as on GPUs, if activations have 16 bits."""
    peak_flops: Annotated[dict[str, FlopsPerSecond], Field(min_length=1)]
    efficiency: EfficiencyTable


class RuntimeTable(Table):
    """``[runtime]``: overheads of the library itself, as ``halograd profile`` has measured them."""

    update: SecondsPerByte = 0.0
    layer: Seconds = 0.0
    step: Seconds = 0.0
    synchronize: Seconds = 0.0
    packed: bool = False
    sums: dict[Ranks, LinkTable] = Field(default_factory=dict)
    short_sums: dict[Ranks, LinkTable] = Field(default_factory=dict)
    work: dict[Ranks, LinkTable] = Field(default_factory=dict)


class TopologyTable(Table):
    """``[topology]``: links that messages share. With it, halos and sums that travel at the same time share links."""

    node_links: Annotated[int, Field(ge=0, le=MOST)] = 0
    # pydantic does not validate default values, so a missing key is 0, which a file cannot contain.
    network: BytesPerSecond = 0.0
    uplink: BytesPerSecond = 0.0


class ProtocolTable(Table):
    """``[collectives.NAME]``: an all-reduce of the library of collectives."""

    algorithm: Literal["tree", "ring"]
    node: Seconds
    network: Seconds
    node_bandwidth: BytesPerSecond
    bandwidth: BytesPerSecond
    start: Seconds = 0.0
    most: Bytes = 0
    channels: Count = 1
    chunk: Bytes = 0
    least_chunk: Bytes = 0

    def protocol(self) -> Protocol:
        """Return the table as a :class:`Protocol`."""
        # Quantities are parsed as floats.
        sizes = {key: int(getattr(self, key)) for key in ("most", "chunk", "least_chunk")}
        return Protocol(**dict(self) | sizes)


class VariationTable(Table):
    """``[variation]``: standard deviations of times, as fractions of their means."""

    devices: Annotated[float, Field(ge=0, le=1)] = 0.0
    kernels: Annotated[float, Field(ge=0, le=1)] = 0.0
    measured: Count = 1


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
    source: Annotated[str, Field(min_length=1)]
    devices_per_node: Count
    nodes_per_switch: Count
    rails: Count = 1
    device: DeviceTable
    links: LinksTable
    runtime: RuntimeTable = RuntimeTable()
    topology: TopologyTable | None = None
    collectives: dict[Annotated[str, Field(min_length=1)], ProtocolTable] = Field(default_factory=dict)
    variation: VariationTable = VariationTable()

    def machine(self) -> Machine:
        """Return the file as a :class:`Machine`."""
        device, runtime = self.device, self.runtime
        sums = {key: {n: line.link() for n, line in getattr(runtime, key).items()} for key in SUMS}
        return Machine(
            self.name,
            self.source,
            self.devices_per_node,
            self.nodes_per_switch,
            dict(device.peak_flops),
            device.memory_bandwidth,
            int(device.memory),
            device.launch,
            {level: getattr(self.links, level).link() for level in LEVELS},
            device.efficiency.efficiency(),
            self.rails,
            device.name,
            Overheads(**{**dict(runtime), **sums}),
            device.efficiency.weighted(),
            None if self.topology is None else Topology(**dict(self.topology)),
            {name: table.protocol() for name, table in self.collectives.items()},
            Variation(**dict(self.variation)),
            device.rounds_gradients,
        )
