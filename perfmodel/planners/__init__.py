"""Planners: one candidate per layer so that the sum of all costs is smallest and the memory fits.

They know nothing of layers: a `Problem` holds arrays of times [s] and memory [B] per candidate and per pair of
candidates, a `Planner` returns a `Choice`. By name in `PLANNERS`:

``elimination``         the optimum on any graph (Jia et al. 2018, and what goes beyond two nodes)
``shortest_path``       the optimum on lines (Dryden et al. 2019); refuses branches
``longest_path_first``  Dryden's treatment of branches; not optimal
``exhaustive``          looks at everything: the oracle of the others
"""

from .alternatives import Alternatives, next_best
from .elimination import Elimination
from .exhaustive import Exhaustive
from .longest_path import LongestPathFirst
from .planner import NoneFits, Planner
from .problem import Choice, Problem, Work, bytes_text
from .pruning import Pruned, prune
from .shortest_path import ShortestPath

__all__ = [
    "PLANNERS",
    "Alternatives",
    "Choice",
    "Elimination",
    "Exhaustive",
    "LongestPathFirst",
    "NoneFits",
    "Planner",
    "Problem",
    "Pruned",
    "ShortestPath",
    "Work",
    "bytes_text",
    "next_best",
    "prune",
]

PLANNERS: dict[str, type[Planner]] = {
    planner.name: planner for planner in (ShortestPath, LongestPathFirst, Elimination, Exhaustive)
}
