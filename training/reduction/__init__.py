"""Gradient reduction: who sums which gradients when, by name of the scheme."""

from .reducer import Reducer, check_possible

__all__ = ["Reducer", "check_possible"]
