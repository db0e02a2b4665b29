"""Parametrized tests of rejected input, one case per mistake."""

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
    """Return a test that `call` with each case's first item raises `error` with the message of its second item.

    By default `call` calls the first item. The second item is a pattern, or the text itself if `literal` is set.
    """

    @pytest.mark.parametrize(("wrong", "message"), cases)
    def test(wrong: Any, message: str) -> None:
        with pytest.raises(error, match=re.escape(message) if literal else message):
            call(wrong)

    return test
