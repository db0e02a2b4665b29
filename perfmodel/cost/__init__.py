"""What a network costs under a strategy: time, traffic and memory per rank, by arithmetic over axes."""

from halograd.dtensor import Blocks
from halograd.perfmodel.cost.account import count_step, memory_of, program_of
from halograd.perfmodel.cost.blocks import PARTS, Parts, cut, parts_key
from halograd.perfmodel.cost.buckets import buckets_of
from halograd.perfmodel.cost.layer_cost import LayerCost, Pricing, price_layer
from halograd.perfmodel.cost.prediction import LayerRecord, Prediction
from halograd.perfmodel.cost.simulate import Training, simulate
from halograd.perfmodel.cost.wires import Wires

__all__ = [
    "PARTS",
    "Blocks",
    "LayerCost",
    "LayerRecord",
    "Parts",
    "Prediction",
    "Pricing",
    "Training",
    "Wires",
    "buckets_of",
    "count_step",
    "cut",
    "memory_of",
    "parts_key",
    "price_layer",
    "program_of",
    "simulate",
]
