"""Tests of every layer on some of the ranks: the other ranks hold no data of it, and the results are right."""

import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.dtensor import axis_names
from halograd.testing import compare, run_layer
from tests.layers.cases import LAYERS, SPATIAL
from tests.layers.graphs import Centre, poison

#: Under cuts these are not what one process computes: see test_batch_norm.
OWN_STATISTICS = {name: (lambda name=name: hg.BatchNorm(name), SPATIAL) for name in ("local", "sample")}
CASES = {**LAYERS, "custom": (Centre, SPATIAL), **OWN_STATISTICS}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("backend, dtype", [("numpy", "float64"), ("onednn", "float32")])
@pytest.mark.parametrize("name", CASES)
def test_exact_on_fewer_ranks(name, backend, dtype, monkeypatch):
    poison(monkeypatch)
    make, shapes = CASES[name]
    first = (axis_names(len(shapes[0]) + 1)[1:-1] or ("sample",))[0]
    options = {"backend": backend, "dtype": dtype, "steps": 2}
    with Communicator(MPI.COMM_SELF) as alone, Communicator(MPI.COMM_WORLD) as comm:
        for parts in ({first: 1}, {first: 2}, {"sample": 2}):
            found = run_layer(make, shapes, comm, parts, **options)
            fault = None
            if found is not None and not (name in OWN_STATISTICS and parts != {first: 1}):
                want = run_layer(make, shapes, alone, {}, **options)
                fault = compare(found, want, 256.0, dtype, str(parts))
            comm.agree(fault)
