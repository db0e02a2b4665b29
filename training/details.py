"""What an evaluation found, class by class, as a file: confusion, scores, calibration."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from halograd.documents import read_json
from halograd.errors import UserError

from ..data.disk import atomic_path, check_writable

__all__ = ["by_class", "check_details", "read_details", "write_details"]

_WRITTEN_BY = "halograd evaluate"


def by_class(counts: np.ndarray) -> list[dict[str, Any]]:
    """Scores of each class of confusion counts ``(K, K)``, rows are the true classes; None where nothing is defined.

    >>> by_class(np.array([[5, 1], [2, 4]]))[1]["iou"]
    0.5714285714285714
    """
    found = []
    for c, numbers in enumerate(zip(np.diagonal(counts), counts.sum(axis=1), counts.sum(axis=0))):
        hits, true, guessed = map(int, numbers)
        found.append(
            {
                "class": c,
                "count": true,
                "predicted": guessed,
                "iou": _ratio(hits, true + guessed - hits),
                "precision": _ratio(hits, guessed),
                "recall": _ratio(hits, true),
                "f1": _ratio(2 * hits, true + guessed),
            }
        )
    return found


def _ratio(above: int, below: int) -> float | None:
    return above / below if below else None


def check_details(path: Path) -> None:
    """See that a file can be written, and that one which is there is of an earlier evaluation. Local."""
    if path.exists():
        read_details(path)
    check_writable(path)


def write_details(path: Path, about: Mapping[str, Any], predictions: list[dict[str, Any]]) -> None:
    """Write JSON: what was evaluated, and what was found of every prediction. Local."""
    found = _finite({"written_by": _WRITTEN_BY, **about, "predictions": predictions})
    text = json.dumps(found, indent=1, allow_nan=False)
    with atomic_path(path) as partial:
        partial.write_text(text + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    """The same with null in place of NaN and infinity, which JSON has not."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list) else value


def read_details(path: Path) -> dict[str, Any]:
    """What :func:`write_details` wrote. Local.

    Raises
    ------
    UserError
        It is something else.
    """
    found = read_json(path, "details")
    if not isinstance(found, dict) or found.get("written_by") != _WRITTEN_BY:
        raise UserError(
            f"details {path}: expected a file that `halograd evaluate --details` wrote, got another; give another path"
        )
    return found
