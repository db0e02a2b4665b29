"""What a network costs under a strategy: time, traffic and memory per rank, by arithmetic over axes."""

from halograd.perfmodel.cost.account import count_step, memory_of, program_of
from halograd.perfmodel.cost.layer_cost import LayerCost, Pricing, price_layer
from halograd.perfmodel.cost.simulate import Training, simulate
from halograd.perfmodel.cost.timeline import buckets_of
from halograd.perfmodel.cost.wires import Wires
from halograd.perfmodel.plans import LayerRecord, Prediction

__all__ = [
    "LayerCost",
    "LayerRecord",
    "Prediction",
    "Pricing",
    "Training",
    "Wires",
    "buckets_of",
    "count_step",
    "memory_of",
    "price_layer",
    "program_of",
    "simulate",
]
