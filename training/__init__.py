"""Training: execution of a strategy, the trainer, optimizers, schedules, checkpoints, metrics, timelines.

Names are imported at first use, so that plain data (:class:`Strategy`) are available without MPI.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..layers import Strategy
    from .checkpoint import Snapshot, TrainingProgress, read_checkpoint, write_checkpoint
    from .config import Config, load_config
    from .evaluation import Evaluation
    from .executor import Executor
    from .metrics import METRICS, Confusion, Metric
    from .optimizers import LAMB, LARS, OPTIMIZERS, SGD, Adam, AdamW, Lion, Optimizer, OptimizerSettings
    from .run import train
    from .schedules import (
        SCHEDULES,
        Constant,
        Cosine,
        Linear,
        OneCycle,
        Plateau,
        Polynomial,
        Schedule,
        ScheduleSettings,
        StepDecay,
        TrainingSpan,
        WarmUp,
    )
    from .store import ParameterStore
    from .timeline import Timeline, write_trace
    from .trained import apply, evaluate
    from .trainer import Diverged, Trainer

__all__ = [
    "LAMB",
    "LARS",
    "METRICS",
    "OPTIMIZERS",
    "SCHEDULES",
    "SGD",
    "Adam",
    "AdamW",
    "Config",
    "Confusion",
    "Constant",
    "Cosine",
    "Diverged",
    "Evaluation",
    "Executor",
    "Linear",
    "Lion",
    "Metric",
    "OneCycle",
    "Optimizer",
    "OptimizerSettings",
    "ParameterStore",
    "Plateau",
    "Polynomial",
    "Schedule",
    "ScheduleSettings",
    "Snapshot",
    "StepDecay",
    "Strategy",
    "Timeline",
    "Trainer",
    "TrainingProgress",
    "TrainingSpan",
    "WarmUp",
    "apply",
    "evaluate",
    "load_config",
    "read_checkpoint",
    "train",
    "write_checkpoint",
    "write_trace",
]

_HOMES = {
    "checkpoint": ("TrainingProgress", "Snapshot", "read_checkpoint", "write_checkpoint"),
    "config": ("Config", "load_config"),
    "evaluation": ("Evaluation",),
    "executor": ("Executor",),
    "metrics": ("METRICS", "Confusion", "Metric"),
    "optimizers": ("LAMB", "LARS", "OPTIMIZERS", "SGD", "Adam", "AdamW", "Lion", "Optimizer", "OptimizerSettings"),
    "run": ("train",),
    "trained": ("apply", "evaluate"),
    "schedules": (
        *("SCHEDULES", "Constant", "Cosine", "Linear", "OneCycle", "Plateau", "Polynomial", "Schedule"),
        *("ScheduleSettings", "StepDecay", "TrainingSpan", "WarmUp"),
    ),
    "store": ("ParameterStore",),
    "halograd.layers": ("Strategy",),
    "timeline": ("Timeline", "write_trace"),
    "trainer": ("Diverged", "Trainer"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        home = _HOME[name]
        return getattr(importlib.import_module(home if "." in home else f"halograd.training.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
