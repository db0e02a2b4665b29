"""Which device an array lives on."""

from __future__ import annotations

from typing import Any

import numpy as np

from halograd.device.base import Device, DeviceError
from halograd.device.host import HOST

__all__ = ["device_of", "on_device", "register", "unregister"]

_devices: list[Device] = []


def register(device: Device) -> None:
    """Let `device_of` find a device; the one registered last is asked first."""
    _devices.insert(0, device)


def unregister(device: Device) -> None:
    """Forget a device; one that is not registered is ignored."""
    _devices[:] = [other for other in _devices if other is not device]


def device_of(*arrays: Any) -> Device:
    """The device of some arrays; None among them is ignored.

    Raises
    ------
    DeviceError
        If they live on different devices, or on none that a kernel backend has opened.
    """
    found: list[Device] = []
    for array in arrays:
        if array is None:
            continue
        device = HOST if isinstance(array, np.ndarray) else _of(array)
        if device not in found:
            found.append(device)
    if len(found) > 1:
        names = " and ".join(device.name for device in found)
        raise DeviceError(f"expected arrays on one device, got some on {names}; copy them to one")
    return found[0] if found else HOST


def on_device(array: Any) -> Device | None:
    """The device of an array; None for anything of the host."""
    if isinstance(array, np.ndarray):
        return None
    return next((device for device in _devices if device.owns(array)), None)


def _of(array: Any) -> Device:
    device = on_device(array)
    if device is not None:
        return device
    raise DeviceError(
        f"expected a NumPy array or one of an open device, got {type(array).__module__}.{type(array).__name__}; "
        "make a kernel backend of its device first"
    )
