"""The error of everything that is wrong with data, a path or a file: one line, with the remedy."""

from halograd.errors import UserError

__all__ = ["DataError"]


class DataError(UserError):
    """Data that cannot be used, or a file that cannot be written."""
