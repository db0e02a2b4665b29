"""Vision transformers with weights of torchvision, in float64, against torchvision: a step under cuts."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.interchange.weights import arrangements, load_weights, save_weights
from halograd.kernels import get_backend
from halograd.layers.strategy import Strategy
from halograd.models import swin, vit
from halograd.testing import random_array
from halograd.training.executor import Executor
from tests.interchange.foreign import let_torchvision_load
from tests.interchange.support import predicted

BATCH, CLASSES = 2, 5
#: Our network, torchvision's, and the name of the last layer: a patch grid that windows do not divide, with odd extents
#: to merge; a last stage of one window.
NETWORKS = {
    "vit": (
        lambda: vit(2, 2, 8, 12, patch=4, classes=CLASSES, resolution=12),
        lambda models: models.VisionTransformer(12, 4, 2, 2, 8, 12, num_classes=CLASSES),
        "heads.head",
    ),
    "swin": (
        lambda: swin((2, 2), (2, 3), 6, 3, 2, classes=CLASSES, resolution=22),
        lambda models: models.SwinTransformer(
            [2, 2], 6, [2, 2], [2, 3], [3, 3], num_classes=CLASSES, stochastic_depth_prob=0.0
        ),
        "head",
    ),
    "swin of one window": (
        lambda: swin((1, 2), (2, 3), 6, 3, 2, classes=CLASSES, resolution=12),
        lambda models: models.SwinTransformer(
            [2, 2], 6, [1, 2], [2, 3], [3, 3], num_classes=CLASSES, stochastic_depth_prob=0.0
        ),
        "head",
    ),
}
CUTS = {1: {}, 2: {"width": 2}, 4: {"height": 2, "width": 2}}


def _models():
    """Return torchvision's models; skip the test without torchvision."""
    pytest.importorskip("torch", reason="needs torch as oracle: pip install 'halograd[oracle-zoo]'")
    let_torchvision_load()
    return pytest.importorskip("torchvision.models", reason="needs torchvision: pip install 'halograd[oracle-zoo]'")


def _step_of_torch(make, x, target, path):
    """Write random weights; return logits, loss and gradients, by torch's names."""
    import torch
    from safetensors.torch import save_file

    module = make(_models()).double()
    for name, one in module.named_parameters():
        one.data = torch.from_numpy(random_array(tuple(one.shape), name)) + float(one.dim() == 1)
    save_file({key: value.contiguous() for key, value in module.state_dict().items()}, path)
    logits = module(torch.from_numpy(np.moveaxis(x, -1, 1)))
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(target[:, 0]).long())
    loss.backward()
    return logits.detach().numpy(), loss.item(), {k: one.grad.numpy() for k, one in module.named_parameters()}


@pytest.mark.torch
@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_with_weights_of_torchvision(name, tmp_path):
    make, theirs, last = NETWORKS[name]
    _models()
    network = make()
    x = random_array((BATCH, *network.inputs["x"].shape), "x")
    target, path = np.arange(BATCH, dtype=np.int32)[:, None] % CLASSES, tmp_path / f"{MPI.COMM_WORLD.rank}.safetensors"
    logits, loss, gradients = _step_of_torch(theirs, x, target, path)
    network.begin_with(load_weights(network, path))
    with (
        Communicator(MPI.COMM_WORLD) as comm,
        get_backend("numpy") as kernels,
        Executor(network, comm, kernels, BATCH, Strategy(CUTS[comm.size]), "float64", seed=0) as executor,
    ):
        executor.set_input("x", x)
        executor.set_input("target", target)
        executor.forward(training=True)
        assert executor.loss_value() == pytest.approx(loss, rel=1e-12)
        executor.backward()
        executor.reducer.finish()
        found, grads = executor.gather(last), executor.store.gather(comm, executor.store.grads)
        with comm.agreement():
            if comm.rank == 0:
                np.testing.assert_allclose(found, logits, rtol=0, atol=1e-10)
                for key, one in arrangements(network).items():
                    want = one.from_torch(gradients[one.names[0]])
                    np.testing.assert_allclose(grads[key], want, rtol=0, atol=1e-10 * max(1, np.abs(want).max()))


@pytest.mark.torch
@pytest.mark.parametrize("name", NETWORKS)
def test_weights_go_back_to_torchvision(name, tmp_path):
    import torch
    from safetensors.torch import load_file

    make, theirs, _ = NETWORKS[name]
    module, network = theirs(_models()).double(), make()
    specs = {**network.parameters(), **network.state()}
    values = {key: random_array(spec.shape, key) for key, spec in specs.items()}
    save_weights(network, values, tmp_path / "w")
    missing, unexpected = module.load_state_dict(load_file(tmp_path / "w"), strict=False)
    assert not unexpected and all(key.endswith("relative_position_index") for key in missing)
    network.begin_with(values)
    x = random_array((BATCH, *network.inputs["x"].shape), "x")
    want = module.eval()(torch.from_numpy(np.moveaxis(x, -1, 1))).detach().numpy()
    found = predicted(hg.Network({"prediction": network.outputs["prediction"]}), x)["prediction"]
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-11 * np.abs(want).max())
