"""Tests of learning rates by layer and of moving averages of parameters: formulas, every cut, and files."""

import functools
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.exporting import export_run
from halograd.kernels import get_backend
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy
from halograd.training import evaluate, train
from halograd.training.directory import checkpoint_of
from halograd.training.executor import Executor
from halograd.training.log import read_log
from halograd.training.optimizers import LARS, SGD, Adam, AdamW
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer
from tests.layers.cuts import random_strategy
from tests.training.steps import NETWORKS, copied, fill

STEPS, AVERAGE = 12, 0.75
FACTORS = {"conv*": 0.5, "conv2": 0.0, "dense4": 3.0}
OPTIMIZERS = {
    "sgd": lambda store, **more: SGD(store, momentum=0.5, weight_decay=1e-2, **more),
    "adam": lambda store, **more: Adam(store, weight_decay=1e-2, **more),
    "adamw": lambda store, **more: AdamW(store, weight_decay=1e-2, **more),
    "lars": lambda store, **more: LARS(store, weight_decay=1e-2, **more),
}


def run(comm, strategy, kind, factors=FACTORS, average=AVERAGE, rate=0.05):
    """Return the parameters after every step, and the final averages (this rank's blocks). Collective."""
    made = NETWORKS["lenet"]()
    with Executor(made, comm, get_backend("numpy"), 4, strategy, "float64", seed=3) as executor:
        optimizer = OPTIMIZERS[kind](executor.store, factors=factors, average=average)
        trainer, history = Trainer(executor, optimizer, Constant(rate)), []
        for step in range(STEPS):
            fill(executor, step % 3)
            trainer.step()
            trainer.synchronize()
            history.append(copied(executor.store.params))
        with trainer.averaged():
            averages = copied(executor.store.params)
        after = copied(executor.store.params)
        blocks = {name: executor.store.box(name).slices() for name in executor.store.params}
        start = {name: executor.store.shapes[name] for name in executor.store.params}
    assert all((after[name] == array).all() for name, array in history[-1].items())
    return SimpleNamespace(history=history, averages=averages, blocks=blocks, start=start)


@functools.cache
def alone(kind, rate=0.05):
    with Communicator(MPI.COMM_SELF) as comm:
        return run(comm, Strategy(bucket_bytes=1 << 14), kind, rate=rate)


def check(comm, found, want):
    with comm.agreement():
        for name, where in found.blocks.items():
            for ours, whole in ((found.history[-1], want.history[-1]), (found.averages, want.averages)):
                np.testing.assert_allclose(ours[name], whole[name][where], rtol=0, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_factor_is_another_learning_rate(kind):
    """In the first step a factor of a layer has the effect of a multiplied learning rate."""
    factors = {name: next((f for p, f in reversed(FACTORS.items()) if match(p, name)), 1.0) for name in layers()}
    assert set(factors.values()) == {0.0, 0.5, 1.0, 3.0}
    found = alone(kind).history[0]
    with Communicator(MPI.COMM_SELF) as comm:
        for factor in sorted(set(factors.values())):
            want = run(comm, Strategy(), kind, {}, 0.0, 0.05 * factor).history[0]
            own = [name for name in found if factors[name.rpartition("/")[0]] == factor]
            assert own
            for name in own:
                np.testing.assert_allclose(found[name], want[name], rtol=1e-14, atol=0, err_msg=name)


def match(pattern, name):
    return name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1]))


def layers():
    made = NETWORKS["lenet"]()
    return {name.rpartition("/")[0] for name in made.parameters()}


def test_the_formula():
    """Averages follow ``a + (1 - w) (p - a)`` with ``w = min(average, n / (9 + n))``, from the initial parameters."""
    found, initial = alone("sgd"), NETWORKS["lenet"]().initial_values(3)
    for name, ours in found.averages.items():
        want = initial[name].astype(np.float64)
        for n, params in enumerate(found.history, 1):
            want = want + (1 - min(AVERAGE, n / (9 + n))) * (params[name] - want)
        np.testing.assert_allclose(ours, want, rtol=0, atol=1e-12, err_msg=name)
    assert any((found.averages[name] != found.history[-1][name]).any() for name in found.averages)


@pytest.mark.nightly
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("seed", range(3))
def test_random_strategies(seed):
    with Communicator(MPI.COMM_WORLD, "mpi") as comm:
        check(comm, run(comm, random_strategy(NETWORKS["lenet"](), comm.size, seed), "adam"), alone("adam"))


@pytest.mark.nightly
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("scheme", [Scheme("sharded"), Scheme("hierarchical"), Scheme(replicated_dense=2)], ids=str)
def test_schemes(scheme):
    with Communicator(MPI.COMM_WORLD, "shared") as comm:
        strategy = Strategy({"sample": comm.size}, bucket_bytes=4096, reduction=scheme)
        check(comm, run(comm, strategy, "sgd"), alone("sgd"))


def test_refused():
    with Communicator(MPI.COMM_SELF) as comm, Executor(NETWORKS["lenet"](), comm, get_backend("numpy"), 4) as executor:
        for factors, words in (({"cnov1": 0.1}, "got 'cnov1'"), ({"conv1": -1}, "expected a finite number >= 0")):
            with pytest.raises(ValueError, match=words):
                SGD(executor.store, factors=factors)
        with pytest.raises(ValueError, match=r"average: .*\[0, 1\), got 1"):
            SGD(executor.store, average=1)


# -- whole runs ------------------------------------------------------------------------------------

SETS = ["training.average=0.9", 'schedule.factors={"conv1*" = 0.5}', 'schedule.kind="constant"', "training.epochs=2"]
CUTS = {1: [], 2: ["strategy.height=2"], 4: ["strategy.height=2", "strategy.width=2", 'reduction.name="sharded"']}


@pytest.mark.ranks(1, 2, 4)
def test_a_run_is_judged_by_its_averages(comm, shared, config):
    """Validations use the averages, in training, later and after resumption; checkpoints also have the parameters."""
    cuts = CUTS[comm.size]

    def results(out, more, comm):
        more = [*SETS, *more, f"output.directory={shared / out}"]
        train(config, [*more, "training.epochs=1"], comm=comm)
        train(config, more, True, comm=comm)
        return evaluate(shared / out, comm=comm), evaluate(shared / out, ["training.average=0"], comm=comm)

    found = results("cut", cuts, comm)
    if comm.rank:
        return
    last = read_log(shared / "cut" / "log.jsonl", "validation")[-1]
    assert found[0]["loss"] == pytest.approx(last["loss"], rel=1e-12)
    assert abs(found[0]["loss"] - found[1]["loss"]) > 1e-4
    want = results("alone", [], MPI.COMM_SELF)
    assert [one["loss"] for one in found] == pytest.approx([one["loss"] for one in want], rel=1e-9)
    with h5py.File(checkpoint_of(shared / "cut/checkpoints/latest.h5")) as file:
        names = []
        file["params"].visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        assert names and all(file[f"optimizer/average/{name}"].shape == file[f"params/{name}"].shape for name in names)


@pytest.mark.ranks(1)
def test_averages_that_begin_later_and_end(comm, shared, config):
    out = f"output.directory={shared / 'late'}"
    plain = ['schedule.kind="constant"', out]
    train(config, [*plain, "training.epochs=1"], comm=comm)
    before = evaluate(shared / "late", ["training.average=0.999999"], comm=comm)  # none are in the file
    train(config, [*plain, "training.epochs=2", "training.average=0.999999"], True, comm=comm)
    averaged = evaluate(shared / "late", comm=comm)
    assert averaged["loss"] != before["loss"]
    train(config, [*plain, "training.epochs=3", "training.average=0"], True, comm=comm)
    with h5py.File(checkpoint_of(shared / "late/checkpoints/latest.h5")) as file:
        assert "average" not in file["optimizer"]


@pytest.mark.ranks(1)
def test_exported_are_the_averages(comm, shared, config, tmp_path):
    safetensors = pytest.importorskip(
        "safetensors.numpy", reason="needs safetensors: pip install 'halograd[interchange]'"
    )
    out = shared / "exported"
    train(config, [*SETS, f"output.directory={out}"], comm=comm)
    arrays = {}
    for name, more in (("averaged", []), ("last", ["training.average=0"])):
        export_run(out, "safetensors", tmp_path / f"{name}.safetensors", more)
        arrays[name] = safetensors.load_file(tmp_path / f"{name}.safetensors")
    differ = [name for name in arrays["last"] if (arrays["last"][name] != arrays["averaged"][name]).any()]
    assert differ and not [name for name in differ if "running" in name or "num_batches" in name]


@pytest.mark.ranks(1)
def test_refused_by_a_run(comm, shared, config):
    with pytest.raises(UserError, match=r"schedule\.factors: .* got 'up9'"):
        train(config, ["schedule.factors={up9 = 0.1}", f"output.directory={shared / 'x'}"], comm=comm)
