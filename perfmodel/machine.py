"""Machines: the computing rates of one device, and the cost of a message between two devices.

A machine is data. The shipped machines are in ``perfmodel/machines/``; `halograd profile` writes one for the machine
that it runs on. `docs/machines.md` explains how to write one by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from halograd.documents import write_whole
from halograd.errors import UserError

from .machine_file import machine_to_toml, parse_machine, read_machine
from .machine_parts import LEVELS, Efficiency, GroupStage, Link, Overheads

__all__ = ["Machine"]


@dataclass(frozen=True)
class Machine:
    """Cluster of equal nodes, each with equal devices; rank r runs on device r, node by node.

    Parameters
    ----------
    name
        Name on the command line.
    source
        Source of the numbers.
    devices_per_node
        Devices (ranks) on one node.
    nodes_per_switch
        Nodes below one switch of the first level.
    peak_flops
        Data type name -> peak rate of one device [flop/s].
    memory_bandwidth
        Peak memory bandwidth of one device [B/s].
    memory
        Memory of one device [B].
    launch
        Minimum time of a kernel [s].
    links
        Each of `LEVELS` -> its `Link`. Between nodes ("switch", "across") a link is one network adapter: devices of a
        node that send at the same time share the adapters.
    efficiency
        Fractions of the peak rates that kernels reach.
    rails
        Network adapters of a node that work at the same time, each with the link of "switch" and "across".
    device
        Description of a device.
    runtime
        Overheads of the library, if they were measured.
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

    def __hash__(self) -> int:
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
        return cls(**read_machine(name_or_path))

    @classmethod
    def parse(cls, text: str, where: str = "machine file") -> Machine:
        """Return the machine in the TOML `text`; errors name `where`.

        Raises
        ------
        UserError
            If the text is invalid; one line with the key's path, the expected and the given value.
        """
        return cls(**parse_machine(text, where))

    def to_toml(self) -> str:
        """Return the text of a machine file, from which `load` creates an equal machine."""
        return machine_to_toml(vars(self))

    def save(self, path: str | Path) -> None:
        """Write the machine file `path`; its folder must exist."""
        write_whole(path, self.to_toml())

    @property
    def has_emulated_links(self) -> bool:
        """Whether the ranks are on the emulated network."""
        # A profile on one node measures the link within it; a described network of nodes has the link across.
        return any(self.links[level].emulated for level in ("node", "across"))

    def emulated(self, alpha: float, beta: float, name: str = "", node: int = 1) -> Machine:
        """Return this machine with one network between all its devices, as in the ``emulated`` transport.

        Parameters
        ----------
        alpha, beta
            Parameters of the link at every level except "device" [s], [s/B].
        name
            Name; by default this machine's name with the two numbers.
        node
            Number of devices that share memory, as in the transport's text: they use the link "node" of this machine,
            and the network is between them and other devices.
        """
        link = Link(alpha, beta, "emulated", emulated=True)
        links = dict.fromkeys(LEVELS, link) | {"device": self.links["device"]}
        name = name or f"{self.name}+{alpha:g}s+{beta:g}s/B" + (f"+{node}/node" if node > 1 else "")
        source = f"{self.source} Network emulated: alpha {alpha:g} s, beta {beta:g} s/B."
        runtime = dataclasses.replace(self.runtime, sums={}, work={})
        found = dataclasses.replace(self, name=name, source=source, links=links, runtime=runtime)
        if node == 1:
            return found
        return dataclasses.replace(found, devices_per_node=node, links=links | {"node": self.links["node"]})

    def level(self, a: int, b: int) -> str:
        """Return the link level between two ranks: one of `LEVELS`."""
        if a == b:
            return "device"
        if a // self.devices_per_node == b // self.devices_per_node:
            return "node"
        per_switch = self.devices_per_node * self.nodes_per_switch
        return "switch" if a // per_switch == b // per_switch else "across"

    def link(self, a: int, b: int) -> Link:
        """Return the link between two ranks."""
        return self.links[self.level(a, b)]

    def span(self, ranks: Iterable[int]) -> str:
        """Return the slowest level within a group; "device" for a group of one or none.

        The ranks of nodes and switches are contiguous, so the first and the last rank determine the level.
        """
        if isinstance(ranks, range):
            return self.level(ranks[0], ranks[-1]) if ranks else "device"
        members = tuple(ranks)
        return self.level(min(members), max(members)) if members else "device"

    def stages(self, ranks: Iterable[int]) -> tuple[GroupStage, ...]:
        """Return the stages of a group of ranks on the machine, from the inside out.

        Returns
        -------
        tuple of GroupStage
            The number of devices of a node, of nodes of a switch, and of switches that take part, with the link between
            them. Each number is the largest of any node or switch, so that an uneven group costs as much as its fullest
            part. Levels with one member are left out, so a group of one has no stages.
        """
        members = ranks if isinstance(ranks, range) else tuple(ranks)
        counts = _counts(members, self.devices_per_node, self.nodes_per_switch)
        sharing = (-(-counts[0] // self.rails), 1, 1)  # nodes of a switch have adapters of their own
        stages = zip(LEVELS[1:], counts, sharing)
        return tuple(GroupStage(level, n, self.links[level], share) for level, n, share in stages if n > 1)

    def roofline(self, flops: float, nbytes: float, dtype: str) -> float:
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

        Raises
        ------
        UserError
            If the machine file has no peak rate for `dtype`.

        References
        ----------
        Williams, Waterman, Patterson 2009, "Roofline"; Hockney 1983 for the half-performance length.
        """
        arithmetic = flops / self.rate(flops, dtype) if flops > 0 else 0.0
        return self.launch + max(arithmetic, nbytes / (self.memory_bandwidth * self.efficiency.memory))

    def rate(self, flops: float, dtype: str) -> float:
        """Return the rate of a kernel of `flops` > 0 [flop] that memory does not limit [flop/s]."""
        if dtype not in self.peak_flops:
            raise UserError(
                f"machine {self.name}: expected a data type with a peak rate ({', '.join(self.peak_flops)}), "
                f"got {dtype}; add it to [device.peak_flops] of a copy of the machine file"
            )
        return self.peak_flops[dtype] * self.efficiency.curve(flops)


@lru_cache(maxsize=65536)
def _counts(ranks: range | tuple[int, ...], per_node: int, per_switch: int) -> tuple[int, int, int]:
    """Return the largest number of ranks on a node, the largest number of nodes on a switch, and the number of
    switches.
    """
    nodes: dict[int, int] = {}
    for rank in ranks:
        nodes[rank // per_node] = nodes.get(rank // per_node, 0) + 1
    switches: dict[int, int] = {}
    for node in nodes:
        switches[node // per_switch] = switches.get(node // per_switch, 0) + 1
    return max(nodes.values(), default=1), max(switches.values(), default=1), len(switches)
