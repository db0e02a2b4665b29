"""[reduction] in a configuration: what is trained with, what is refused, what wins over a plan's scheme."""

import pytest
from mpi4py import MPI

from halograd.errors import UserError
from halograd.layers.reduction_scheme import NAMES, Scheme
from halograd.layers.strategy import Strategy
from halograd.training.build import with_reduction
from halograd.training.config import load_config
from halograd.training.run import train
from tests.training.runs import write_config

TABLE = {"name": "two_chunks", "first_layers": 2, "deterministic": True}


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path)


def test_every_name_is_known(config):
    for name in NAMES:
        first = ["reduction.first_layers=3"] if name == "two_chunks" else []
        assert load_config(config, [*first, f"reduction.name={name}"]).reduction.scheme().name == name


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reduction.name=ring"], "reduction.name: expected one of 'blocking', .* or 'auto', got 'ring'"),
        (["reduction.name=two_chunks"], r"reduction.first_layers: expected the number of layers .*\(>= 1\).*, got 0"),
        (["reduction.payload=float16"], "reduction.payload: expected one of 'float32' or 'bfloat16', got 'float16'"),
        (["reduction.chunk=2"], "reduction.chunk: expected name = \"host_accumulate\" with it, got 'bucketed'"),
        (["reduction.bytes=2"], "reduction.bytes: unknown key; expected one of name, first_layers"),
    ],
)
def test_what_is_refused_in_one_line(config, overrides, message):
    with pytest.raises(UserError, match=message) as found:
        load_config(config, overrides)
    assert "\n" not in str(found.value)


def test_the_table_wins_over_a_plan_and_nothing_does_not(config):
    planned = Strategy(reduction=Scheme("per_layer"))
    assert with_reduction(planned, load_config(config)) == planned
    pinned = load_config(config, [f"reduction.{k}={str(v).lower()}" for k, v in TABLE.items()])
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
