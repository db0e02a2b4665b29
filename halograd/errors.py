"""Errors that are reported in one line instead of a traceback."""

__all__ = ["TRACEBACK", "OutOfMemory", "UserError"]

#: Environment variable; if it is set, user errors show their traceback too.
TRACEBACK = "HALOGRAD_TRACEBACK"


class UserError(ValueError):
    """An error that the user can fix: a key, a path, a number of ranks.

    The message is one line: what was expected, what was received, and the remedy. The command line prints only this
    line, unless ``HALOGRAD_TRACEBACK`` is set, and ends with exit code 2; so does a script with an open
    :class:`halograd.Communicator`.
    """


class OutOfMemory(UserError, MemoryError):
    """A failed allocation; the message has the held and the predicted memory, and remedies, in one line."""
