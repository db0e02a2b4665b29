"""Planners: they choose one candidate per layer so that the sum of all costs is minimal and the memory fits.

Planners do not depend on layers: a `Problem` holds arrays of times [s] and memory [B] per candidate and per pair of
candidates, and a `Planner` returns a `Selection`. `PLANNERS` holds them by name:

``elimination``         the optimum on any graph (Jia et al. 2018, extended beyond two neighbors)
``shortest_path``       the optimum on chains (Dryden et al. 2019); rejects branches
``longest_path_first``  Dryden's treatment of branches; not optimal
``exhaustive``          enumerates all choices: the oracle of the others
"""

from halograd.registry import Registry

from .elimination import Elimination, next_best
from .paths import LongestPathFirst, ShortestPath
from .problem import Chooser, Effort, NoneFits, Planner, PlanSearch, Problem, Pruned, Selection, prune
from .search import Exhaustive

__all__ = [
    "PLANNERS",
    "Chooser",
    "Effort",
    "Elimination",
    "Exhaustive",
    "LongestPathFirst",
    "NoneFits",
    "PlanSearch",
    "Planner",
    "Problem",
    "Pruned",
    "Selection",
    "ShortestPath",
    "next_best",
    "prune",
]

#: The planners, and the baselines of :mod:`halograd.perfmodel.cuts`.
PLANNERS: Registry[Chooser] = Registry("planner", Chooser, key="strategy.planner")
for _planner in (ShortestPath, LongestPathFirst, Elimination, Exhaustive):
    PLANNERS.register(_planner)
