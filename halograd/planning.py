"""Planning of a model: its network, a machine, times of kernels, the plan, and baselines for comparison.

The commands, which plan for any machine, and ``strategy = "auto"`` (`halograd.auto`), which plans for the current
ranks, both use this module. It does not use MPI.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from .documents import shown
from .errors import UserError
from .layers import Network
from .models import build
from .perfmodel.cost import NetworkModel, Pricing, Training, simulate
from .perfmodel.cuts import BASELINES, GRID, baseline
from .perfmodel.kernel_times import KernelTimes, MeasuredTimes, RooflineTimes
from .perfmodel.machine import Machine
from .perfmodel.planners import PLANNERS
from .perfmodel.plans import Alternative, Plan, Request
from .perfmodel.predict import Planning, plan_network, quick_pricing
from .perfmodel.quantities import Bytes
from .perfmodel.robust import RobustPlan, plan_robust
from .schema import build as read
from .schema import nearest
from .training.optimizers import OPTIMIZERS, OptimizerSettings

__all__ = [
    "AHEAD",
    "PlanRequest",
    "baselines_of",
    "check_planner",
    "known_baselines",
    "make_plan",
    "make_robust_plan",
    "parse_memory",
    "planned_settings",
    "source_of",
    "training_of",
]

#: Number of batches that a run with default settings reads ahead (`data.prefetch` + 1).
AHEAD = 2
#: Form of the entry `device` in a machine file that `halograd profile` has written.
_DEVICE = re.compile(r"(?P<device>.*); (?P<kernels>\w+) (?P<version>.*), (?P<threads>\d+) thread\(s\)")


@dataclass(frozen=True)
class PlanRequest:
    """Model and machine of a plan request, with the times of kernels.

    Attributes
    ----------
    model, options, network
        Name of the model, its options, and the network.
    machine, machine_file
        The machine, and its name or the path of its file.
    dtype
        Dtype of the computation.
    cache
        Folder of measured times; None: the default.
    """

    model: str
    options: Mapping[str, Any]
    network: Network
    machine: Machine
    machine_file: str
    dtype: str
    cache: Path | None = None

    @classmethod
    def of(
        cls,
        model: str,
        options: Mapping[str, Any],
        machine_file: str,
        dtype: str,
        cache: Path | None = None,
        machine: Machine | None = None,
    ) -> PlanRequest:
        """Build the model, and read the machine.

        Parameters
        ----------
        machine_file
            Name of the machine, or the path of its file.
        machine
            The machine, if it was read already.

        Raises
        ------
        UserError
            There is no such model or machine, the model has no loss, or the machine has no rate for `dtype`.
        """
        network = build(model, **options)
        if "loss" not in network.outputs:
            raise UserError(f"model: expected a network with a loss to train, got {model!r} without one")
        described = machine or Machine.load(machine_file)
        if dtype not in described.peak_flops:
            raise UserError(
                f"--dtype: expected one of {', '.join(described.peak_flops)}, for which machine {described.name!r} "
                f"has a peak, got {shown(dtype)}; add it to [device.peak_flops] of a copy of the machine file"
            )
        return cls(model, options, network, described, machine_file, dtype, cache)

    def times(self, batch: int, ranks: int) -> KernelTimes:
        """Return kernel times for this batch and number of ranks: measured times, else those of the roofline."""
        return _measured(self, batch, ranks) or self._quick.times

    @cached_property
    def _quick(self) -> Pricing:
        """Cost model of candidates with roofline times, common to plans for several numbers of ranks."""
        return quick_pricing(self.machine, RooflineTimes(self.machine), self.dtype)

    def quick(self, times: KernelTimes) -> Pricing | None:
        """Return the common cost model of candidates if `times` are its kernel times, else None."""
        return self._quick if times is self._quick.times else None

    def pricing(self, batch: int, ranks: int) -> Pricing:
        """Return the cost model of a step of `batch` samples on `ranks` ranks, each layer with its fastest halo
        algorithm.
        """
        return Pricing(NetworkModel(self.machine), self.times(batch, ranks), self.dtype, best_halo=True)


def _measured(plan_request: PlanRequest, batch: int, ranks: int) -> KernelTimes | None:
    """Return times from the cache if `halograd profile` measured the machine file on this machine, else None."""
    from .perfmodel.profile.record import Profile, record_path

    # `halograd profile` writes device, library and threads in this form; other machine files have no times.
    match = _DEVICE.fullmatch(plan_request.machine.device)
    if (
        # The name of a shipped machine has no suffix.
        Path(plan_request.machine_file).suffix != ".toml"
        or not record_path(plan_request.machine_file).exists()
        or match is None
    ):
        return None
    from .kernels import BACKENDS, BackendOptions, KernelError
    from .perfmodel.profile.cache import Conditions, Oversubscription, TimeCache, cache_path, device_name
    from .perfmodel.profile.layers import passing_bytes

    try:
        backend = BACKENDS[match["kernels"]].open(BackendOptions(int(match["threads"])))
    except (KernelError, UserError):
        return None
    with backend:
        # Measured on another machine: its times are not in the cache here.
        if device_name(backend) != match["device"]:
            return None
        record = Profile.load(plan_request.machine_file)
        # The nodes of an emulated network are one host, on which all ranks were measured at once.
        at_once = record.ranks if plan_request.machine.has_emulated_links else plan_request.machine.devices_per_node
        flush = passing_bytes(plan_request.network, batch, ranks, plan_request.dtype)
        conditions = Conditions.here(
            backend, Oversubscription.here(min(ranks, at_once), backend), record.autotune, flush
        )
    return MeasuredTimes(TimeCache(cache_path(plan_request.cache)), conditions, RooflineTimes(plan_request.machine))


def source_of(times: KernelTimes, machine: Machine) -> str:
    """Return a string about the source of kernel times. Call it after all times were requested."""
    if not isinstance(times, MeasuredTimes):
        return f"roofline of {machine.name}"
    left = len(times.missing)
    return "measured here" + (
        f", {left} shapes of layers by roofline (`halograd profile` measures them)" if left else ""
    )


def check_planner(name: str, at: str = "--planner") -> None:
    """Raise UserError for an unknown planner; `at` is the name of the option or key."""
    PLANNERS.find(name, at)


def training_of(dtype: str, optimizer: str) -> Training:
    """Return the settings of training that determine memory and update costs, by dtype and name of the optimizer."""
    if optimizer not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS.names)
        raise UserError(
            f'--optimizer: expected one of {known}, or "FILE.py:CLASS", got {shown(optimizer)}'
            f"{nearest(optimizer, OPTIMIZERS.names)}"
        )
    return Training(dtype, len(OPTIMIZERS[optimizer].states(planned_settings(optimizer))), ahead=AHEAD)


def planned_settings(optimizer: str) -> OptimizerSettings:
    """Return the settings with which plans count the state of an optimizer, which is given by name or location."""
    table = {"kind": optimizer, **OPTIMIZERS[optimizer].planned}
    settings: OptimizerSettings = OPTIMIZERS.settings(optimizer, table, "optimizer")
    return settings


def parse_memory(text: str | None, at: str = "--memory") -> float | None:
    """Return the size [B] that a string such as ``16GiB`` gives; None for None. Raises UserError for other strings."""
    return None if text is None else read(Bytes, text, at=at)


def make_plan(
    plan_request: PlanRequest,
    batch: int,
    ranks: int,
    planning: Planning | None = None,
    times: KernelTimes | None = None,
) -> Plan:
    """Plan a model on a machine. The plan records the request. Local.

    Parameters
    ----------
    times
        Kernel times; None: those of `plan_request`.

    Raises
    ------
    UserError
        See :func:`halograd.perfmodel.predict.plan_network`.
    """
    planning = planning or Planning(training=Training(plan_request.dtype, ahead=AHEAD))
    times = times or plan_request.times(batch, ranks)
    plan = plan_network(
        plan_request.network, batch, ranks, plan_request.machine, times, planning, plan_request.quick(times)
    )
    return _with_request(plan, plan_request, planning, times)


def make_robust_plan(
    plan_request: PlanRequest, batch: int, ranks: int, planning: Planning, times: KernelTimes | None = None
) -> RobustPlan:
    """Plan a model for a machine whose numbers may be wrong (:mod:`halograd.perfmodel.robust`). Local.

    Parameters
    ----------
    times
        Kernel times; None: those of `plan_request`.

    Raises
    ------
    UserError
        See :func:`halograd.perfmodel.robust.plan_robust`.
    """
    times = times or plan_request.times(batch, ranks)
    robust = plan_robust(plan_request.network, batch, ranks, plan_request.machine, times, planning)
    return replace(robust, plan=_with_request(robust.plan, plan_request, planning, times))


def _with_request(plan: Plan, plan_request: PlanRequest, planning: Planning, times: KernelTimes) -> Plan:
    request = Request(
        plan_request.model,
        dict(plan_request.options),
        # The machine itself: its file may have changed when the plan is explained.
        plan_request.machine.to_toml(),
        plan_request.machine_file,
        source_of(times, plan_request.machine),
        planning.full,
        planning.training.slots,
    )
    return replace(plan, request=request)


def baselines_of(plan_request: PlanRequest, plan: Plan) -> list[Alternative]:
    """Return the predicted step under each baseline, and under the best grid if the plan searched for it."""
    known = {a.name: a for a in known_baselines(plan)}
    left = [name for name in BASELINES if name not in known]
    # Opens the backend and the cache of measured times, so only if it is needed.
    pricing = plan_request.pricing(plan.batch, plan.ranks) if left else None
    # A plan without request does not name its optimizer: one array of state, as for SGD with momentum.
    slots = 1 if plan.request is None else plan.request.slots
    training = Training(plan.dtype, slots, ahead=AHEAD)
    for name in left:
        assert pricing is not None
        strategy = baseline(name, plan_request.network, plan.batch, plan.ranks, plan.strategy.bucket_bytes)
        prediction = simulate(plan_request.network, strategy, plan.batch, pricing, training, plan.ranks)
        nbytes = prediction.memory_bytes
        limit = plan_request.machine.memory if plan.limit is None else plan.limit
        known[name] = Alternative(name, prediction.step_seconds, nbytes, nbytes <= limit)
    return [known[name] for name in (*BASELINES, GRID) if name in known]


def known_baselines(plan: Plan) -> list[Alternative]:
    """Return the baselines that the plan has simulated, and the best grid if the plan searched for it."""
    known = {a.name: a for a in plan.alternatives}
    return [known[name] for name in (*BASELINES, GRID) if name in known]
