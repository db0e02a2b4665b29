"""Tests of the exact number of CuPy operations and kernel launches of a training step."""

from collections import Counter
from dataclasses import replace

import pytest

from halograd.layers import BatchNorm
from tests.kernels.cuda.host import HostBackend, HostLauncher, compiler
from tests.support.step_counts import NETWORKS, StepCounts, count_step

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
    ("resnet50", 1): StepCounts(operations=5, launches=341, library_calls=161),
    ("resnet50", 2): StepCounts(operations=5, launches=404, library_calls=161),
    ("mesh_2k", 1): StepCounts(operations=2, launches=185, library_calls=92),
    ("mesh_2k", 2): StepCounts(operations=2, launches=295, library_calls=92),
    ("unet2d", 1): StepCounts(operations=2, launches=145, library_calls=68),
    ("unet2d", 2): StepCounts(operations=2, launches=213, library_calls=68),
    ("unet3d", 1): StepCounts(operations=2, launches=113, library_calls=53),
    ("unet3d", 2): StepCounts(operations=2, launches=191, library_calls=53),
}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_takes_exactly_so_many(name, parts, cuda):
    """A step has exactly the expected operations and launches; in 16 bits one launch more, which converts gradients."""
    found = count_step(NETWORKS[name](), cuda, {"height": parts})
    assert found == EXPECTED[name, parts]
    assert found.operations <= MOST
    low = count_step(NETWORKS[name](), cuda, {"height": parts}, "bfloat16")
    assert low == replace(found, launches=found.launches + 1)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_clipping_takes_three_launches(dtype, cuda):
    """Clipping takes three launches: squares of all gradients, their sum, norm and factor; and two operations."""
    network = NETWORKS["resnet50"]()
    plain, clipped = (count_step(network, cuda, {}, dtype, clip) for clip in (None, 1.0))
    assert clipped == replace(plain, operations=plain.operations + 2, launches=plain.launches + 3)
    assert clipped.operations <= MOST


@pytest.mark.parametrize("parts", [1, 2])
def test_launches_of_a_batch_norm(parts, cuda):
    """A batch norm, also a cut one, takes six launches: sums of x, their end, y; sums of dy, their end, dx."""
    cuda.launcher.launched.clear()
    network = NETWORKS["mesh_2k"]()
    count_step(network, cuda, {"height": parts})
    norms = sum(isinstance(node.layer, BatchNorm) for node in network.layers.values())
    launched = Counter(name.removesuffix("_1").removesuffix("_v") for name in cuda.launcher.launched)
    kernels = {"statistics": 1, "forward": 1, "gradient_sums": 1, "finish_sums": 2, "gradient_data": 1}
    assert {name: launched[name] for name in kernels} == {name: 3 * norms * n for name, n in kernels.items()}
    assert sum(kernels.values()) == 6
