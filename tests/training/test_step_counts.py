"""Tests of the exact number of CuPy operations and kernel launches of a training step."""

from collections import Counter
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.kernels.summed import is_one_launch
from halograd.layers import BatchNorm
from halograd.models import mesh_2k, resnet50
from halograd.training.executor import Executor
from halograd.training.optimizers import SGD
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer
from tests.kernels.cuda.host import HostBackend, HostLauncher, compiler
from tests.support.fake_device import FakeBackend
from tests.support.step_counts import NETWORKS, StepCounts, count_step
from tests.training.device_steps import NETWORKS as NAMED
from tests.training.device_steps import train
from tests.training.steps import assert_arrays, fill

#: Operations of CuPy that a step may take, of any of these networks, cut or not.
MOST = 60


@pytest.fixture(scope="module")
def cuda():
    """Return our CUDA kernels, compiled for the CPU, each once."""
    if compiler() is None:
        pytest.skip("needs g++ to run CUDA kernels on the CPU")
    return HostBackend(HostLauncher())


#: By network and number of parts of the height.
EXPECTED = {
    ("resnet50", 1): StepCounts(operations=5, launches=130, library_calls=161),
    ("resnet50", 2): StepCounts(operations=5, launches=297, library_calls=161),
    ("mesh_2k", 1): StepCounts(operations=2, launches=83, library_calls=92),
    ("mesh_2k", 2): StepCounts(operations=2, launches=233, library_calls=92),
    ("unet2d", 1): StepCounts(operations=2, launches=75, library_calls=68),
    ("unet2d", 2): StepCounts(operations=2, launches=171, library_calls=68),
    ("unet3d", 1): StepCounts(operations=2, launches=64, library_calls=53),
    ("unet3d", 2): StepCounts(operations=2, launches=158, library_calls=53),
}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_takes_exactly_so_many(name, parts, cuda):
    """A step has exactly the expected operations and launches; in 16 bits, where gradients are summed over ranks, one
    launch more, which converts them.
    """
    found = count_step(NETWORKS[name](), cuda, {"height": parts})
    assert found == EXPECTED[name, parts]
    assert found.operations <= MOST
    low = count_step(NETWORKS[name](), cuda, {"height": parts}, "bfloat16")
    assert low == replace(found, launches=found.launches + (parts > 1))


@pytest.mark.parametrize("more", [{}, {"clip": 1e-3}, {"split": 2}], ids=str)
def test_updates_that_read_gradients_of_16_bits_change_nothing(more, cuda):
    """Updates that read gradients before their conversion train with the same bits; norms and parts need it."""
    found, launches = [], []
    for reads in (False, True):
        kernels = FakeBackend(cuda)
        kernels.reads_rounded = reads
        cuda.launcher.launched.clear()
        with Communicator(MPI.COMM_SELF) as comm:
            found.append(train(NAMED["lenet"](), comm, kernels, {}, dtype="bfloat16", **more)[:2])
        launches.append(len(cuda.launcher.launched))
        kernels.close()
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert_arrays(found[0][1], found[1][1])
    assert (launches[1] < launches[0]) == (not more)


def test_a_second_trainer_that_clips_reads_the_gradients_of_its_own_steps(cuda):
    """A trainer without clipping leaves gradients in 16 bits; a later one with clipping converts them again."""
    found = []
    for reads in (False, True):
        kernels = FakeBackend(cuda)
        kernels.reads_rounded = reads
        with Communicator(MPI.COMM_SELF) as comm, Executor(NAMED["lenet"](), comm, kernels, 4, None, "bfloat16") as e:
            for step, clip in enumerate((None, 1e-3, None)):
                trainer = Trainer(e, SGD(e.store, momentum=0.9), Constant(0.1), clip_norm=clip)
                fill(e, step)
                trainer.step()
                trainer.synchronize()
                found.append({name: e.device.to_host(array).copy() for name, array in e.store.params.items()})
        kernels.close()
    for without, direct in zip(found[:3], found[3:], strict=True):
        assert_arrays(without, direct)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_clipping_takes_three_launches(dtype, cuda):
    """Clipping takes three launches: squares of all gradients, their sum, norm and factor; and two operations."""
    network = NETWORKS["resnet50"]()
    plain, clipped = (count_step(network, cuda, {}, dtype, clip) for clip in (None, 1.0))
    assert clipped == replace(plain, operations=plain.operations + 2, launches=plain.launches + 3)
    assert clipped.operations <= MOST


def launched(cuda, name, parts):
    """Return the launches of a step by name of the kernel, and the number of batch norms."""
    cuda.launcher.launched.clear()
    network = NETWORKS[name]()
    count_step(network, cuda, {"height": parts})
    norms = sum(isinstance(node.layer, BatchNorm) for node in network.layers.values())
    counted = Counter(name.removesuffix("_1").removesuffix("_v") for name in cuda.launcher.launched)
    return {name: count / 3 for name, count in counted.items()}, norms


APART = ("statistics", "forward", "gradient_sums", "gradient_data")
WHOLE = ("whole_forward", "whole_backward")


@pytest.mark.parametrize(("parts", "rows", "names"), [(1, 1 << 20, WHOLE), (1, 0, APART), (2, 1 << 20, APART)])
def test_launches_of_a_batch_norm(parts, rows, names, cuda, monkeypatch):
    """A batch norm takes four launches: sums of x, y; sums of dy, dx. On one rank, with few rows, it takes two."""
    monkeypatch.setattr("halograd.kernels.summed.MOST_ROWS", rows)
    monkeypatch.setattr("halograd.kernels.summed.LAUNCH", 1.0)
    found, norms = launched(cuda, "mesh_2k", parts)
    assert {name: found.get(name, 0) for name in (*APART, *WHOLE)} == {
        name: norms * (name in names) for name in (*APART, *WHOLE)
    }


#: Sums of batch norms in plans of cuDNN, forward and backward.
FUSED = {"resnet50": (52, 29), "mesh_2k": (30, 24)}


@pytest.mark.parametrize(("name", "parts"), [("resnet50", 1), ("mesh_2k", 2)])
def test_fused_sums(name, parts, cuda, monkeypatch):
    """A plan with sums takes the place of a convolution and a launch for the sums; these are converted or copied."""
    monkeypatch.setattr("halograd.kernels.summed.MOST_ROWS", 0)
    network, counts, names = resnet50(width=8, resolution=64, classes=5) if parts == 1 else NETWORKS[name](), [], []
    for passes in ((), ("sums",)):
        cuda.launcher.launched.clear()
        counts.append(count_step(network, cuda, {"height": parts}, "bfloat16", passes=passes))
        names.append(Counter(name.rsplit("_", 1)[0] for name in cuda.launcher.launched))
    changed = {name: (names[1][name] - names[0][name]) / 3 for name in names[0] | names[1]}
    forward, backward = FUSED[name]
    assert changed.pop("statistics") == -forward and changed.pop("gradient_sums") == -backward
    # Without sums over ranks only those that are gradients of parameters too are copied.
    assert changed.pop("copy" if parts == 1 else "convert") == backward + (parts > 1) * forward
    assert not any(changed.values()) and counts[1].launches - counts[0].launches == -(parts == 1) * forward
    assert counts[1] == replace(counts[0], launches=counts[1].launches)


@pytest.mark.parametrize(
    ("name", "full", "expected", "most"), [("resnet50", resnet50, 143, 22), ("mesh_2k", mesh_2k, 120, 3)]
)
def test_launches_of_the_norms_of_published_sizes(name, full, expected, most, cuda):
    """Launches of all batch norms with batch 1 in 16 bits; the narrow networks above have no more than a few others."""
    shapes = [node.shape for node in full().layers.values() if isinstance(node.layer, BatchNorm)]
    sizes = [(prod(shape[:-1]), shape[-1]) for shape in shapes]
    # 132 multiprocessors; a block has 16 channels
    one = [is_one_launch(n, 2 * n * c, -(-c // 16), tensors) for n, c in sizes for tensors in (1, 2)]
    assert sum(2 - pays for pays in one) == expected
    found, norms = launched(cuda, name, 1)
    others = sum(found.values()) - sum(found.get(name, 0) for name in (*APART, *WHOLE))
    assert len(sizes) == norms and round(others + 1 / 3) == most  # the last update is made in the next step
