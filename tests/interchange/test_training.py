"""One training step of an imported network, under every cut that the ranks permit, against torch."""

import numpy as np
import pytest

import halograd as hg
from halograd.kernels import get_backend
from halograd.testing import grids
from halograd.training.executor import Executor
from tests.interchange import unet
from tests.interchange.support import export, first, samples, shake, torch
from tests.support.on_rank_0 import on_rank_0

pytestmark = pytest.mark.torch
RATE = 0.1


def _step_of_torch(module, x, classes):
    """Return the loss of a torch module, and its parameters after a step of SGD."""
    lib = torch()
    module.train()
    optimizer = lib.optim.SGD(module.parameters(), lr=RATE)
    loss = lib.nn.functional.cross_entropy(module(first(x)), lib.tensor(classes[..., 0]).long())
    loss.backward()
    optimizer.step()
    return loss.item(), {name: p.detach().numpy() for name, p in module.named_parameters()}


def _trainable(path):
    """Return the network of a file, completed with a loss, as in docs/torch.md."""
    imported = hg.onnx.load(path)
    (logits,) = imported.outputs.values()
    target = hg.Input((*logits.shape[:-1], 1), "target", "int32")
    return hg.Network({"prediction": logits, "loss": hg.SoftmaxCrossEntropy()(logits, target)})


@pytest.mark.parametrize(
    "exporter",
    [pytest.param("old", marks=pytest.mark.ranks(1, 4)), pytest.param("dynamo", marks=pytest.mark.ranks(2))],
)
def test_a_step_of_a_u_net_is_that_of_torch(exporter, comm, shared):
    x = samples(*unet.RESOLUTION, unet.CHANNELS)
    classes = np.floor(4 * np.abs(samples(*unet.RESOLUTION, 1, name="t"))) % unet.CLASSES
    path = shared / "unet.onnx"

    def of_torch():
        module = unet.make().double()
        shake(module)
        export(module, first(x), path, exporter, training=True)
        return _step_of_torch(module, x, classes)

    want, after = on_rank_0(comm, of_torch)
    network = _trainable(path)
    for parts in grids(comm.size, ("sample", "height", "width")):
        if parts["sample"] > len(x):
            continue
        with hg.Communicator(comm) as ranks:
            strategy = hg.Strategy(parts)
            with Executor(network, ranks, get_backend("numpy"), len(x), strategy, "float64") as executor:
                trainer = hg.Trainer(executor, hg.SGD(executor.store), hg.Constant(RATE))
                executor.set_input("x", x)
                executor.set_input("target", classes)
                assert trainer.step() == pytest.approx(want, rel=1e-11), parts
                trainer.synchronize()
                found = executor.store.gather(ranks, executor.store.params)
        for name, array in (found or {}).items():
            layer, _, key = name.rpartition("/")
            theirs = after[f"{layer}.{'bias' if key in ('b', 'beta') else 'weight'}"]
            ours = np.moveaxis(array, -1, 1) if array.ndim > 1 else array
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-11, err_msg=f"{name} {parts}")
