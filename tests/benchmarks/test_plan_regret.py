"""Tests of the benchmark of regrets: its file of references."""

import json
import sys

import pytest

from benchmarks import plan_regret
from halograd.layers import Strategy


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Function that runs the benchmark, with one small case and a given plan, and returns its output and references."""
    path = tmp_path / "references.json"
    monkeypatch.setattr(plan_regret, "NETWORKS", {"mesh_1k": ({"resolution": 256}, 2)})
    monkeypatch.setattr(plan_regret, "MACHINES", ((4, "lassen"),))

    def run(strategy, *options):
        monkeypatch.setattr(plan_regret.Cell, "plan", lambda cell, one: strategy)
        monkeypatch.setattr(sys, "argv", ["plan_regret.py", "--references", str(path), *options])
        plan_regret.main()
        return capsys.readouterr().out, json.loads(path.read_text()) if path.exists() else {}

    return run


def test_regrets_are_relative_to_stored_references(run):
    fast, slow = Strategy({"sample": 2, "height": 2}), Strategy({"sample": 1})
    cell = plan_regret.Cell("mesh_1k", 4, "lassen")
    assert list(run(slow, "--update")[1]) == sorted(cell.keys)
    text, stored = run(fast)
    assert "7 references, 7 of them slower than a strategy of this run" in text and "plan:  -" in text
    assert run(slow, "--update")[1] == stored
    text, updated = run(fast, "--update")
    assert {plan_regret.unpacked(data, cell.network).ranks for data in updated.values()} == {4}
    assert cell.references(updated) == pytest.approx(cell.steps([fast], cell.machines)[0])
    text, kept = run(slow, "--update")
    assert "7 references, 0 of them slower" in text and "plan:  -" not in text and kept == updated


def test_a_packed_strategy_is_restored():
    network = plan_regret.Cell("mesh_1k", 4, "lassen").network
    layers = {name: {"height": 4, "halo": "pad"} if "conv" in name else {"sample": 2} for name in network.layers}
    strategy = Strategy({}, layers, bucket_bytes=1 << 20, reduction={"name": "sharded"})
    data = json.loads(json.dumps(plan_regret.packed(strategy, network)))
    assert len(data["distinct"]) == 2 and plan_regret.unpacked(data, network) == strategy
