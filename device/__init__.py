"""Where arrays live: memory, copies between host and device, events. Imports nothing of the other folders."""

from .base import (
    HOST,
    LOW,
    Device,
    DeviceError,
    DeviceMemory,
    HostDevice,
    Stamp,
    Ticket,
    as_dtype,
    device_of,
    is_low,
    on_device,
    register,
    resolution,
    unregister,
    wide,
)

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
