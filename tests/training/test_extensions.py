"""Tests of augmentations, schedules, optimizers and metrics in a user's file: under every cut, resumed, and refused."""

from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.planning import training_of
from halograd.report.page import write_page
from halograd.report.status import read_record
from halograd.training import Executor, evaluate, load_config, train
from halograd.training.build import make_network, make_optimizer, state_slots
from halograd.training.directory import checkpoint_of
from halograd.training.log import read_log
from halograd.training.schedules import make_schedule
from tests.docs.pages import write_files
from tests.training import own_optimizer
from tests.training.cuts import CUTS, check_resumed, curve, logged_losses, logged_rates, overrides_of
from tests.training.runs import check_refused, write_config

EPOCH = 3  # steps
FADE = 'data.augment={kind="fade.py:Fade", share=0.9}'
CYCLE = 'schedule={kind="one_cycle.py:OneCycle", learning_rate=0.02, alone_epochs=1.0, factors={"conv1*" = 0.5}}'
RMS = 'optimizer={kind="rms.py:RMSprop", decay=0.9, weight_decay=0.01}'
WITHIN = ['output.metrics=["within.py:Within:limit=1.5", "errors"]', 'output.best="within"', "training.patience=9"]
PLATEAU = "schedule={kind='plateau', learning_rate=0.3, factor=0.5, patience=1}"
BOTH = """
from fade import Fade
from swirl import Swirl

class Both(Swirl):
    class Settings(Swirl.Settings, Fade.Settings):
        pass

    def alter(self, name, batch, box, part):
        super().alter(name, batch, box, part)
        Fade.alter(self, name, batch, box, part)
"""


def write(folder):
    write_config(folder)
    write_files("extending.md", folder)
    (folder / "both.py").write_text(BOTH)
    (folder / "own.py").write_text(Path(own_optimizer.__file__).read_text())


@pytest.fixture
def cuts(comm):
    return [overrides_of(cut) for cut in CUTS[comm.size]]


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize(
    "own",
    [FADE, 'data.augment={kind="both.py:Both", flips=["width"], turns=true, noise=0.1, strength=2.0}'],
    ids=["alone", "both"],
)
def test_augmentations(comm, config, cuts, own):
    results = check_resumed(comm, config, [own], cuts, (2, 3))
    if "alone" in results:
        train(config, ['schedule.kind="constant"', "output.directory=plain"], comm=MPI.COMM_SELF)
        varied, plain = (logged_losses(config.parent / name) for name in ("alone", "plain"))
        assert len(varied) == len(plain) and not {*varied} & {*plain}


@pytest.mark.ranks(1, 2, 4)
def test_a_schedule_stopped_within_an_epoch(comm, config, cuts):
    results = check_resumed(comm, config, [CYCLE], cuts, (3, 3), stop=4)
    if "alone" in results:
        schedule = make_schedule(load_config(config, [CYCLE]).schedule, 3, EPOCH)
        rates = logged_rates(config.parent / "alone")
        assert rates == [schedule(step) for step in range(3 * EPOCH)] and len({*rates}) == len(rates)
        assert all(logged_rates(config.parent / out) == rates for out in results)


@pytest.mark.mpi
def test_a_schedule_that_follows_validations(comm, config, cuts, caplog):
    results = check_resumed(comm, config, [PLATEAU], cuts, (2, 4, 6))
    if "alone" in results:
        best, rate, expected = float("inf"), 0.3, []
        for entry in read_log(config.parent / "alone/log.jsonl", "validation"):
            expected += [rate] * EPOCH
            best, rate = (entry["loss"], rate) if entry["loss"] < best else (best, rate / 2)
        rates = logged_rates(config.parent / "alone")
        assert rates == pytest.approx(expected, rel=1e-12) and len({*rates}) > 1
    assert not [r for r in caplog.records if "schedule has changed" in r.getMessage()]


def mean_squares(folder):
    with h5py.File(checkpoint_of(folder / "checkpoints" / "latest.h5")) as file:
        arrays = {}
        file["optimizer/mean_square"].visititems(
            lambda name, item: arrays.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None
        )
        return arrays


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("scheme", ["bucketed", "sharded"])
def test_optimizers_and_their_state(comm, config, cuts, scheme):
    results = check_resumed(comm, config, [RMS], [[*cut, f'reduction.name="{scheme}"'] for cut in cuts])
    if "alone" in results:
        losses, arrays = logged_losses(config.parent / "alone"), mean_squares(config.parent / "alone")
        assert len({*losses}) == len(losses) == 2 * EPOCH and all(array.any() for array in arrays.values())
        for out in results:
            found = mean_squares(config.parent / out)
            assert found.keys() == arrays.keys()
            for name, array in found.items():
                np.testing.assert_allclose(array, arrays[name], rtol=1e-8, atol=1e-14, err_msg=name)


@pytest.mark.ranks(1, 2, 4)
def test_metrics_in_log_best_score_and_report(comm, config, cuts):
    results = check_resumed(comm, config, WITHIN, cuts, (2, 3))
    comm.barrier()
    for number, cut in enumerate(cuts):
        folder, details = config.parent / f"cut{number}", f"{number}.json"
        shares = [entry["within"] for entry in curve(folder)[1]]
        sets = ['schedule.kind="constant"', *WITHIN, *cut, f"output.directory=cut{number}"]
        assert evaluate(config, sets, details=details, comm=comm)["within"] == shares[-1]
        if comm.rank == 0:
            want = [entry["within"] for entry in curve(config.parent / "alone")[1]]
            assert shares == want and len(want) == 3 and 0 < want[0] < 1 and want[0] != want[2]  # counts are exact
            best = results[f"cut{number}"]["best"]
            assert best == results["alone"]["best"] and best["name"] == "within"
            write_page(read_record(folder), folder / "report.html", details=config.parent / details)
            text = (folder / "report.html").read_text()
            assert "within" in text and "prediction by Within" in text


@pytest.mark.ranks(1)
def test_a_group_has_a_rate_of_its_own(comm, config):
    """Layers of a group whose rate is 0 in the first epoch keep their parameters in it; later all layers change."""
    network, seen = make_network(load_config(config)), []
    group = network.matching("conv1*")
    first = {name: spec.initial(name, 7) for name, spec in network.parameters().items()}
    for epochs in (1, 2):
        train(config, [CYCLE, f"training.epochs={epochs}"], epochs > 1, comm=comm)
        with h5py.File(checkpoint_of(config.parent / "out/checkpoints/latest.h5")) as file:
            seen.append({name: file[f"params/{name}"][()] for name in first})
    frozen = [name for name in first if name.rpartition("/")[0] in group]
    assert frozen and len(frozen) < len(first)
    for name, initial in first.items():
        assert (seen[0][name] == initial).all() == (name in frozen)
        assert (seen[1][name] != seen[0][name]).any()


@pytest.mark.ranks(1)
def test_state_is_in_memory_and_price_of_plans(comm, config):
    """Plans count the state arrays of a user's optimizer in memory and time, as a run allocates them."""
    sets = [RMS, "training.average=0.5"]
    assert state_slots(load_config(config, sets)) == 2
    assert [training_of("float32", name).slots for name in ("rms.py:RMSprop", "sgd", "adam")] == [1, 1, 2]
    with Communicator(comm) as ranks:
        network = make_network(load_config(config))
        with Executor(network, ranks, get_backend("numpy"), 2, hg.Strategy(), "float64") as executor:
            make_optimizer(load_config(config, sets), executor.store)
            used = executor.memory.bytes
            assert used["optimizer state"] == 2 * used["parameter gradient"]


@pytest.mark.ranks(2)
def test_norms_of_whole_parameters_need_whole_parameters(comm, config):
    own = ['optimizer={kind = "own.py:OwnLARS"}', "strategy.height=2"]
    with pytest.raises(UserError, match=r"sgd, adam.*, got own.py:OwnLARS"):
        train(config, [*own, 'reduction.name="sharded"'], comm=comm)
    assert train(config, own, comm=comm)["diverged"] is None


NAMES = 'expected constant, step, cosine, polynomial, linear, one_cycle, plateau, or "FILE.py:CLASS"'


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([FADE, "data.augment.share=2"], "data.augment.share: expected a number < 1, got 2"),
        ([FADE, "data.augment.flips=['width']"], "data.augment.flips: unknown key; expected one of kind, share"),
        ([FADE, 'data.augment.kind="fade.py:Fall"'], "data.augment.kind: expected a class 'Fall' in fade.py, got Fade"),
        (["data.augment={flips = ['up']}"], "data.augment.flips[0]: expected one of 'depth', 'height' or 'width', got"),
        (["data.augment={flip = 1}"], "data.augment.flip: unknown key; expected one of kind, flips, turns, shifts, "),
        (["data.augment={kind = 'mine'}"], "data.augment.kind: expected standard, or \"FILE.py:CLASS\", got 'mine'"),
        (["data.augment=3"], "data.augment: expected a table, got 3"),
        ([CYCLE, "schedule.rise=2"], "schedule.rise: expected a number < 1, got 2"),
        ([CYCLE, "schedule.final=0.1"], "schedule.final: unknown key; expected one of kind, learning_rate, warmup_ep"),
        ([CYCLE, "schedule.kind=steps"], f"schedule.kind: {NAMES}, got 'steps'"),
        ([CYCLE, 'schedule.kind="one_cycle.py:Cycle"'], "schedule.kind: expected a class 'Cycle' in one_cycle.py, got"),
        ([CYCLE, 'schedule.kind="none.py:Cycle"'], "schedule.kind: expected a Python file, got 'none.py'"),
        ([RMS, "optimizer.beta=1"], "optimizer.beta: unknown key; expected one of kind, decay, epsilon, weight_decay"),
        ([RMS, "optimizer.decay=2"], "optimizer.decay: expected a number < 1, got 2"),
        ([RMS, 'optimizer.kind="rms.py:Lion"'], "optimizer.kind: expected a class 'Lion' in rms.py, got RMSprop"),
        ([RMS, 'optimizer.kind="none.py:Lion"'], "optimizer.kind: expected a Python file, got 'none.py'"),
        ([RMS, 'optimizer.kind="json:JSONDecoder"'], "json:JSONDecoder: expected a class derived from Optimizer, got"),
        ([RMS, "optimizer.kind=3"], "optimizer.kind: expected a text in quotes, got 3"),
        ([RMS, "optimizer={decay = 0.5}"], "optimizer.kind: expected a value, got nothing; this key is required"),
    ],
)
def test_settings_that_are_refused(working, sets, message):
    write(working)
    check_refused(sets, message)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ('["within.py:Inside"]', "expected a class 'Inside' in within.py, got Within"),
        ('["within.py:Within:size=1"]', "size: unknown key; expected one of limit"),
        ('["within.py:Within:limit=yes"]', "limit: expected a number, got 'yes'"),
        ('["auc"]', "expected errors, dice, iou, weighted, or \"FILE.py:CLASS\", got 'auc'"),
        ('["dice:all=true"]', "all: unknown key; expected one of each"),
        ('["weighted"]', "weighted: expected a loss of numbers, got one of classes"),
        ('["errors", "errors"]', "errors: expected other scores than those of errors, got 'mae'"),
        ('["rms.py:RMSprop"]', "rms.py:RMSprop: expected a class derived from Metric"),
        ("3", "expected a list, got 3"),
    ],
)
def test_metrics_that_are_refused_on_all_ranks(comm, config, sets, message):
    with pytest.raises(UserError) as error:
        train(config, [f"output.metrics={sets}"], comm=comm)
    assert message in str(error.value) and "output.metrics" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.ranks(1, 2)
def test_a_plateau_needs_validations(comm, config):
    with pytest.raises(UserError, match=r"schedule\.score: .*, got data.validation = 0"):
        train(config, [PLATEAU, "data.validation=0"], comm=comm)
