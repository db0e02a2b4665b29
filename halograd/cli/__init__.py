"""The command line. Commands parse their arguments, call the library, and print on rank 0."""

from .run import main

__all__ = ["main"]
