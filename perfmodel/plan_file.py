"""Plan files: a plan together with what was asked for, so that it can be explained, and run, later and elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from halograd.documents import read_json, shown, shown_path
from halograd.errors import UserError
from halograd.files import write_whole
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.predict import Plan
from halograd.schema import STRICT, build

__all__ = ["PlanFile", "Request", "is_plan"]

_MARK = "halograd_plan"
_VERSION = 1
#: What `Prediction.as_dict`, and `halograd plan --json`, say beside what they know.
_DERIVED = ("units", "memory_bytes")
_PRINTED = ("step_seconds", "baselines")


@dataclass(frozen=True)
class Request:
    """What a plan was asked for.

    Attributes
    ----------
    model, options
        Name of the model, and the options it was made with.
    machine
        The machine file's text: the plan can be explained where the file is not.
    machine_file
        Name or path under which the machine was asked for.
    kernel_times
        Where the kernels' times come from, in words.
    full
        Whether every legal cut was looked at.
    slots
        Arrays of the parameters' size that the optimizer keeps.
    """

    __pydantic_config__ = STRICT

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    machine: str = ""
    machine_file: str = ""
    kernel_times: str = ""
    full: bool = False
    slots: Annotated[int, Field(ge=0, le=8)] = 1

    def load_machine(self) -> Machine:
        """The machine that was planned for, as it was then."""
        from halograd.perfmodel.machine_file import parse_machine

        return parse_machine(self.machine, f"machine {self.machine_file} in the plan")


@dataclass(frozen=True)
class PlanFile:
    """A plan and its request, as one file of JSON.

    Attributes
    ----------
    plan
        The strategy, and what was predicted of it.
    request
        None in a file that :meth:`Plan.save` wrote from Python.
    """

    plan: Plan
    request: Request | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; times in [s], memory in [B]."""
        plan = self.plan
        data = {k: v for k, v in vars(plan).items() if k not in ("strategy", "prediction", "alternatives")}
        data["strategy"] = asdict(plan.strategy)
        data["prediction"] = plan.prediction.as_dict()
        data["alternatives"] = [asdict(a) for a in plan.alternatives]
        if self.request is not None:
            data["request"] = asdict(self.request)
        return {_MARK: _VERSION, **data}

    def save(self, path: str | Path) -> None:
        """Write the file.

        Raises
        ------
        UserError
            If it cannot be written.
        """
        try:
            write_whole(path, json.dumps(self.as_dict(), indent=1) + "\n")
        except OSError as error:
            raise UserError(
                f"plan {path}: expected a path that can be written, got an error ({error.strerror}); choose another"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> PlanFile:
        """Read what `save`, or :meth:`Plan.save`, wrote.

        Raises
        ------
        UserError
            The file cannot be read, or is no plan.
        """
        return cls.from_dict(read_json(path, "plan"), f"plan {shown_path(path)}")

    @classmethod
    def from_dict(cls, data: object, source: str = "plan") -> PlanFile:
        """What `as_dict` gave, and `halograd plan --json` printed; `source` is named in errors, as of `load`."""
        if not isinstance(data, dict) or not is_plan(data):
            raise UserError(f"{source}: expected what `halograd plan -o` writes, got {_what(data)}; run that first")
        version = data[_MARK]
        if version is True or version != _VERSION:
            raise UserError(f"{source}: expected version {_VERSION}, got {shown(version)}; run `halograd plan` again")
        own = {k: v for k, v in data.items() if k not in (_MARK, "request", *_PRINTED)}
        if isinstance(own.get("prediction"), dict):
            own["prediction"] = {k: v for k, v in own["prediction"].items() if k not in _DERIVED}
        plan, request = build(Plan, own, source), data.get("request")
        return cls(plan, None if request is None else build(Request, request, source, "request"))


def is_plan(data: object) -> bool:
    """Whether these JSON data are a plan, and not a strategy alone."""
    return isinstance(data, Mapping) and _MARK in data


def _what(data: object) -> str:
    if isinstance(data, Mapping) and set(data) & {"parts", "layers"}:
        return "a strategy without a plan"
    return f"JSON with {', '.join(map(shown, list(data)[:4])) or 'nothing'}" if isinstance(data, dict) else "other JSON"
