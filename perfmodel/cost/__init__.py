"""Prediction of the time, traffic and memory of a network under a strategy, per rank, without execution."""

from ..plans import LayerRecord, Prediction
from .account import count_program, count_step, memory_of, program_of
from .network_model import NetworkModel
from .pricing import Pricing
from .simulate import Training, simulate
from .timeline import LayerCost, price_layer

__all__ = [
    "LayerCost",
    "LayerRecord",
    "NetworkModel",
    "Prediction",
    "Pricing",
    "Training",
    "count_program",
    "count_step",
    "memory_of",
    "price_layer",
    "program_of",
    "simulate",
]
