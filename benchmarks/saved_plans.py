"""Plans before and after a change of the planner: the same ones, or faster ones?

    python benchmarks/saved_plans.py save /tmp/plans.json
    python benchmarks/saved_plans.py compare /tmp/plans.json

The cases are networks on numbers of ranks of machines, without a limit of memory, and within a part of the memory of
the plan without one. `compare` prints every plan that differs, and fails if a step became slower.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

from halograd.errors import UserError
from halograd.models import build
from halograd.perfmodel.kernel_times import RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.predict import Planning, plan_network

#: Relative difference below which times are equal.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Case:
    """Network, batch, ranks and machine of a plan; `parts` are limits as parts of the memory of the first plan."""

    model: str
    batch: int
    ranks: int
    machine: str
    options: dict[str, Any] = field(default_factory=dict)
    parts: tuple[float, ...] = ()
    emulated: tuple[float, float] | None = None

    def __str__(self) -> str:
        slow = "" if self.emulated is None else f", emulated {self.emulated[0]:g} s"
        return f"{self.model}, batch {self.batch}, {self.ranks} x {self.machine}{slow}"


CASES = (
    Case("mesh_2k", 4, 16, "lassen"),
    Case("mesh_2k", 4, 512, "lassen"),
    Case("mesh_1k", 2, 16, "k80-node", {"resolution": 512}, (0.7,)),
    Case("mesh_1k", 1, 4, "lassen", {"resolution": 512}, (0.8, 0.5), (1e-4, 1e-9)),
    Case("resnet50", 8, 32, "lassen"),
    Case("resnet50", 64, 16, "dgx-h100", parts=(0.6,)),
    Case("resnet50", 1, 2, "cori-haswell"),
    Case("inception_v3", 64, 64, "lassen"),
    Case("vgg_a", 16, 16, "p100-cluster"),
    Case("vgg_a", 128, 128, "cori-haswell"),
    Case("alexnet", 64, 8, "lassen"),
    Case("unet2d", 2, 8, "dgx-h100", {"resolution": 256}, (0.6,)),
    Case("unet3d", 1, 8, "lassen", {"resolution": 64}, (0.6,)),
    Case("swin_t", 8, 8, "dgx-h100"),
    Case("vit_b_16", 4, 4, "lassen"),
)


def plans(cases: tuple[Case, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each case with what was planned, or refused."""
    for case in cases:
        network, machine = build(case.model, **case.options), Machine.load(case.machine)
        if case.emulated is not None:
            machine = machine.emulated(*case.emulated)
        memory = None
        for part in (None, *case.parts):
            limit = None if part is None or memory is None else part * memory
            began = time.process_time()
            planning, name = Planning(limit=limit), f"{case}" + ("" if part is None else f", {part:.0%} of the memory")
            try:
                plan = plan_network(network, case.batch, case.ranks, machine, RooflineTimes(machine), planning)
            except UserError as fault:
                yield name, {"fault": str(fault), "cpu": time.process_time() - began}
                continue
            memory = memory or plan.prediction.memory_bytes
            found = {key: value for key, value in plan.as_dict().items() if key != "planning_seconds"}
            yield name, {**json.loads(json.dumps(found)), "cpu": time.process_time() - began}


def difference(old: dict[str, Any], new: dict[str, Any]) -> tuple[str, bool]:
    """Return what differs between two plans of one case, and whether the new one is worse."""
    old, new = ({key: value for key, value in one.items() if key != "cpu"} for one in (old, new))
    if old == new:
        return "", False
    if "fault" in new:
        return new["fault"], "fault" not in old
    if "fault" in old:
        return "now there is a plan", False
    before, now = old["prediction"]["step_seconds"], new["prediction"]["step_seconds"]
    keys = ", ".join(key for key in new if new[key] != old.get(key))
    return f"{keys}: {before:.6g} s, now {now:.6g} s ({now / before - 1:+.2%})", now > before * (1 + ROUNDING)


def main() -> int:
    """Save or compare plans; the last line has the processor time of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("save", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="Part of the names of cases.")
    options = parser.parse_args()
    known = json.loads(options.file.read_text()) if options.action == "compare" else {}
    made, worse, changed = {}, 0, 0
    for name, found in plans(tuple(case for case in CASES if options.only in str(case))):
        made[name] = found
        if options.action == "save":
            print(f"{name}: {found['cpu']:.2f} CPU s", flush=True)
            continue
        text, slower = difference(known[name], found)
        worse, changed = worse + slower, changed + bool(text)
        print(f"{name}: {known[name]['cpu']:.2f} -> {found['cpu']:.2f} CPU s  {text}", flush=True)
    if options.action == "save":
        options.file.write_text(json.dumps(made))
    cpu = [sum(one["cpu"] for name, one in some.items() if name in made) for some in (known, made)]
    print(f"{len(made)} plans, {changed} changed, {worse} worse; {cpu[0]:.1f} -> {cpu[1]:.1f} CPU s")
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main())
