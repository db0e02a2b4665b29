"""Errors that are answered with one line instead of a traceback."""

__all__ = ["TRACEBACK", "UserError"]

#: Environment variable; if it is set, a user's mistake shows its traceback too.
TRACEBACK = "HALOGRAD_TRACEBACK"


class UserError(ValueError):
    """Something the user can put right: a key, a path, a number of ranks.

    The message is one line: what was expected, what came, what to do. The command line prints it alone, unless
    ``HALOGRAD_TRACEBACK`` is set, and ends with exit code 2; so does a script with an open
    :class:`halograd.Communicator`.
    """
