"""The command line. Commands are thin: they parse, call the library, and print on rank 0."""

from .run import main

__all__ = ["main"]
