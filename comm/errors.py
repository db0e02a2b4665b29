"""The one error of the communication layer, and what is known of errors that all ranks raise."""

__all__ = ["CommError", "is_shared", "mark_agreed"]


class CommError(RuntimeError):
    """Communication was asked for in a way that cannot work, or it failed.

    The text says what was expected, what came, and what to do about it.
    """


def mark_agreed(error: Exception, arose_here: bool) -> None:
    """Note that all ranks raise this error (``agreed``), and whether it arose on this one (``arose_here``). Local."""
    vars(error).update(agreed=True, arose_here=arose_here)


def is_shared(leaving: BaseException | None) -> bool:
    """Whether the other ranks leave a ``with`` by this too, so that its end may be collective. Local.

    No error, an agreed one, `sys.exit` without a code.
    """
    if isinstance(leaving, SystemExit):
        return not leaving.code
    return leaving is None or getattr(leaving, "agreed", False)
