"""Checks that methods of user classes take the arguments that the library passes, before the library calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from .errors import UserError

__all__ = ["check_methods", "is_ours"]


def check_methods(
    instance: Any,
    several: int = 0,
    counts: Mapping[str, int] | None = None,
    optional: Collection[str] = (),
    base: type | None = None,
) -> None:
    """Check that methods of a user's class take the arguments of the methods that they override. Local.

    Private methods, methods of the library, and overrides of methods with ``**keywords``, are not checked.

    Parameters
    ----------
    instance
        An object; the library's own classes are not checked.
    several
        Number of arguments that ``*shapes`` stands for; `counts` has other numbers for some methods.
    optional
        Names of arguments with defaults that the library passes.
    base
        Class of the library, or protocol, with the methods; None: the first class of the library among
        the bases of the object's class.

    Raises
    ------
    UserError
        A method takes other arguments; the message has the expected and the actual ones.
    """
    if is_ours(type(instance)):
        return
    base = base or next((kind for kind in type(instance).__mro__ if is_ours(kind)), object)
    for name, method in inspect.getmembers(base, inspect.isfunction):
        # Static, so that a descriptor of the user is not called.
        own = inspect.getattr_static(type(instance), name, None)
        if own is method or name.startswith("_") or is_ours(own):
            continue
        call = _call_of(method, (counts or {}).get(name, several), optional)
        if call is not None:
            _check(f"{type(instance).__name__}.{name}", getattr(instance, name), *call)


def is_ours(thing: Any) -> bool:
    """Return whether a class, or a method of a class, is the library's."""
    return str(getattr(thing, "__module__", "")).startswith("halograd.")


def _call_of(
    method: Callable[..., Any], several: int, optional: Collection[str]
) -> tuple[list[str], dict[str, None]] | None:
    """Return the arguments that the library passes to a method, positional and named; None if any are allowed."""
    fixed, named = list[str](), dict[str, None]()
    # Without self; arguments with defaults are passed only if they are `optional`.
    for parameter in list(inspect.signature(method).parameters.values())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            return None
        if parameter.kind is parameter.VAR_POSITIONAL:
            # Names for the message only: ``*shapes`` of two inputs is shown as shape0, shape1.
            stem = parameter.name.removesuffix("s")
            fixed += [f"{stem}{k}" if several > 1 else stem for k in range(several)]
        elif parameter.default is parameter.empty:
            fixed.append(parameter.name)
        elif parameter.name in optional:
            named[parameter.name] = None
    return fixed, named


def _check(where: str, method: Any, fixed: list[str], named: dict[str, None]) -> None:
    got = repr(method)
    try:
        signature = inspect.signature(method)
        got = f"(self, {str(signature)[1:]}" if signature.parameters else "(self)"
        signature.bind(*fixed, **named)
    except (TypeError, ValueError) as error:
        expected = ", ".join(["self", *fixed, *(f"{name}=None" for name in named)])
        raise UserError(f"{where}: expected a method that takes ({expected}), got {got}: {error}") from None
