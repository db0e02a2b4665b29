"""Which device a rank takes. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from halograd.device.base import DeviceError

__all__ = ["choose_ordinal"]


def choose_ordinal(wanted: str | int | Sequence[int], local_rank: int, count: int) -> int:
    """Number of the device for a rank.

    Parameters
    ----------
    wanted
        ``"auto"``: the ranks of a node take its devices in turn. A number: that one, whatever the rank. Numbers: the
        ranks of a node take these in turn.
    local_rank
        Number of the rank among those of its node.
    count
        Devices that this process sees.

    Raises
    ------
    DeviceError
        If there is no device, or not the wanted one.

    Examples
    --------
    >>> [choose_ordinal("auto", rank, 4) for rank in range(6)]
    [0, 1, 2, 3, 0, 1]
    >>> [choose_ordinal([2, 3], rank, 4) for rank in range(3)]
    [2, 3, 2]
    """
    if count < 1:
        raise DeviceError("backend.device: expected a CUDA device, got none (no driver, or none visible)")
    if wanted == "auto":
        # A launcher that shows each rank its own device only leaves one to choose from.
        return local_rank % count
    chosen = [wanted] if isinstance(wanted, int) else wanted
    if isinstance(chosen, str) or not chosen:
        raise DeviceError(f"backend.device: expected 'auto', a number or numbers, got {wanted!r}")
    ordinal = chosen[local_rank % len(chosen)]
    if not 0 <= ordinal < count:
        raise DeviceError(f"backend.device: expected devices from 0 to {count - 1}, got {ordinal}")
    return ordinal
