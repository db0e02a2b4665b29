"""Errors that are answered with one line instead of a traceback."""

__all__ = ["UserError"]


class UserError(ValueError):
    """Something the user can put right: a key, a path, a number of ranks.

    The message is one line: what was expected, what came, what to do. The command line prints it alone and ends with
    exit code 2; so does a script that has an open :class:`halograd.Communicator`, unless ``HALOGRAD_TRACEBACK`` is set.
    """
