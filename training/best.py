"""Which validation was the best so far, and when to stop because none was better for long."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from halograd.errors import UserError

__all__ = ["BestScore"]

#: Scores of which less is better; of all others, which count what is right, more is.
_LESS = ("loss", "mae", "rmse")


class BestScore:
    """The best validation by one score. Local; alike on all ranks, as validations are.

    Parameters
    ----------
    name
        Of the score, one of `names`; ``"none"``: no validation is the best.
    names
        Scores of a validation; empty: nothing is held out.
    patience
        Validations without a better one after which training ends; 0: it does not.

    Raises
    ------
    UserError
        Another name; patience without validations or without a score.
    """

    def __init__(self, name: str, names: Collection[str], patience: int = 0) -> None:
        if names and name not in (*names, "none"):
            raise UserError(f"output.best: expected one of {', '.join([*names, 'none'])}, got {name!r}")
        if patience and (not names or name == "none"):
            wrong = "none" if names else "data.validation = 0"
            raise UserError(
                f"training.patience: expected held-out samples and a score to judge them by (output.best), got {wrong}"
            )
        self.name, self.patience = name, patience
        self.value, self.step, self.waited = math.nan, 0, 0

    def judge(self, scores: Mapping[str, float | None], step: int) -> bool:
        """Whether this validation, after so many steps, is the best so far."""
        value = scores.get(self.name)
        if self.name == "none":
            return False
        self.waited += 1
        if value is None or math.isnan(value) or not (math.isnan(self.value) or self._better(value)):
            return False
        self.value, self.step, self.waited = value, step, 0
        return True

    def _better(self, value: float) -> bool:
        return value < self.value if self.name.endswith(_LESS) else value > self.value

    @property
    def exhausted(self) -> bool:
        """Whether none was better for as long as `patience` says."""
        return bool(self.patience) and self.waited >= self.patience

    def describe(self) -> str:
        """The best one in words; empty if there is none."""
        return "" if math.isnan(self.value) else f"best {self.name} {self.value:.4f} at step {self.step}"

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers for :meth:`load_state_dict`."""
        value = None if math.isnan(self.value) else self.value
        return {"name": self.name, "value": value, "step": self.step, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, if it is of the same score; else from the beginning."""
        if state.get("name") == self.name:
            value = state["value"]
            self.value = math.nan if value is None else float(value)
            self.step, self.waited = int(state["step"]), int(state["waited"])
