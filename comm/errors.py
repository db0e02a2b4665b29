"""The one error of the communication layer."""

__all__ = ["CommError"]


class CommError(RuntimeError):
    """Communication was asked for in a way that cannot work, or it failed.

    The text says what was expected, what came, and what to do about it.
    """
