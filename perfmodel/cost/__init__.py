"""What a network costs under a strategy: time, traffic and memory per rank, by arithmetic over axes."""

from halograd.dtensor import Blocks
from halograd.perfmodel.cost.blocks import PARTS, Parts, cut, parts_key
from halograd.perfmodel.cost.counts import count_step
from halograd.perfmodel.cost.layer_cost import LayerCost, Pricing, layer_cost
from halograd.perfmodel.cost.memory import memory_of
from halograd.perfmodel.cost.parameters import buckets_of
from halograd.perfmodel.cost.prediction import LayerRecord, Prediction
from halograd.perfmodel.cost.simulate import Training, simulate
from halograd.perfmodel.cost.stages import Stage, stages
from halograd.perfmodel.cost.traffic import Move, Traffic
from halograd.perfmodel.cost.wires import Wires

__all__ = [
    "PARTS",
    "Blocks",
    "LayerCost",
    "LayerRecord",
    "Move",
    "Parts",
    "Prediction",
    "Pricing",
    "Stage",
    "Traffic",
    "Training",
    "Wires",
    "buckets_of",
    "count_step",
    "cut",
    "layer_cost",
    "memory_of",
    "parts_key",
    "simulate",
    "stages",
]
