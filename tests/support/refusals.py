"""Tests of what is refused, one per mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["refusals"]


def refusals(
    *cases: tuple[Any, str],
    call: Callable[[Any], object] = lambda make: make(),
    error: type[Exception] | tuple[type[Exception], ...] = ValueError,
) -> Callable[..., None]:
    """A test that `call` of the first of each pair, by default its own call, raises `error` with the second."""

    @pytest.mark.parametrize(("wrong", "message"), cases)
    def test(wrong: Any, message: str) -> None:
        with pytest.raises(error, match=message):
            call(wrong)

    return test
