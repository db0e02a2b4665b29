"""The one error of the communication layer, and what is known of errors that all ranks raise."""

__all__ = ["CommError", "is_agreed", "is_shared", "mark_agreed"]


class CommError(RuntimeError):
    """Communication was asked for in a way that cannot work, or it failed.

    The text says what was expected, what came, and what to do about it.
    """


def mark_agreed(error: BaseException, arose_here: bool, ranks: int, needs_no_rank: bool = False) -> None:
    """Note how many ranks raise this error, whether it arose here, and whether its text needs no rank. Local."""
    vars(error).update(agreed=ranks, arose_here=arose_here, needs_no_rank=needs_no_rank)


def is_agreed(error: BaseException, ranks: int) -> bool:
    """Whether all of so many ranks raise this error, not only those of a smaller group. Local."""
    return int(getattr(error, "agreed", 0)) >= ranks


def is_shared(leaving: BaseException | None, ranks: int) -> bool:
    """Whether all of so many ranks leave a ``with`` by this, so that its end may be collective. Local.

    No error, an agreed one, `sys.exit` without a code.
    """
    if isinstance(leaving, SystemExit):
        return not leaving.code
    return leaving is None or is_agreed(leaving, ranks)
