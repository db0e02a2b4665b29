"""Where arrays live: memory, copies between host and device, events. Imports nothing of the other folders."""

from halograd.device.base import Device, DeviceError, DeviceMemory, Stamp, Ticket
from halograd.device.host import HOST, HostDevice
from halograd.device.registry import device_of, on_device, register, unregister

__all__ = [
    "HOST",
    "Device",
    "DeviceError",
    "DeviceMemory",
    "HostDevice",
    "Stamp",
    "Ticket",
    "device_of",
    "on_device",
    "register",
    "unregister",
]
