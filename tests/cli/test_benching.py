"""`halograd bench allreduce`: every way of summing is timed, what cannot be had is said, mistakes are one line."""

from __future__ import annotations

import json

import pytest

from halograd.cli.profiling import METHODS
from tests.cli.test_cli import halograd
from tests.launch import mpiexec

QUICK = ["-m", "halograd", "bench", "allreduce", "--rounds", 1, "--size", "1KiB", "--size", "256KiB"]


def test_every_method_is_timed_as_json():
    done = mpiexec(2, [*QUICK, "--transport", "auto", "--transport", "emulated:alpha=1e-3,beta=0", "--json"])
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["ranks"] == "2 ranks on 2 nodes"  # of the emulated network
    assert [row["method"] for row in record["sums"]] == 2 * list(METHODS)
    for row in record["sums"]:
        waited, left = row["waited"], row["left"]
        assert waited["bytes"] == [1024, 262144] and min(waited["seconds"] + left["seconds"]) > 0
    slow = {row["method"]: min(row["waited"]["seconds"]) for row in record["sums"] if "alpha" in row["transport"]}
    assert slow["allreduce"] >= 2e-3, "a ring of two ranks takes 2 alpha"
    assert slow["all_gather"] >= 1e-3, "and half of one takes alpha"


def test_the_table_says_what_a_transport_cannot():
    done = mpiexec(2, [*QUICK, "--transport", "mpi", "--method", "allreduce", "--method", "accumulate"])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 ranks on 1 node: ") and "256 KiB" in lines[2]
    (accumulate,) = [line for line in lines if line.startswith("mpi        accumulate")]
    assert accumulate.split()[2:] == ["-"] * 7
    assert lines[-1].startswith("mpi: ") and "share memory" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "large"], "--size: expected a size of at least 4 bytes, such as 256KiB or 4MiB, got 'large'"),
        (["--size", "2B"], "--size: expected a size of at least 4 bytes"),
        (["--method", "luck"], "--method: expected one of allreduce, ordered, rounded"),
        (["--transport", "pigeon"], "--transport: expected 'auto', 'mpi'"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    done = halograd("bench", "allreduce", *arguments)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_one_rank_is_told_that_it_is_alone():
    done = halograd("bench", "allreduce", "--size", "1KiB", "--size", "2KiB", "--transport", "auto")
    assert done.returncode == 0 and "one rank has nobody to sum with" in done.stdout
