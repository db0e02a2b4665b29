"""Sweeps: every combination of some values of some keys."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from halograd.documents import parse_option
from halograd.errors import UserError
from halograd.jobs.quoting import one_line, toml

__all__ = ["parse_sweep"]

#: Slurm's own limit of array tasks is 1001 unless a site has raised it.
MOST = 1000


def parse_sweep(options: Sequence[str]) -> list[list[str]]:
    """Overrides of every combination; the last key varies fastest.

    Values are separated by commas; if they hold commas themselves, they are a list in TOML.

    >>> parse_sweep(["training.batch=2,4", "model.widths=[[8], [8, 16]]"])[1]
    ['training.batch=2', 'model.widths=[8, 16]']

    Raises
    ------
    UserError
        A key twice, no value, too many combinations.
    """
    axes: dict[str, list[str]] = {}
    for option in options:
        key, equals, text = (part.strip() for part in one_line("--sweep", option).partition("="))
        if not equals or not key:
            raise UserError(f"--sweep: expected KEY=VALUE,VALUE,..., got {option!a}")
        if key in axes:
            raise UserError(f"--sweep: expected every key once, got {key} twice")
        if key == "output.directory":
            raise UserError(
                "--sweep: expected another key than output.directory: each task has a folder of its own in it"
            )
        axes[key] = _values(key, text)
    combinations = 1
    for values in axes.values():
        combinations *= len(values)
    if combinations > MOST:
        raise UserError(f"--sweep: expected at most {MOST} combinations, got {combinations}; leave values out")
    return [[f"{k}={v}" for k, v in zip(axes, chosen)] for chosen in itertools.product(*axes.values())] if axes else []


def _values(key: str, text: str) -> list[str]:
    if text.startswith("["):
        found = [toml(value) for value in parse_option("--sweep", key, text)]
    else:
        found = [value.strip() for value in text.split(",")]
    if not found or not all(found):
        raise UserError(f"--sweep {key}: expected values separated by commas, got {text!a}")
    if len(set(found)) != len(found):
        raise UserError(f"--sweep {key}: expected every value once, got {text!a}")
    return found
