"""The one error of the kernels package."""

__all__ = ["KernelError"]


class KernelError(ValueError):
    """A kernel cannot be built as asked; the message says what to do instead."""
