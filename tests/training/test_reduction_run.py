"""Tests of runs whose configuration selects a scheme of gradient reduction or searches for one, and of the search."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from halograd.auto import rank_schemes_of
from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers import Conv, Dense, Flatten, Input, MaxPool, Network, ReLU, SoftmaxCrossEntropy
from halograd.layers.reduction_scheme import NAMES, Scheme
from halograd.layers.strategy import Strategy
from halograd.perfmodel.cost import program_of
from halograd.perfmodel.plan_candidates import candidate_schemes
from halograd.program.program import Target
from halograd.testing import grids
from halograd.training import trainer
from halograd.training import trainer as trainer_module
from halograd.training.auto_reduction import ChunkSearch, Tuner, Tuning, pinned
from halograd.training.build import make_network, with_reduction
from halograd.training.checkpoint import read_header
from halograd.training.config import load_config
from halograd.training.executor import Executor
from halograd.training.log import read_log
from halograd.training.optimizers import SGD, Adam
from halograd.training.run import train
from halograd.training.schedules import Cosine
from halograd.training.trainer import Trainer
from tests.launch import PATIENT, mpiexec
from tests.support.clock import TICK, DrivenClock
from tests.training.launching import losses, sets
from tests.training.runs import write_config
from tests.training.steps import advance, copied

TABLE = {"name": "two_chunks", "first_layers": 2, "deterministic": True}


@pytest.fixture
def written(tmp_path):
    return write_config(tmp_path)


def test_every_name_is_known(written):
    for name in NAMES:
        first = ["reduction.first_layers=3"] if name == "two_chunks" else []
        assert load_config(written, [*first, f"reduction.name={name}"]).reduction.scheme().name == name


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reduction.name=ring"], "reduction.name: expected one of 'blocking', .* or 'auto', got 'ring'"),
        (["reduction.name=two_chunks"], r"reduction.first_layers: expected the number of layers .*\(>= 1\).*, got 0"),
        (["reduction.payload=float16"], "reduction.payload: expected float32, bfloat16, or .*, got 'float16'"),
        (["reduction.chunk=2"], "reduction.chunk: expected name = \"host_accumulate\" with it, got 'bucketed'"),
        (["reduction.bytes=2"], "reduction.bytes: unknown key; expected one of name, first_layers"),
        (["reduction={name='bucketed', interval=5}"], 'interval: expected name = "auto" with it, got "bucketed"'),
        (["reduction={name='auto', interval=1}"], "reduction.interval"),
        (["reduction={name='auto', replicated_dense=2}"], "which chooses it, got 2"),
    ],
)
def test_what_is_refused_in_one_line(written, overrides, message):
    with pytest.raises(UserError, match=message) as found:
        load_config(written, overrides)
    assert "\n" not in str(found.value)


def test_the_table_wins_over_a_plan_and_nothing_does_not(written):
    planned = Strategy(reduction=Scheme("per_layer"))
    assert with_reduction(planned, load_config(written)) == planned
    pinned = load_config(written, [f"reduction.{k}={str(v).lower()}" for k, v in TABLE.items()])
    assert with_reduction(planned, pinned).reduction == Scheme(**TABLE)


@pytest.mark.ranks(1, 3)
def test_a_run_follows_it_and_learns_the_same(tmp_path_factory):
    comm = MPI.COMM_WORLD
    path = comm.bcast(write_config(tmp_path_factory.mktemp("run")) if comm.rank == 0 else None)
    out = path.parent
    common = ["training.epochs=1", "backend.transport=shared"]
    plain = train(path, [*common, f"output.directory={out / 'plain'}"], comm=comm)
    table = [f"reduction.{k}={str(v).lower()}" for k, v in TABLE.items()]
    found = train(path, [*common, *table, f"output.directory={out / 'chunks'}"], comm=comm)
    assert found["loss"] == pytest.approx(plain["loss"], rel=1e-9)
    rounded = ["training.dtype=float32", "reduction.payload=bfloat16", f"output.directory={out / 'rounded'}"]
    assert train(path, [*common, *rounded], comm=comm)["loss"] == pytest.approx(plain["loss"], rel=1e-2)


STEPS = 18  # six per epoch
CONSTANT = "schedule={kind = 'step', learning_rate = 0.01, milestones = [1], factor = 0.5}"


def test_resumed_with_another_scheme_on_another_number_of_ranks(tmp_path):
    config = write_config(tmp_path)

    def train(ranks, epochs, out, *settings, resume=()):
        settings = sets("training.batch=2", f"training.epochs={epochs}", CONSTANT, f"output.directory={out}", *settings)
        done = mpiexec(ranks, ["-m", "halograd", "train", config, *settings, *resume])
        assert done.returncode == 0, done.stderr
        return losses(out)

    nodes = "backend.transport=emulated:alpha=1e-5,beta=1e-11,node=2"
    wanted = train(1, 3, tmp_path / "whole")
    assert list(wanted) == list(range(1, STEPS + 1))
    out = tmp_path / "out"
    train(2, 1, out, "reduction.name=sharded")
    train(3, 2, out, "reduction.name=host_accumulate", "strategy.height=3", nodes, resume=["--resume"])
    found = train(2, 3, out, "reduction.name=sharded", "strategy.height=2", resume=["--resume"])
    assert list(found) == list(wanted)
    assert list(found.values()) == pytest.approx(list(wanted.values()), rel=1e-9)


def test_what_cannot_be_is_refused_in_one_line(tmp_path):
    config = write_config(tmp_path)
    for wrong, told in {
        "optimizer={kind = 'lars'}": 'kind: expected sgd, adam, adamw or lion with reduction.name = "sharded"',
        "reduction.payload=bfloat16": "reduction.payload: expected",
    }.items():
        done = mpiexec(2, [*PATIENT, "train", config, *sets("reduction.name=sharded", wrong)])
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert told in line
    settings = sets("reduction.name=hierarchical", "backend.transport=mpi")
    done = mpiexec(2, [*PATIENT, "train", config, *settings])
    assert done.returncode == 2
    assert 'by which ranks share memory with "hierarchical", got "mpi"; choose backend.transport' in done.stderr


AUTO = ["reduction={name='auto', interval=2, step=1, range=1}", "training.epochs=4"]


@pytest.fixture
def steady(monkeypatch):
    """Replace the trainer's clock by one on which all steps take the same time."""
    DrivenClock().drive(monkeypatch, trainer)


def trials(folder):
    return read_log(folder / "log.jsonl", "reduction")


@pytest.mark.ranks(1, 3)
def test_a_run_tries_chooses_and_goes_on(comm, config, steady):
    folder = config.parent
    if comm.rank == 0:
        train(config, ["training.epochs=4", f"output.directory={folder / 'plain'}"], comm=MPI.COMM_SELF)
    comm.Barrier()
    train(config, [*AUTO, f"output.directory={folder / 'auto'}"], comm=comm)
    expected, found = losses(folder / "plain"), losses(folder / "auto")
    assert found == pytest.approx(expected, rel=1e-9) and len(found) == 12
    *tried, chosen = trials(folder / "auto")
    assert [t["chosen"] for t in tried] == [False] * len(tried) and chosen["chosen"]
    assert [t["step"] for t in tried] == [2 * (i + 1) for i in range(len(tried))]
    names = [t["scheme"].partition("(")[0] for t in tried]
    assert names[:2] == ["bucketed", "two_chunks"]
    assert set(names[2:]) == ({"host_accumulate"} if comm.size > 1 else set())
    assert chosen["seconds"] == min(t["seconds"] for t in tried[: len(tried)])
    progress, _ = read_header(sorted((folder / "auto" / "checkpoints").glob("*.h5"))[-1])
    assert progress.reduction["ranks"] == comm.size and len(progress.reduction["tuner"]["trials"]) >= 2


@pytest.mark.ranks(2)
def test_a_resumed_run_does_not_try_again(comm, config, steady):
    """A run that was stopped during the trials of schemes resumes them, and does not repeat any."""
    folder = config.parent
    out = [f"output.directory={folder / 'out'}"]
    train(config, [*AUTO, "training.epochs=2", *out], comm=comm)
    before = trials(folder / "out")
    assert [t["scheme"] for t in before[:2]] == ["bucketed", before[1]["scheme"]] and not before[-1]["chosen"]
    train(config, [*AUTO, *out], resume=True, comm=comm)
    tried = [t["scheme"] for t in trials(folder / "out") if not t["chosen"]]
    assert tried[: len(before)] == [t["scheme"] for t in before] and len(tried) == len(set(tried)) > len(before)


@pytest.mark.ranks(2)
def test_schemes_are_tried_in_the_order_of_who_ranks_them(comm, config, steady):
    ranked = [Scheme("per_layer"), Scheme("blocking")]
    asked = []

    def ranker(settings, ranks, strategy):
        asked.append((settings.reduction.name, ranks.size, strategy.reduction.name))
        return ranked

    out = config.parent / "out"
    train(config, [*AUTO, f"output.directory={out}"], comm=comm, ranker=ranker)
    assert asked == [("auto", 2, "auto")]
    assert [t["scheme"] for t in trials(out)[:2]] == ["per_layer", "blocking"]


@pytest.mark.parametrize("machine", ["lassen", None])
def test_ranked_by_the_machine_that_is_named_or_not_at_all(tmp_path, monkeypatch, machine):
    """Schemes are ranked with the named machine; without one they are not ranked, because a run measures none."""
    monkeypatch.setenv("HALOGRAD_CACHE", str(tmp_path / "cache"))
    overrides = [f"strategy={{auto=true, machine='{machine}'}}"] if machine else []
    config = load_config(write_config(tmp_path), overrides)
    with Communicator(MPI.COMM_SELF) as comm:
        found = rank_schemes_of(config, comm, Strategy())
    everything = candidate_schemes(make_network(config), Strategy(), config.training.batch)
    assert sorted(map(str, found)) == (sorted(map(str, everything)) if machine else [])


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(),
        Scheme("two_chunks", first_layers=9, replicated_dense=2),
        Scheme("host_accumulate", chunk=7),
        Scheme("blocking", payload="bfloat16", error_feedback=False, deterministic=True),
    ],
)
def test_the_choice_can_be_pinned(tmp_path, scheme):
    """The printed setting of the chosen scheme is valid in a configuration and on the command line."""
    path = write_config(tmp_path)
    assert load_config(path, [pinned(scheme)]).reduction.scheme() == scheme
    path.write_text(f"{pinned(scheme)}\n{path.read_text()}")
    assert load_config(path).reduction.scheme() == scheme


RATE, AUTO_STEPS = 0.01, 26
TUNING = Tuning(interval=2, step=2, range=2, candidates=5)
RANKED = [
    Scheme("two_chunks", first_layers=3, replicated_dense=1),
    Scheme("bucketed"),
    Scheme("two_chunks", first_layers=2, replicated_dense=2),
    Scheme("blocking", replicated_dense=2),
]


def network():
    """Return a network of four convolutions, and two dense layers with more weights than activations and errors."""
    x, t = Input((12, 12, 2), "x"), Input((1,), "target", "int32")
    y = Conv(6, 3, padding=1, activation="relu", name="conv1")(x)
    y = MaxPool(2, 2, name="pool1")(Conv(8, 3, padding=1, activation="relu", name="conv2")(y))
    y = Conv(8, 3, padding=1, activation="relu", name="conv4")(Conv(8, 3, padding=1, name="conv3")(y))
    y = ReLU(name="relu1")(Dense(40, name="dense1")(Flatten(name="flatten")(y)))
    y = Dense(4, name="dense3")(ReLU(name="relu2")(Dense(30, name="dense2")(y)))
    return Network({"prediction": y, "loss": SoftmaxCrossEntropy(name="ce")(y, t)}, name="small vgg")


def build(comm, parts, reduction, dtype="float64"):
    strategy = Strategy(parts, bucket_bytes=4096, reduction=reduction)
    return Executor(network(), comm, get_backend("numpy"), 4, strategy, dtype, seed=5)


def auto_seconds(scheme, rank=0):
    """Return the artificial time of a step: 3 layers per chunk and two replicated layers are best."""
    base = {"two_chunks": 5.0, "bucketed": 6.0, "blocking": 9.0, "host_accumulate": 4.0}[scheme.name]
    chunked = 0.5 * abs(scheme.chunk - 3) if scheme.name == "host_accumulate" else 0.0
    return base - scheme.replicated_dense + chunked + 0.01 * rank


def feign(auto, comm):
    """Replace measured times by artificial ones; the search must use those of the slowest rank."""
    real = auto.after_step
    auto.after_step = lambda measured: real(auto_seconds(auto.scheme, comm.rank))


def momentum(store):
    return SGD(store, momentum=0.9, weight_decay=1e-3)


def train_auto(executor, make=momentum, steps=AUTO_STEPS, comm=None, state=None):
    """Return losses, arrays, measured times, and the search. Collective."""
    measured = []
    with executor:
        trainer = Trainer(executor, make(executor.store), Cosine(RATE, 2 * AUTO_STEPS), None, RANKED, TUNING)
        if trainer.auto is not None:
            if state is not None:
                trainer.auto.load_state_dict(state)
            feign(trainer.auto, comm)
            trainer.auto.on_measured = lambda *what: measured.append(what)
        losses = advance(trainer, range(steps))
        trainer.synchronize()
        params = copied(executor.store.params)
        return np.array(losses), params, measured, trainer.auto


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("make, axes", [(momentum, ("sample", "height")), (Adam, ("width",))])
def test_changing_schemes_keeps_the_losses_of_one_process(make, axes):
    with Communicator(MPI.COMM_SELF) as alone:
        expected, _, _, _ = train_auto(build(alone, {}, {}), make)
    assert expected[-3:].mean() < expected[:3].mean(), "the network must learn something"
    eps = float(np.finfo(np.float64).eps)
    bound = eps * math.sqrt(12 * 12 * 8 * 4) * 20 * (1 + np.arange(AUTO_STEPS)) ** 2
    with Communicator(MPI.COMM_WORLD) as comm:
        for parts in grids(comm.size, axes):
            found, _, measured, auto = train_auto(build(comm, parts, {"name": "auto"}), make, comm=comm)
            error = np.abs(found - expected) / np.maximum(1.0, np.abs(expected))
            comm.agree(None if (error <= bound).all() else AssertionError(f"{parts}: {error}, allowed {bound}"))
            # Four candidates, then chunks of 1, 2, 4 and 6 layers: of those that are tried, 2 and 4 are best.
            assert [str(s) for s, _, _ in measured[:4]] == [str(s) for s in RANKED]
            assert [s.chunk for s, _, _ in measured[4:]] == [1, 2, 4, 6]
            assert all(t == auto_seconds(s, comm.size - 1) for s, t, _ in measured), "the slowest rank counts"
            assert [done for _, _, done in measured] == [False] * 7 + [True]
            assert auto.done and auto.scheme == Scheme("host_accumulate", chunk=2, replicated_dense=2)
            assert auto.executor.store.scheme == auto.scheme
            everyone = comm.allgather_objects([(str(s), t) for s, t, _ in measured])
            assert all(other == everyone[0] for other in everyone)


@pytest.mark.ranks(2)
def test_a_run_goes_on_with_what_was_measured():
    with Communicator(MPI.COMM_WORLD) as comm:
        parts, auto = {"sample": comm.size}, {"name": "auto"}
        _, _, whole, last = train_auto(build(comm, parts, auto), comm=comm)
        for stop in (1, 12, 20):  # within the first interval, the search, and afterwards
            _, _, first, half = train_auto(build(comm, parts, auto), steps=stop, comm=comm)
            state = json.loads(json.dumps(half.state_dict()))
            _, _, second, other = train_auto(build(comm, parts, auto), comm=comm, state=state)
            assert first + second == whole and other.scheme == other.executor.store.scheme == last.scheme
        state["ranks"] += 1
        _, _, again, _ = train_auto(build(comm, parts, auto), comm=comm, state=state)
        assert again == whole, "what another number of ranks measured is forgotten"


@pytest.mark.ranks(2)
def test_what_another_transport_measured_is_forgotten():
    """Measurements over one transport are not used for another, which may lack the best scheme."""
    parts, auto = {"sample": 2}, {"name": "auto"}
    with Communicator(MPI.COMM_WORLD) as comm:
        _, _, _, before = train_auto(build(comm, parts, auto), comm=comm)
        assert before.scheme.name == "host_accumulate"
        state = json.loads(json.dumps(before.state_dict()))
    with Communicator(MPI.COMM_WORLD, "mpi") as comm:
        _, _, measured, after = train_auto(build(comm, parts, auto), comm=comm, state=state)
        assert [s for s, _, _ in measured] == RANKED and after.done


@pytest.mark.mpi(min_size=1)
def test_the_memory_of_a_search_is_that_of_the_program():
    """Predicted memory of a search is that of the executor: all dense layers that it may replicate are prepared."""
    with Communicator(MPI.COMM_WORLD) as comm, build(comm, {"sample": comm.size}, {"name": "auto"}) as executor:
        target = Target(executor.batch, comm.size, comm.rank, executor.dtype, overlaps=comm.waits_for_network)
        program = program_of(executor.network, executor.strategy, target)
        assert program.placement.size == executor.program.placement.size
        assert [bucket.layers for bucket in program.buckets] == [bucket.layers for bucket in executor.program.buckets]
        assert bool(program.exposed) == (comm.size > 1)


@pytest.mark.mpi(min_size=1)
def test_schemes_are_tried_without_a_cost_model_and_by_the_clock(monkeypatch):
    """Without a cost model a search measures schemes with the clock of the trainer."""
    DrivenClock().drive(monkeypatch, trainer_module)
    with Communicator(MPI.COMM_WORLD) as comm, build(comm, {"sample": comm.size}, {"name": "auto"}) as executor:
        trainer = Trainer(executor, SGD(executor.store), Cosine(RATE, 99), tuning=Tuning(2, 1, 1))
        several = comm.size > 1
        assert executor.replicable == (["dense1", "dense2"] if several else [])
        advance(trainer, range(40))
        trainer.synchronize()
        assert trainer.auto.finished and all(t.seconds == TICK for t in trainer.auto.tuner.trials)
        tried = {t.scheme.name for t in trainer.auto.tuner.trials}
        assert tried == {"bucketed", "two_chunks"} | ({"host_accumulate"} if several else set())
        chosen = comm.allgather_objects(str(trainer.auto.scheme))
        assert len(set(chosen)) == 1 and str(executor.store.scheme) == chosen[0]


@pytest.mark.mpi(min_size=2)
def test_more_replicated_layers_than_there_is_room_for_are_no_candidates():
    with Communicator(MPI.COMM_WORLD) as comm, build(comm, {"sample": comm.size}, {"name": "auto"}) as executor:
        ranked = [Scheme("bucketed", replicated_dense=3), Scheme("sharded"), Scheme("bucketed", replicated_dense=1)]
        trainer = Trainer(executor, SGD(executor.store), Cosine(RATE, 99), ranked=ranked, tuning=Tuning(step=0))
        assert trainer.auto.tuner.candidates == ranked[2:] and trainer.auto.tuner.search is None
        with pytest.raises(ValueError, match=r"replicated .*\['dense1', 'dense2'\]"):
            trainer.reduce_by(ranked[0])
        with pytest.raises(ValueError, match="expected 'auto' to stay"):
            trainer.reduce_by(ranked[1])


@pytest.mark.parametrize("wrong", [{"interval": 1}, {"step": -1}, {"range": 0}, {"candidates": 0}])
def test_tuning_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected at least"):
        Tuning(**wrong)


def listing(times, step, reach):
    """Return the tried sizes and the best one by Algorithm 1 of Le et al. 2018, with `times` in place of clocks."""
    chunk, best_chunk, lapse_min, done, sizes = 1, 1, math.inf, False, []
    while not done:
        sizes.append(chunk)
        if chunk >= best_chunk + step * reach:
            chunk = best_chunk
            done = True
        else:
            lapse = times(chunk)
            if lapse < lapse_min:
                lapse_min = lapse
                best_chunk = chunk
            chunk = chunk + 1 if chunk < step else chunk + step
    return sizes, chunk


def run(search, times):
    sizes = []
    while not search.done:
        sizes.append(search.chunk)
        search.observe(times(search.chunk))
    return sizes, search.chunk


@given(st.integers(1, 12), st.integers(1, 10), st.lists(st.integers(1, 9), min_size=1, max_size=60))
def test_search_is_the_listing(step, reach, values):
    def times(chunk):
        return float(values[chunk % len(values)])

    assert run(ChunkSearch(10**9, step, reach), times) == listing(times, step, reach)


@pytest.mark.parametrize(
    "step, reach, best, intervals", [(10, 5, 9, 15), (10, 10, 20, 21), (3, 5, 3, 8), (10, 5, 1, 15)]
)
def test_intervals_of_the_paper(step, reach, best, intervals):
    """Searches take the numbers of intervals of Section 5.3: (10, 5) ends at iteration 150; all take at most 21."""
    sizes, found = run(ChunkSearch(10**9, step, reach), lambda chunk: abs(chunk - best) + 1.0)
    assert (len(sizes), found) == (intervals, best)


def test_no_chunk_is_longer_than_the_network():
    sizes, found = run(ChunkSearch(7), lambda chunk: 1.0 / chunk)
    assert (sizes, found) == ([1, 2, 3, 4, 5, 6, 7], 7)


@pytest.mark.parametrize("settings", [{"layers": 0}, {"layers": 3, "step": 0}, {"layers": 3, "range": 0}])
def test_refused(settings):
    with pytest.raises(ValueError, match="expected at least 1, got 0"):
        ChunkSearch(**settings)
    search = ChunkSearch(1)
    search.observe(1.0)
    with pytest.raises(ValueError, match="got one that is done"):
        search.observe(1.0)


CANDIDATES = [Scheme("bucketed"), Scheme("two_chunks", first_layers=3, replicated_dense=2), Scheme("bucketed")]


def search_seconds(scheme):
    if scheme.name == "host_accumulate":
        return 0.5 + 0.1 * abs(scheme.chunk - 4)
    return {"bucketed": 0.9, "two_chunks": 0.6}[scheme.name]


def tuned(tuner, times, stop=10**9):
    """Run up to `stop` intervals of a tuner; return the scheme of each."""
    schemes = []
    while not tuner.done and len(schemes) < stop:
        schemes.append(tuner.scheme)
        tuner.observe(times(tuner.scheme))
    return schemes


def test_tuner_tries_candidates_once_then_chunks_with_the_better_replication():
    tuner = Tuner(CANDIDATES, ChunkSearch(8, 10, 5))
    schemes = tuned(tuner, search_seconds)
    assert schemes[:2] == CANDIDATES[:2]
    assert [(s.chunk, s.replicated_dense) for s in schemes[2:]] == [(k, 2) for k in range(1, 9)]
    assert tuner.scheme == Scheme("host_accumulate", chunk=4, replicated_dense=2)
    assert tuner.best.seconds == 0.5 and len(tuner.trials) == 10
    with pytest.raises(ValueError, match="got one that is done"):
        tuner.observe(1.0)


def test_tuner_takes_a_candidate_where_no_chunk_is_better():
    tuner = Tuner(CANDIDATES, ChunkSearch(8, 2, 2))
    tuned(tuner, lambda scheme: search_seconds(scheme) + 1.0 * (scheme.name == "host_accumulate"))
    assert tuner.scheme == CANDIDATES[1]


def test_tuner_without_a_search():
    tuner = Tuner(CANDIDATES)
    assert tuned(tuner, search_seconds) == CANDIDATES[:2] and tuner.scheme == CANDIDATES[1]
    with pytest.raises(ValueError, match="at least one scheme"):
        Tuner([])


@pytest.mark.parametrize("stop", range(11))
def test_tuner_goes_on_from_its_state(stop):
    whole, first = Tuner(CANDIDATES, ChunkSearch(8)), Tuner(CANDIDATES, ChunkSearch(8))
    expected = tuned(whole, search_seconds)
    before = tuned(first, search_seconds, stop)
    second = Tuner([Scheme("blocking")], ChunkSearch(8))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + tuned(second, search_seconds) == expected and second.scheme == whole.scheme
