"""What a plan rests on, to be measured again: of many noisy candidates the fastest was lucky more often than fast."""

from __future__ import annotations

from halograd.layers import Network
from halograd.perfmodel.cost import Training, simulate
from halograd.perfmodel.cost.baselines import BASELINES, baseline
from halograd.perfmodel.kernel_times import KernelTimes, Recorded
from halograd.perfmodel.layer_work import LayerKey, LayerWork
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.predict import Plan

__all__ = ["rests_on"]


def rests_on(
    plan: Plan, network: Network, machine: Machine, times: KernelTimes, training: Training
) -> dict[LayerKey, LayerWork]:
    """The layers on local blocks that decide between a plan and the baselines, by key. Local.

    Among hundreds of candidates, each measured with some error, the minimum prefers those whose error was in their
    favor. Measured again and averaged they lose what was luck, and another plan may be the fastest.

    Parameters
    ----------
    plan, network
        What was chosen, for what.
    machine, times, training
        By which it was predicted.
    """
    recorded = Recorded(times)
    fixed = [baseline(name, network, plan.batch, plan.ranks) for name in BASELINES]
    for strategy in [plan.strategy, *fixed]:
        simulate(network, strategy, plan.batch, machine, recorded, training)
    return recorded.asked
