"""Faults of one rank that all ranks raise."""

from __future__ import annotations

import importlib

from halograd.comm.errors import CommError

__all__ = ["describe", "recreate"]


def describe(fault: Exception) -> tuple[str, str, str, bool]:
    """Module and name of the type of a fault, its text, and whether that names a rank already. Local."""
    kind = type(fault)
    text = str(fault.args[0]) if isinstance(fault, KeyError) and fault.args else str(fault)
    return kind.__module__, kind.__qualname__, text, getattr(fault, "agreed", False)


def recreate(module: str, name: str, text: str, where: str) -> Exception:
    """An error of this type that says where it arose; decided alike on all ranks. Local."""
    try:
        error = getattr(importlib.import_module(module), name)(f"{where}{text}")
        if isinstance(error, Exception):
            return error
    except Exception:  # the type is not to be had, or wants more, such as UnicodeDecodeError
        pass
    return CommError(f"{where}{name}: {text}")
