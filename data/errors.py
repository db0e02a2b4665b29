"""The error of everything that is wrong with data, a path or a file: one line, with the remedy."""

__all__ = ["DataError"]


class DataError(ValueError):
    """Data that cannot be used, or a file that cannot be written; the message is one line for the user."""
