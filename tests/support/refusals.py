"""Tests of what is refused, one per mistake."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["refusals"]


def refusals(
    *cases: tuple[Any, str],
    call: Callable[[Any], object] = lambda make: make(),
    error: type[Exception] | tuple[type[Exception], ...] = ValueError,
    literal: bool = False,
) -> Callable[..., None]:
    """A test that `call` of the first of each pair, by default its own call, raises `error` with the second.

    The second is a pattern, or in `literal` cases the text itself.
    """

    @pytest.mark.parametrize(("wrong", "message"), cases)
    def test(wrong: Any, message: str) -> None:
        with pytest.raises(error, match=re.escape(message) if literal else message):
            call(wrong)

    return test
