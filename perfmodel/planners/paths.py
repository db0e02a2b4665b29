"""Dynamic programming along one path: the step that Dryden's two planners share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .problem import Array, Edge, Problem

__all__ = ["best_along", "branching", "inputs_of", "lines"]


def best_along(own: Sequence[Array], between: Callable[[int], Array | None]) -> tuple[float, list[int]]:
    """The shortest path through one candidate of each layer of a path (Dryden et al. 2019, Section V-C).

    Parameters
    ----------
    own
        Cost per layer of the path, ``[candidates]``.
    between
        ``between(i)``: cost between layers ``i`` and ``i + 1`` of the path, ``[candidates, candidates]``; None: none.

    Returns
    -------
    tuple
        Total, and candidate per layer.
    """
    reach = own[0]  # cheapest way to each candidate of the layer so far
    came_from = []
    for i in range(1, len(own)):
        table = between(i - 1)
        steps = reach[:, None] + (np.zeros((1, len(own[i]))) if table is None else table)
        came_from.append(steps.argmin(axis=0))
        reach = steps.min(axis=0) + own[i]
    indices = [int(reach.argmin())]
    for best in reversed(came_from):
        indices.append(int(best[indices[-1]]))
    return float(reach.min()), indices[::-1]


def inputs_of(count: int, edges: Sequence[Edge]) -> tuple[list[list[int]], list[list[int]]]:
    """Per layer, the layers it reads and those that read it."""
    inputs: list[list[int]] = [[] for _ in range(count)]
    outputs: list[list[int]] = [[] for _ in range(count)]
    for u, v in edges:
        inputs[v].append(u)
        outputs[u].append(v)
    return inputs, outputs


def branching(problem: Problem) -> int | None:
    """First layer that reads, or is read by, more than one other; None in a network of lines."""
    inputs, outputs = inputs_of(len(problem.names), list(problem.edges))
    return next((v for v in range(len(inputs)) if len(inputs[v]) > 1 or len(outputs[v]) > 1), None)


def lines(problem: Problem) -> list[list[int]]:
    """The lines a network without branches consists of."""
    inputs, outputs = inputs_of(len(problem.names), list(problem.edges))
    found = []
    for v in range(len(inputs)):
        if not inputs[v]:
            path = [v]
            while outputs[path[-1]]:
                path.append(outputs[path[-1]][0])
            found.append(path)
    return found
