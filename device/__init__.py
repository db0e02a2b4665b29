"""Where arrays live: memory, copies between host and device, events. Imports nothing of the other folders."""

from halograd.device.base import Device, DeviceError, DeviceMemory, Stamp, Ticket
from halograd.device.dtypes import LOW, as_dtype, is_low, resolution, wide
from halograd.device.host import HOST, HostDevice
from halograd.device.registry import device_of, on_device, register, unregister

__all__ = [
    "HOST",
    "LOW",
    "Device",
    "DeviceError",
    "DeviceMemory",
    "HostDevice",
    "Stamp",
    "Ticket",
    "as_dtype",
    "device_of",
    "is_low",
    "on_device",
    "register",
    "resolution",
    "unregister",
    "wide",
]
