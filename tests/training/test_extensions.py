"""Tests of augmentations, schedules, optimizers, metrics, kernels, data and networks in a user's file."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.data import ArrayDataset
from halograd.errors import UserError
from halograd.kernels import Geometry, KernelError, get_backend
from halograd.planning import training_of
from halograd.report.page import write_page
from halograd.report.status import read_record
from halograd.training import Executor, apply, evaluate, load_config, samples, train
from halograd.training.build import make_network, make_optimizer, state_slots
from halograd.training.checkpoint import read_header
from halograd.training.directory import checkpoint_of
from halograd.training.log import read_log
from halograd.training.schedules import make_schedule
from tests.docs.pages import write_files
from tests.training import own_optimizer
from tests.training.cuts import CUTS, check_resumed, curve, logged_losses, logged_rates, overrides_of
from tests.training.runs import EDGE, OPTIONS, check_refused, read_array, unet, write_config, write_own, written

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


def write_extended(folder):
    write_config(folder)
    write_files("extending.md", folder)
    (folder / "both.py").write_text(BOTH)
    (folder / "own.py").write_text(Path(own_optimizer.__file__).read_text())


extended = written(write_extended)


@pytest.fixture
def cuts(comm):
    return [overrides_of(cut) for cut in CUTS[comm.size]]


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize(
    "own",
    [FADE, 'data.augment={kind="both.py:Both", flips=["width"], turns=true, noise=0.1, strength=2.0}'],
    ids=["alone", "both"],
)
def test_augmentations(comm, extended, cuts, own):
    results = check_resumed(comm, extended, [own], cuts, (2, 3))
    if "alone" in results:
        train(extended, ['schedule.kind="constant"', "output.directory=plain"], comm=MPI.COMM_SELF)
        varied, plain = (logged_losses(extended.parent / name) for name in ("alone", "plain"))
        assert len(varied) == len(plain) and not {*varied} & {*plain}


@pytest.mark.ranks(1, 2, 4)
def test_a_schedule_stopped_within_an_epoch(comm, extended, cuts):
    results = check_resumed(comm, extended, [CYCLE], cuts, (3, 3), stop=4)
    if "alone" in results:
        schedule = make_schedule(load_config(extended, [CYCLE]).schedule, 3, EPOCH)
        rates = logged_rates(extended.parent / "alone")
        assert rates == [schedule(step) for step in range(3 * EPOCH)] and len({*rates}) == len(rates)
        assert all(logged_rates(extended.parent / out) == rates for out in results)


@pytest.mark.mpi
def test_a_schedule_that_follows_validations(comm, extended, cuts, caplog):
    results = check_resumed(comm, extended, [PLATEAU], cuts, (2, 4, 6))
    if "alone" in results:
        best, rate, expected = float("inf"), 0.3, []
        for entry in read_log(extended.parent / "alone/log.jsonl", "validation"):
            expected += [rate] * EPOCH
            best, rate = (entry["loss"], rate) if entry["loss"] < best else (best, rate / 2)
        rates = logged_rates(extended.parent / "alone")
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
def test_optimizers_and_their_state(comm, extended, cuts, scheme):
    results = check_resumed(comm, extended, [RMS], [[*cut, f'reduction.name="{scheme}"'] for cut in cuts])
    if "alone" in results:
        losses, arrays = logged_losses(extended.parent / "alone"), mean_squares(extended.parent / "alone")
        assert len({*losses}) == len(losses) == 2 * EPOCH and all(array.any() for array in arrays.values())
        for out in results:
            found = mean_squares(extended.parent / out)
            assert found.keys() == arrays.keys()
            for name, array in found.items():
                np.testing.assert_allclose(array, arrays[name], rtol=1e-8, atol=1e-14, err_msg=name)


@pytest.mark.ranks(1, 2, 4)
def test_metrics_in_log_best_score_and_report(comm, extended, cuts):
    results = check_resumed(comm, extended, WITHIN, cuts, (2, 3))
    comm.barrier()
    for number, cut in enumerate(cuts):
        folder, details = extended.parent / f"cut{number}", f"{number}.json"
        shares = [entry["within"] for entry in curve(folder)[1]]
        sets = ['schedule.kind="constant"', *WITHIN, *cut, f"output.directory=cut{number}"]
        assert evaluate(extended, sets, details=details, comm=comm)["within"] == shares[-1]
        if comm.rank == 0:
            want = [entry["within"] for entry in curve(extended.parent / "alone")[1]]
            assert shares == want and len(want) == 3 and 0 < want[0] < 1 and want[0] != want[2]  # counts are exact
            best = results[f"cut{number}"]["best"]
            assert best == results["alone"]["best"] and best["name"] == "within"
            write_page(read_record(folder), folder / "report.html", details=extended.parent / details)
            text = (folder / "report.html").read_text()
            assert "within" in text and "prediction by Within" in text


@pytest.mark.ranks(1)
def test_a_group_has_a_rate_of_its_own(comm, extended):
    """Layers of a group whose rate is 0 in the first epoch keep their parameters in it; later all layers change."""
    network, seen = make_network(load_config(extended)), []
    group = network.matching("conv1*")
    first = {name: spec.initial(name, 7) for name, spec in network.parameters().items()}
    for epochs in (1, 2):
        train(extended, [CYCLE, f"training.epochs={epochs}"], epochs > 1, comm=comm)
        with h5py.File(checkpoint_of(extended.parent / "out/checkpoints/latest.h5")) as file:
            seen.append({name: file[f"params/{name}"][()] for name in first})
    frozen = [name for name in first if name.rpartition("/")[0] in group]
    assert frozen and len(frozen) < len(first)
    for name, initial in first.items():
        assert (seen[0][name] == initial).all() == (name in frozen)
        assert (seen[1][name] != seen[0][name]).any()


@pytest.mark.ranks(1)
def test_state_is_in_memory_and_price_of_plans(comm, extended):
    """Plans count the state arrays of a user's optimizer in memory and time, as a run allocates them."""
    sets = [RMS, "training.average=0.5"]
    assert state_slots(load_config(extended, sets)) == 2
    assert [training_of("float32", name).slots for name in ("rms.py:RMSprop", "sgd", "adam")] == [1, 1, 2]
    with Communicator(comm) as ranks:
        network = make_network(load_config(extended))
        with Executor(network, ranks, get_backend("numpy"), 2, hg.Strategy(), "float64") as executor:
            make_optimizer(load_config(extended, sets), executor.store)
            used = executor.memory.bytes
            assert used["optimizer state"] == 2 * used["parameter gradient"]


@pytest.mark.ranks(2)
def test_norms_of_whole_parameters_need_whole_parameters(comm, extended):
    own = ['optimizer={kind = "own.py:OwnLARS"}', "strategy.height=2"]
    with pytest.raises(UserError, match=r"sgd, adam.*, got own.py:OwnLARS"):
        train(extended, [*own, 'reduction.name="sharded"'], comm=comm)
    assert train(extended, own, comm=comm)["diverged"] is None


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
    write_extended(working)
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
        ('["errors", "errors"]', "errors: expected other scores than those of errors, got 'mae'; remove errors"),
        ('["rms.py:RMSprop"]', "rms.py:RMSprop: expected a class derived from Metric"),
        ("3", "expected a list, got 3"),
    ],
)
def test_metrics_that_are_refused_on_all_ranks(comm, extended, sets, message):
    with pytest.raises(UserError) as error:
        train(extended, [f"output.metrics={sets}"], comm=comm)
    assert message in str(error.value) and "output.metrics" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.ranks(1, 2)
def test_a_plateau_needs_validations(comm, extended):
    with pytest.raises(UserError, match=r"schedule\.score: .*, got data.validation = 0"):
        train(extended, [PLATEAU, "data.validation=0"], comm=comm)


COUNTED = """
from pathlib import Path

from halograd.kernels.numpy import NumpyBackend

class Counted(NumpyBackend):
    name = "counted"
    convolutions = 0

    def _conv_forward(self, *arguments):
        Counted.convolutions += 1
        return super()._conv_forward(*arguments)

class Other:
    name = "other"
"""


@pytest.fixture
def counted(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "kernels.py"
    path.write_text(COUNTED)
    return f"{path}:Counted"


def test_it_is_found_by_its_file_and_computes(counted):
    geometry = Geometry(kernel=(3,), stride=(1,), dilation=(1,), padding=((1, 1),))
    x, w, results = np.ones((1, 5, 1), np.float32), np.ones((1, 3, 1), np.float32), []
    for name in (counted, "numpy"):
        with get_backend(name) as backend:
            y = backend.zeros((1, 5, 1), "float32")
            backend.conv_forward(x, w, None, y, geometry)()
            results.append(y.copy())
    np.testing.assert_array_equal(*results)
    with get_backend(counted) as backend:
        assert backend.convolutions == 1 and backend.describe().startswith("counted ")


def test_a_run_names_it(comm, config, counted):
    """A run with a user's backend has the losses of the backend that it extends, and the log names it."""
    folder = config.parent
    for name, kernels in (("own", counted), ("theirs", "numpy")):
        train(config, [f"backend.kernels={kernels}", f"output.directory={folder / name}"], comm=comm)
    assert curve(folder / "own") == curve(folder / "theirs")
    assert "counted" in (folder / "own" / "log.jsonl").read_text()
    assert read_log(folder / "own" / "log.jsonl", "step")


def test_what_is_refused(counted, comm, config):
    file = counted.rpartition(":")[0]
    with pytest.raises(UserError, match=r"backend\.kernels: .*:Other: .*from Backend"):
        train(config, [f"backend.kernels={file}:Other"], comm=comm)
    with pytest.raises(UserError, match=r"backend: .*kernels\.py"):
        get_backend(f"{file}:Missing")
    with pytest.raises(KernelError, match=r"precision strict .*counted, got 'tf32'"):
        get_backend(counted, precision="tf32")
    with pytest.raises(UserError, match=r"kernels = .* with it, got"):
        train(config, [f"backend.kernels={counted}", "backend.graph=true"], comm=comm)


DATA = """
from pathlib import Path
import numpy as np
from halograd.data import ArrayDataset

def open(path, labelled=True):
    folder = Path(path if isinstance(path, str) else path[0])
    arrays = {"x": np.load(folder / "x.npy", mmap_mode="r")}
    if labelled:
        arrays["target"] = np.load(folder / "t.npy", mmap_mode="r")
    return ArrayDataset(arrays, ["target"] if labelled else [], path=folder)

def nothing(path):
    return 7

def others(path):
    return ArrayDataset({"y": np.zeros((8, 4, 4, 1))}, [])

def failing(path):
    raise KeyError(path)
"""


@written
def own_data(folder):
    write_config(folder)
    (folder / "data.py").write_text(DATA)
    (folder / "arrays").mkdir()
    with h5py.File(folder / "data.h5") as file:
        np.save(folder / "arrays/x.npy", file["inputs"][()])
        np.save(folder / "arrays/t.npy", file["mask"][()][..., None])


OWN = ['data.path="arrays"', 'data.file="data.py:open"']


@pytest.mark.ranks(1, 2, 4)
def test_by_a_function(comm, own_data):
    """A user's data set gives the results of the same samples in HDF5: training, resumption, evaluation, `apply`."""
    for number, cut in enumerate(CUTS[comm.size]):
        sets = [*overrides_of(cut), f"output.directory=cut{number}"]
        train(own_data, [*sets, *OWN, "training.epochs=1"], comm=comm)
        train(own_data, [*sets, *OWN, "training.epochs=2"], True, comm=comm)
        found = evaluate(own_data, [*sets, *OWN], comm=comm)
        apply(own_data, ["arrays"], f"{number}.h5", [*sets, *OWN, "data.options={labelled = false}"], comm=comm)
        comm.barrier()
        if comm.rank == 0:
            alone = ["output.directory=alone"]
            if not number:
                train(own_data, [*alone, "training.epochs=1"], comm=MPI.COMM_SELF)
                train(own_data, [*alone, "training.epochs=2"], True, comm=MPI.COMM_SELF)
                apply(own_data, ["data.h5"], "alone.h5", alone, comm=MPI.COMM_SELF)
            want = evaluate(own_data, alone, comm=MPI.COMM_SELF)
            assert found["loss"] == pytest.approx(want["loss"], rel=1e-10)
            np.testing.assert_allclose(read_array(f"{number}.h5"), read_array("alone.h5"), rtol=1e-9, atol=1e-12)
        comm.barrier()


@pytest.mark.ranks(1, 2)
def test_losses_are_those_of_the_file(comm, own_data):
    whole = f"strategy.height={comm.size}"
    train(own_data, [whole, "output.directory=file"], comm=comm)
    train(own_data, [whole, "output.directory=own", *OWN], comm=comm)
    found, want = (logged_losses(own_data.parent / run) for run in ("own", "file"))
    assert found == want


@pytest.mark.ranks(1, 2)
def test_given_by_a_script(comm, own_data):
    x, t = (np.load(own_data.parent / f"arrays/{name}.npy") for name in "xt")
    data, new = ArrayDataset({"x": x, "target": t}), ArrayDataset({"x": x}, [])
    cut = {"height": comm.size}
    run = hg.fit(unet(), data, "script", comm=comm, strategy=cut, validation=0.3, **OPTIONS)
    file = hg.fit(unet(), "data.h5", "by-file", comm=comm, strategy=cut, validation=0.3, **OPTIONS)
    assert run.losses == file.losses and run.history == file.history
    run.apply(new, "p.h5")
    file.apply("data.h5", "q.h5")
    comm.barrier()
    np.testing.assert_array_equal(read_array("p.h5"), read_array("q.h5"))


@pytest.mark.ranks(1, 2)
def test_refusals(comm, own_data):
    for function, message in (
        ("nothing", r"expected data\.py:nothing to return a halograd\.data\.Dataset, got int without 'fields'"),
        ("others", r"expected fields for the inputs of the network \(x, target\), got y"),
        ("failing", r"data\.py:failing failed: KeyError: 'arrays' \(.*data\.py, line 20\)"),
        ("absent", r"expected a function 'absent' in data\.py, got open, nothing, others, failing"),
    ):
        with pytest.raises(UserError, match=rf"data\.file: {message}"):
            train(own_data, ['data.path="arrays"', f'data.file="data.py:{function}"'], comm=comm)


NET = """
import numpy as np
import halograd as hg

class Doubled(hg.Layer):
    def __init__(self, name):
        super().__init__(name)
        self.calls, self._boxes = 0, set()

    def forward(self, inputs, params, box):
        self.calls += 1
        self._boxes.add(str(box))
        return 2 * inputs[0]

    def backward(self, dy, inputs, params, box):
        return (2 * dy,), {{}}

def build(width=4):
    x = hg.Input(({edge}, {edge}, 3), name="x")
    y = hg.Conv(width, 3, padding=1, activation="relu", name="conv")(x)
    gate = hg.Sigmoid()(hg.Dense(width, name="gate")(hg.GlobalAveragePool()(y)))
    logits = hg.Conv(1, 3, padding=1, name="head")(Doubled(name="own")(y * gate))
    target = hg.Input(logits.shape, name="target")
    loss = hg.BinaryCrossEntropyWithLogits(name="bce")(logits, target) + {weight} * hg.Dice()(logits, target)
    return hg.Network({{"prediction": logits, "loss": loss}}, name="mine")
"""


def network(weight=0.5, more=""):
    return NET.format(edge=EDGE, weight=weight) + more


@written
def own_network(folder):
    write_own(folder, network(), settings="width = 6\n")


def trained(config, comm, out):
    """Train, resume and evaluate a run; return the loss. Collective."""
    for epochs in (1, 2):
        train(config, [f"training.epochs={epochs}", f"output.directory={out}"], epochs > 1, comm=comm)
    return evaluate(config, overrides=[f"output.directory={out}"], comm=comm)["loss"]


@pytest.mark.mpi
def test_trains_and_resumes_as_one_process_does(comm, own_network):
    """A run whose layer stores results in itself, also resumed, has the losses of one process."""
    found = trained(own_network, comm, "together")
    if comm.rank == 0:
        assert found == pytest.approx(trained(own_network, MPI.COMM_SELF, "alone"), rel=1e-10)
        progress, text = read_header(own_network.parent / "together/checkpoints/latest.h5")
        assert progress.source.startswith("net.py:build ")
        assert json.loads(text)["model"] == {"file": "net.py:build", "width": 6}


@pytest.mark.ranks(1, 2)
def test_a_changed_network_is_refused_by_what_differs(comm, own_network, caplog):
    train(own_network, ["training.epochs=1"], comm=comm)
    comm.barrier()
    if comm.rank == 0:
        (own_network.parent / "net.py").write_text(network(weight=0.25))
    comm.barrier()
    with pytest.raises(UserError, match=r"'bce: terms\[1\].*weight 0\.25', got '.*weight 0\.5'"):
        train(own_network, resume=True, comm=comm)
    comm.barrier()
    if comm.rank == 0:
        (own_network.parent / "net.py").write_text(network(more="\n# a remark\n"))
    comm.barrier()
    train(own_network, resume=True, comm=comm)
    said = [r.getMessage() for r in caplog.records if "model.file" in r.getMessage()]
    assert len(said) == (comm.rank == 0), said


@pytest.mark.parametrize("through", ["", "hg.Pad(-1)"])
def test_targets_of_no_known_range_are_looked_at_in_several_samples(working, monkeypatch, through):
    """The scale of targets with unknown range is found in several samples, also if a layer reads the targets first."""
    net = f"""
import halograd as hg

def build():
    x, t = hg.Input(({EDGE}, {EDGE}, 3), "x"), hg.Input(({EDGE}, {EDGE}, 1), "target")
    y = hg.Conv(1, 3, padding={0 if through else 1})(x)
    return hg.Network({{"prediction": y, "loss": hg.Dice()(y, {through}(t))}})
"""
    looks = []
    monkeypatch.setattr(samples, "look_at_data", lambda *given: looks.append(given[3]) or 1.0)
    train(write_own(working, net), ["training.epochs=1"], comm=MPI.COMM_SELF)
    assert looks == [samples.LOOKS if through else 1]


@pytest.mark.ranks(2)
def test_a_fault_of_one_rank_is_raised_on_all(comm, own_network):
    """An error that only some ranks have in a user's file, such as a missing file, is raised on all ranks."""
    if comm.rank == 0:
        (own_network.parent / "net.py").write_text(
            network(more="\nfrom mpi4py import MPI\nif MPI.COMM_WORLD.rank:\n    open('not-here')\n")
        )
    comm.barrier()
    with pytest.raises(UserError, match=r"net.py .*FileNotFoundError: .*not-here"):
        train(own_network, comm=comm)
