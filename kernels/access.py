"""Declarations of the arrays that a kernel reads and writes, next to its code.

A program derives the lifetimes of arrays from them. ::

    @reads("x", "w", "b")
    @writes("y")
    def conv_forward(geometry, environment, x, w, b, y): ...        # returns a kernel

    class GroupNormKernels:                                         # its methods are run
        @reads("x")
        @writes("sums", "totals", "y")
        def statistics(self): ...

    @makes(forward=Access(("x",), ("y",)), backward=Access(("dy",), ("dx",)))
    def pool(environment, x, y, dy, dx): ...                        # returns an object with these two methods

An array is *read* if the result of the run depends on its contents. It is *written* if the run may change its contents.
An array that is only written may have any contents before. An array that is changed in place is both. A written array
is a result, unless it is declared as workspace, whose contents are undefined after the run.

A run may be repeated in the backward pass to compute its results again (`halograd.program.recompute`). A run with other
effects declares the method that computes its results without them (:func:`again`).

A kernel without a declaration counts as reading and writing all its arrays. This is always correct, but takes more
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

__all__ = ["ANY", "Access", "access_of", "again", "makes", "reads", "writes"]

Declared = TypeVar("Declared", bound=Callable[..., Any])


@dataclass(frozen=True)
class Access:
    """Names of the arrays that a run reads and writes.

    A name that ends with ``*`` matches all names with that prefix: ``"x*"`` matches ``x0``, ``x1``, ... Names of arrays
    that a kernel does not have are ignored.

    Attributes
    ----------
    reads, writes
        Names of the arrays that the run reads, and of those that hold its results.
    work
        Names of workspaces: arrays that are written, and hold no result afterwards.
    again
        Name of the method that computes the results again; None: the run itself.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    work: tuple[str, ...] = ()
    again: str | None = None

    def read(self, names: Iterable[str]) -> list[str]:
        """Return the names of the arrays that are read."""
        return list(_among(tuple(names), self.reads))

    def written(self, names: Iterable[str]) -> list[str]:
        """Return the names of the arrays that are written: results and workspace."""
        return list(_among(tuple(names), self.writes + self.work))

    def results(self, names: Iterable[str]) -> list[str]:
        """Return the names of the arrays that are written and hold results."""
        return list(_among(tuple(names), self.writes))

    def used(self, names: Iterable[str]) -> list[str]:
        """Return the names of the arrays that are read or written."""
        return list(_among(tuple(names), self.reads + self.writes + self.work))


#: Access of a kernel without a declaration.
ANY = Access(("*",), ("*",))


@lru_cache(maxsize=4096)  # programs repeat a few dozen kernels thousands of times
def _among(names: tuple[str, ...], declared: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of `names` that are in `declared`, or begin with a prefix in it."""
    # `startswith` takes a tuple; an empty one matches no name.
    prefixes = tuple(pattern[:-1] for pattern in declared if pattern.endswith("*"))
    return tuple(name for name in names if name in declared or name.startswith(prefixes))


def reads(*names: str) -> Callable[[Declared], Declared]:
    """Declare the arrays that a kernel, or a method of one, reads. Combine it with :func:`writes`, in any order."""
    return _declare(reads=names)


def writes(*names: str, work: tuple[str, ...] = ()) -> Callable[[Declared], Declared]:
    """Declare the arrays that a kernel, or a method of one, writes, and its workspaces `work`. Combine it with
    :func:`reads`, in any order.
    """
    return _declare(writes=names, work=work)


def again(method: str) -> Callable[[Declared], Declared]:
    """Declare the method that computes the results of this method again, without its other effects."""
    return _declare(again=method)


def _declare(**changes: Any) -> Callable[[Declared], Declared]:
    """Return a decorator that changes attributes of the access of a function."""

    def declare(run: Declared) -> Declared:
        # Decorators of one function add up: each changes its own attributes of the access.
        run.__dict__["access"] = replace(run.__dict__.get("access", Access()), **changes)
        return run

    return declare


def makes(kind: type | None = None, **methods: Access) -> Callable[[Declared], Declared]:
    """Declare what a function returns: an object of class `kind`, whose methods have declarations, or an object whose
    methods have the accesses `methods`, by name.
    """

    def declare(make: Declared) -> Declared:
        make.__dict__["makes"] = methods if kind is None else kind
        return make

    return declare


def access_of(make: Callable[..., Any], method: str | None = None) -> Access:
    """Return the access of a kernel that `make` returns, or of one of its methods; :data:`ANY` without a declaration.

    Parameters
    ----------
    make
        Function that returns the kernel, or the kernel's class; arguments may be bound by `functools.partial`.
    method
        Name of the method that runs; None: the kernel itself is called.
    """
    # A `partial` does not have the attributes of its function.
    while isinstance(make, partial):
        make = make.func
    if isinstance(make, type):
        access = getattr(make, method or "__call__", None)
    elif method is None:
        # An object without a name is called by its class, whose `__call__` is declared.
        access = make if hasattr(make, "__name__") else type(make).__call__
    else:
        methods = getattr(make, "makes", {})
        access = getattr(methods, method, None) if isinstance(methods, type) else methods.get(method)
    # `makes` may hold the access itself; declared functions and methods have it as an attribute.
    return access if isinstance(access, Access) else getattr(access, "access", ANY)
