"""Tests of runs whose configuration selects a scheme of gradient reduction, or searches for one."""

import pytest
from mpi4py import MPI

from halograd.auto import rank_schemes_of
from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.layers.reduction_scheme import NAMES, Scheme
from halograd.layers.strategy import Strategy
from halograd.perfmodel.plan_candidates import candidate_schemes
from halograd.training import trainer
from halograd.training.auto_reduction import pinned
from halograd.training.build import make_network, with_reduction
from halograd.training.checkpoint import read_header
from halograd.training.config import load_config
from halograd.training.log import read_log
from halograd.training.run import train
from tests.launch import PATIENT, mpiexec
from tests.support.clock import DrivenClock
from tests.training.launching import losses, sets
from tests.training.runs import write_config

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
