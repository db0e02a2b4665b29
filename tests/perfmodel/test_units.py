"""Quantities with units: what is read, what is refused, and that nothing is lost on the way back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.perfmodel.machine_file import UNITS, format_quantity, parse_quantity


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("1.2 us", "s", 1.2e-6),
        ("8 µs", "s", 8e-6),
        ("5ms", "s", 5e-3),
        ("0 s", "s", 0.0),
        ("38.93 ps/B", "s/B", 3.893e-11),
        ("1e-9 s/B", "s/B", 1e-9),
        ("16 GiB", "B", 16 * 2**30),
        ("16GB", "B", 16e9),
        (" 900 GB/s ", "B/s", 900e9),
        ("300 Mflop", "flop", 3e8),
        ("15.7 Tflop/s", "flop/s", 15.7e12),
        (".5 Pflop/s", "flop/s", 5e14),
    ],
)
def test_value(text: str, unit: str, value: float) -> None:
    assert parse_quantity(text, unit) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "unit", "remedy"),
    [
        (5, "s", "write a number and a unit in quotes"),
        ("fast", "s", "write a number and a unit in quotes"),
        ("", "s", "write a number and a unit in quotes"),
        ("5", "s", "the unit must be one of ps, ns, us"),
        ("5 GB", "s", "the unit must be one of ps, ns, us"),
        ("100 Gb/s", "B/s", "the unit must be one of B/s, kB/s"),
        ("16 gib", "B", "GiB"),
        ("-1 us", "s", "it must be finite and not negative"),
        ("1e999 s", "s", "it must be finite and not negative"),
    ],
)
def test_refusal(text: object, unit: str, remedy: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_quantity(text, unit)
    message = str(caught.value)
    assert message.startswith(f"expected {UNITS[unit][0]} with its unit") and f"got {text!r}" in message
    assert remedy in message and "\n" not in message


@given(st.floats(min_value=0, allow_nan=False, allow_infinity=False), st.sampled_from(sorted(UNITS)))
def test_round_trip(value: float, unit: str) -> None:
    again = parse_quantity(format_quantity(value, unit), unit)
    assert again == value and math.copysign(1, again) > 0
