"""Gradient reduction: who sums which gradients when, by name of the scheme."""

from halograd.training.reduction.base import Reducer
from halograd.training.reduction.bucketed import BucketedReducer
from halograd.training.reduction.make import make_reducer

__all__ = ["BucketedReducer", "Reducer", "make_reducer"]
