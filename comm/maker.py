"""Construction of the channels and sums of a communicator: the ranks agree on everything before the first message."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from ..device import HOST, on_device
from .channel import Channel, ChannelSpec, check_counts, check_matching, expectations
from .counters import Instruments, Meter
from .device_channel import StagedChannel, staged, staging
from .errors import CommError, agree
from .gpu.link import DeviceLinks, DeviceTransport
from .ranks import Ranks
from .reduction import (
    REDUCIBLE,
    Reduction,
    ReductionPlan,
    ReductionSpec,
    check_identical,
    check_spec,
    check_type,
    properties,
)
from .sums import node_shares
from .transport import Links
from .transports.base import Pattern, TransportContext

__all__ = ["Maker"]


class Maker:
    """Factory of channels and sums over one communicator. Every call is collective, in the same order on all ranks.

    A call validates locally, then agrees once that no rank has a fault and that all ranks request the same. Only if
    they differ does it search for the difference.
    """

    def __init__(
        self, comm: Ranks, context: TransportContext, links: Links, devices: DeviceLinks, instruments: Instruments
    ) -> None:
        self._comm, self._context, self._links = comm, context, links
        self._devices, self._instruments = devices, instruments

    def channels(self, specs: Sequence[ChannelSpec]) -> list[Channel]:
        """Return one channel per specification; see `Communicator.channels`."""
        comm, fault, totals, dtypes = self._comm, None, (np.zeros(0), np.zeros(0)), list[str]()
        try:
            for spec in specs:
                check_counts(spec.sends, "send_counts", comm.rank, comm.size)
                check_counts(spec.recvs, "recv_counts", comm.rank, comm.size)
                if spec.device is not specs[0].device:
                    raise CommError(
                        f"device: expected that of the first channel, {specs[0].device.name}, got {spec.device.name}"
                    )
            totals = expectations(comm.size, specs)
            dtypes = [str(np.dtype(spec.dtype)) for spec in specs]
        except Exception as error:
            fault = error
        device = specs[0].device if specs else HOST
        # The sums of bytes below do not show a dtype of the same size, nor a channel without messages on one rank only.
        identical = self._begin(fault, zlib.crc32("\n".join([str(device.is_host), *dtypes]).encode()))
        with comm.agreement():
            if not identical:
                _check_kinds(comm, device.is_host, dtypes)
                self._context.agree(None)  # ranks without a fault would wait in the collective of `check_matching`
            check_matching(comm.mpi, *totals, specs)
            patterns = [
                Pattern(_positive(spec.sends), _positive(spec.recvs), np.dtype(spec.dtype), self._context.tag())
                for spec in specs
            ]
            meters = [self._meter(spec, pattern) for spec, pattern in zip(specs, patterns)]
            over = None if device.is_host else self._devices.transport(self._context, device)
            channels: list[Channel] = (over or self._links).channels(patterns, meters)
            if over is None and not device.is_host:
                channels = [StagedChannel(channel, device, meter) for channel, meter in zip(channels, meters)]
        return channels

    def reductions(self, specs: Sequence[ReductionSpec]) -> list[Reduction]:
        """Return one sum per specification; see `Communicator.reductions`."""
        comm, fault, mine, mark = self._comm, None, list[str](), 0
        try:
            for spec in specs:
                check_spec(spec)
            mine = properties(specs)
            mark = zlib.crc32("\n".join(mine).encode())
        except Exception as error:
            fault = error
        identical = self._begin(fault, mark)
        with comm.agreement():
            if not identical:
                check_identical(comm.mpi, comm.ranks[0], mine)
            return self._reductions(specs)

    def _begin(self, fault: Exception | None, mark: int = 0) -> bool:
        """Begin a set-up: raise a fault on all ranks, and return whether all have the same mark of 32 bits. Collective.

        After a failed set-up, ranks may have taken different numbers of tags: all continue from the largest.
        """
        # In one number of 63 bits: the tags taken, and 32 bits of the mark.
        marks = agree(self._comm.mpi, self._comm.ranks, fault, self._context.tags_taken << 32 | mark)
        self._context.tags_taken = int(marks.max() >> 32)
        return bool((marks & 0xFFFFFFFF == mark).all())

    def _meter(self, spec: ChannelSpec, pattern: Pattern) -> Meter:
        nbytes = sum(pattern.sends.values()) * pattern.dtype.itemsize
        ranks = [self._comm.ranks[peer] for peer in sorted(pattern.sends.keys() | pattern.recvs.keys())]
        # A message is counted by its sender only.
        return Meter(self._instruments, spec.kind, spec.name or spec.kind, len(pattern.sends), nbytes, ranks)

    def _meters(self, spec: ReductionSpec) -> list[Meter]:
        """Return the meters of a sum. Collective.

        A hierarchical sum has two: one for messages to other nodes, and one for traffic through shared memory.
        """
        comm, method, buffer = self._comm, spec.sum, spec.buffer
        traffic = [(spec.kind, method.sent(buffer.size, buffer.itemsize, comm.size, comm.rank))]
        if method.by_nodes:
            share = node_shares(comm.nodes)[comm.rank]
            traffic = [(spec.kind, share.across(buffer.nbytes)), ("node", share.within(buffer.nbytes))]
        name = spec.name or spec.kind
        # One message per sum, whatever the algorithm; none if this rank contributes nothing to this traffic.
        return [Meter(self._instruments, kind, name, int(nbytes > 0), nbytes, comm.ranks) for kind, nbytes in traffic]

    def _link(self, spec: ReductionSpec) -> DeviceTransport | None:
        """Return the device transport that makes the sum without the host, or None. Collective if the array is on a
        device.
        """
        device, link = on_device(spec.buffer), None
        if device is not None and spec.sum.on_devices:
            link = self._devices.transport(self._context, device)
        check_type(spec, REDUCIBLE if link is None else link.summable)
        return link

    def _reductions(self, specs: Sequence[ReductionSpec]) -> list[Reduction]:
        """Return sums whose specifications are the same on all ranks. Collective."""
        # `_link` and `_meters` may be collective, so all ranks call them for all sums, also for idle ones.
        links = [self._link(spec) for spec in specs]
        meters = [self._meters(spec) for spec in specs]
        idle = [self._comm.size == 1 or not spec.buffer.size for spec in specs]
        by_host = [spec for spec, link, rests in zip(specs, links, idle) if link is None and not rests]
        arrays = [staging(spec.buffer) for spec in by_host]
        requests = [(host, spec.sum, spec.name or spec.kind) for spec, host in zip(by_host, arrays)]
        # In the order of `by_host`, so that `next` below yields the plan of each sum that the host makes.
        plans = iter(map(staged, (spec.buffer for spec in by_host), arrays, self._links.plans(requests)))
        return [
            Reduction(spec.buffer, meter, ReductionPlan())
            if rests
            else link.reduction(spec.buffer, meter[0], spec.sum)
            if link is not None
            else Reduction(spec.buffer, meter, next(plans))
            for spec, link, rests, meter in zip(specs, links, idle, meters)
        ]


def _check_kinds(comm: Ranks, on_host: bool, dtypes: list[str]) -> None:
    """Raise CommError unless the channels of this rank are as many as those of the first rank, with the same dtypes and
    kind of device. Collective.
    """
    host, expected = comm.mpi.bcast((on_host, dtypes), root=0)
    first = comm.ranks[0]
    # The first rank finds no difference: the agreement of the caller raises the error there.
    if len(dtypes) != len(expected):
        raise CommError(
            f"channels: expected {len(expected)} as on rank {first}, got {len(dtypes)}; request as many on all ranks, "
            "without counts where there is no message"
        )
    if on_host != host:
        raise CommError("device: expected the host on all ranks or on none, got both; give all ranks one kind")
    for other, own in zip(expected, dtypes):
        if own != other:
            raise CommError(f"dtype: expected {other} as on rank {first}, got {own}; give all ranks one dtype")


def _positive(counts: Mapping[int, int]) -> dict[int, int]:
    """Return the numbers of elements that are not zero, by peer, in the order of the peers."""
    return {peer: int(count) for peer, count in sorted(counts.items()) if count}
