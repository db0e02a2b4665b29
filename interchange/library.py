"""Libraries that only exchange with other frameworks needs: found when they are first used, or missed in one line."""

from __future__ import annotations

import importlib
from types import ModuleType

from halograd.errors import UserError

__all__ = ["library"]


def library(name: str) -> ModuleType:
    """The module called `name`, of the extra ``interchange``.

    Raises
    ------
    UserError
        If it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(
            f"expected the library {package}, got none ({error}); install it by: pip install 'halograd[interchange]'"
        ) from error
