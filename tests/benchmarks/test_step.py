"""Tests of the step benchmark: contestants train the same network, wait without CPU use, and are compared."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import contestants, report
from benchmarks.contest import Outcome, Settings, Times, check_losses, run
from benchmarks.contestants import CONTESTANTS, Contestant, EntryError
from benchmarks.machine import Usage
from benchmarks.problems import has_relu
from benchmarks.step import UsageError, select, split
from halograd.layers import Add, BatchNorm, Conv, MaxPool
from tests.harness.limits import LIMIT, wait_until
from tests.support.onednn import opened

pytestmark = pytest.mark.nightly

OURS = [replace(e, threads=1) for e in CONTESTANTS if not e.peer and e.equal]
NUMPY = {"backend": "numpy"}


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(contestants, "PATIENCE", LIMIT)


def test_contestants_are_timed_in_turn_on_the_same_network():
    outcome = run("mesh-tiny", OURS, Settings(0.02, 2, 1.0), lambda line: None, NUMPY)
    assert [len(t.seconds) > 0 and t.best > 0 for t in outcome.times.values()] == [True] * len(OURS)
    assert len(outcome.usage) == 2 * 2 * len(OURS)  # two rounds, each in both orders
    assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(outcome.losses["halograd-2x1"], outcome.losses["raw"]))
    assert "ratio to raw sum" in report.ratios(outcome)


def activity(contestant):
    """Return CPU time and number of schedulings of each thread; None while a thread is runnable."""
    found = {}
    for path in [path for pid in contestant.pids for path in Path(f"/proc/{pid}/task").glob("*/status")]:
        fields = dict(line.split(":", 1) for line in path.read_text().splitlines())
        if fields["State"].split()[0] == "R":
            return None
        found[path] = int(fields["voluntary_ctxt_switches"]), int(fields["nonvoluntary_ctxt_switches"])
    return contestant.cpu_seconds(), found


def test_waiting_contestants_use_no_cpu_and_end_with_their_parent():
    """None of the threads of a waiting contestant runs, even briefly."""
    (entry,) = [e for e in OURS if e.ranks == 2]
    with Contestant(entry, "mesh-tiny", NUMPY) as contestant:
        contestant.ready()
        contestant.command("measure", 2)
        looks = []

        def quiet():
            looks.append(activity(contestant))
            return len(looks) > 50 and looks[-1] is not None and looks[-1] == looks[-50]

        wait_until(quiet, "that for 50 looks none of their threads was given a core")
        pids = contestant.pids
    wait_until(lambda: not [pid for pid in pids if os.path.exists(f"/proc/{pid}")], "none of them to be left")


def test_a_contestant_that_fails_is_reported_with_its_output():
    with Contestant(OURS[0], "no such network", NUMPY) as contestant, pytest.raises(EntryError, match="KeyError"):
        contestant.ready()


def test_contestants_that_train_differently_are_refused():
    check_losses({"a": [1.0, 0.9, 0.8], "b": [1.0, 0.9001, 0.8]})
    with pytest.raises(EntryError, match=r"b: losses .* nothing is timed"):
        check_losses({"a": [1.0, 0.9, 0.8], "b": [1.0, 0.9, 0.82]})
    with pytest.raises(EntryError, match="b: losses"):
        check_losses({"a": [1.0, 0.9, 0.8], "b": [1.0, 0.9, math.nan]})
    with pytest.raises(EntryError, match="hardly change"):
        check_losses({"a": [1.0, 1.0, 0.999]})


def outcome(problem, **milliseconds):
    times = {name.replace("_", "-"): Times(name, "", [ms / 1e3] * 3) for name, ms in milliseconds.items()}
    return Outcome(problem, times, {}, [Usage(1.0, 0.0, 0.0, 0.0)])


def test_ratios_are_those_that_the_documentation_defines():
    first = outcome("a", halograd_1x2=60, halograd_2x1=57, raw=58, torch=60, jax=120, jax_sharded=190)
    found = report.ratios(first)
    assert found["ratio to best peer"] == pytest.approx(57 / 60)
    assert found["ratio to raw sum"] == pytest.approx(60 / 58)
    assert found["ratio to JAX sharded"] == pytest.approx(57 / 190)
    assert found["two ranks to one"] == pytest.approx(57 / 60)
    second = outcome("b", halograd_1x2=66, torch=60)
    assert report.summary([first, second]) == "worst ratio to best peer: 1.100"
    assert report.summary([outcome("c", halograd_1x2=66)]).startswith("no peers took part")


def test_a_disturbed_machine_is_named():
    quiet = outcome("a", halograd_1x2=60)
    assert "DISTURBED" not in report.table(quiet)
    for loud in (Usage(1, 0, 0.3, 0), Usage(1, 0.1, 0, 0), Usage(1, 0, 0, 0.1)):
        assert "DISTURBED" in report.table(replace(quiet, usage=[loud]))


def test_choices_are_checked_before_anything_is_started(monkeypatch, capsys):
    assert split("a, b", ["a", "b", "c"], "--networks") == ["a", "b"]
    with pytest.raises(UsageError, match="--networks: expected some of a, b, got 'd'"):
        split("d", ["a", "b"], "--networks")
    with pytest.raises(UsageError, match="--peers: expected some of torch"):
        select(["tensorflow"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not [e for e in select([]) if e.peer]
    with pytest.raises(UsageError, match="expected torch to be installed, got none; run `make bench-step`"):
        select(["torch"])
    assert not [e for e in select(["shardtensor"]) if e.peer], "it brings a CUDA toolkit with it"
    assert "left out: shardtensor, for which `pip install nvidia-physicsnemo`" in capsys.readouterr().out


LIMITED = """
import sys
from benchmarks import step
def run(name, entries, *rest):
    for e in entries:
        print(e.name, e.environment().get("XLA_FLAGS"))
    raise step.EntryError("started nothing")
step.run = run
sys.argv = ["step.py", "--networks", "mesh-tiny", "--peers", "torch,torch-bf16,jax-sharded", "--isa", "avx2"]
step.importlib.util.find_spec = lambda name: name
step.choose_cores = lambda count: [0]
try:
    step.typer.run(step.main)
finally:
    print(step.os.environ["ONEDNN_MAX_CPU_ISA"], step.os.environ["ATEN_CPU_CAPABILITY"])
"""


def test_the_instruction_set_is_limited_for_all_contestants():
    """Every contestant inherits the limit, and what would be emulated under it is left out."""
    opened("onednn").close()
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=LIMIT)
    lines = done.stdout.splitlines()
    assert "AVX2 avx2" in lines and "torch None" in lines, done.stdout + done.stderr
    assert any(line.startswith("left out: contestants in bfloat16") for line in lines)
    assert not any(line.startswith("torch-bf16") for line in lines)
    (flags,) = [line.split()[1:] for line in lines if line.startswith("jax-sharded")]
    assert {"--xla_cpu_max_isa=AVX2", "--xla_force_host_platform_device_count=2"} <= set(flags)


def test_peers_compute_no_other_activation_than_relu():
    layers = [Conv(2, 3), Conv(2, 3, activation="relu"), MaxPool(2)]
    assert [has_relu(layer) for layer in layers] == [False, True, False]
    leaky = "leaky_relu"
    for layer in (Conv(2, 3, activation=leaky, name="a"), BatchNorm(activation="gelu", name="a"), Add(leaky, "a")):
        with pytest.raises(ValueError, match=f"^a: expected no activation or relu, .* got '{layer.activation}'$"):
            has_relu(layer)


WITH_TORCH = """
from benchmarks.problems import PROBLEMS
from benchmarks.subject_torch import TorchNetwork
from halograd.layers import *
x = Input((4, 4, 2), "x")
for make in Conv(2, 3, activation="leaky_relu"), BatchNorm(activation="gelu"), lambda x: Add("leaky_relu")(x, x):
    network = Network({"loss": make(x)})
    try:
        TorchNetwork(network, PROBLEMS["mesh-tiny"].weights(network), {})
    except ValueError as error:
        print(error)
"""


@pytest.mark.torch
def test_torch_refuses_what_it_would_compute_otherwise():
    """The torch contestant rejects activations that it would compute differently. It runs in a separate process."""
    pytest.importorskip("torch", reason="needs torch as oracle: pip install 'halograd[oracle]'")
    done = subprocess.run([sys.executable, "-c", WITH_TORCH], capture_output=True, text=True, timeout=LIMIT)
    refused = [line.rpartition("got ")[2] for line in done.stdout.splitlines()]
    assert refused == ["'leaky_relu'", "'gelu'", "'leaky_relu'"], done.stdout + done.stderr


def test_contestants_take_part_in_what_they_can_do():
    some = [e.name for e in CONTESTANTS if e.takes_part("blocks-tiny")]
    assert "shardtensor" in some and "torch" in some
    assert "shardtensor" not in [e.name for e in CONTESTANTS if e.takes_part("mesh-256")]


@pytest.mark.parametrize("problem", ["mesh-tiny", "resnet-tiny"])
def test_halos_by_hand_and_16_bits_train_alike(problem):
    """The contestants with hand-written halos and with 16 bits have the losses of ours, as timing requires."""
    pytest.importorskip("torch", reason="needs torch as peer: pip install 'halograd[peers]'")
    named = {e.name: replace(e, threads=1) for e in CONTESTANTS}
    entries = [named[name] for name in ("halograd-2x1", "halograd-1x2-bf16", "torch-gloo", "torch-bf16")]
    outcome = run(problem, entries, Settings(0.02, 2, 1.0), lambda line: None, NUMPY)
    ratios = report.ratios(outcome)
    assert {"ratio to best peer", "ratio to gloo", "ratio in bfloat16"} <= ratios.keys()
    assert ratios["ratio to best peer"] == ratios["ratio to gloo"], "what computes in 16 bits is no equal peer"
