"""The first training steps of a U-Net against an independent one in torch."""

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.models import unet
from halograd.testing import random_array
from halograd.training.executor import Executor

torch = pytest.importorskip("torch", reason="needs torch (pip install .[oracle]) as independent oracle")
pytestmark = pytest.mark.torch

SHAPE, CHANNELS, CLASSES, WIDTH, LEVELS, BATCH, RATE, STEPS = (16, 24), 2, 3, 4, 2, 3, 0.05, 6


class Double(torch.nn.Sequential):
    def __init__(self, channels: int, filters: int) -> None:
        units: list[torch.nn.Module] = []
        for before in (channels, filters):
            units += [torch.nn.Conv2d(before, filters, 3, padding=1, bias=False), torch.nn.BatchNorm2d(filters)]
            units += [torch.nn.ReLU()]
        super().__init__(*units)


class TorchUNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [WIDTH * 2**i for i in range(LEVELS + 1)]
        self.down = torch.nn.ModuleList(Double(c, f) for c, f in zip([CHANNELS, *widths], widths[:-1]))
        self.bottom = Double(widths[-2], widths[-1])
        self.lift = torch.nn.ModuleList(torch.nn.ConvTranspose2d(2 * f, f, 2, 2) for f in widths[:-1])
        self.up = torch.nn.ModuleList(Double(2 * f, f) for f in widths[:-1])
        self.predict = torch.nn.Conv2d(WIDTH, CLASSES, 1)

    def forward(self, x):
        skips = []
        for block in self.down:
            skips.append(block(x))
            x = torch.nn.functional.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for level in reversed(range(LEVELS)):
            x = self.up[level](torch.cat([skips[level], self.lift[level](x)], 1))
        return self.predict(x)


def give_weights(model: TorchUNet, params: dict) -> None:
    """Copy our parameters ``(K, h, w, C)`` into torch's modules ``(K, C, h, w)``."""

    def put(target, name):
        array = params[name]
        target.data = torch.from_numpy(np.moveaxis(array, -1, 1).copy() if array.ndim == 4 else array.copy())

    blocks = {f"down{i}": b for i, b in enumerate(model.down)} | {f"up{i}": b for i, b in enumerate(model.up)}
    for label, block in (blocks | {"bottom": model.bottom}).items():
        for part, conv, norm in zip("ab", (block[0], block[3]), (block[1], block[4])):
            put(conv.weight, f"{label}_conv_{part}/w")
            put(norm.weight, f"{label}_bn_{part}/gamma")
            put(norm.bias, f"{label}_bn_{part}/beta")
    for label, layer in {f"up{i}": m for i, m in enumerate(model.lift)}.items() | {("predict", model.predict)}:
        put(layer.weight, f"{label}/w")
        put(layer.bias, f"{label}/b")


def test_first_training_steps_are_those_of_torch():
    network = unet(SHAPE, channels=CHANNELS, classes=CLASSES, width=WIDTH, levels=LEVELS)
    x = random_array((BATCH, *SHAPE, CHANNELS), "x")
    t = np.floor(3 * np.abs(random_array((BATCH, *SHAPE, 1), "t"))) % CLASSES
    model = TorchUNet().double()
    ours, theirs = [], []
    with Communicator(MPI.COMM_SELF) as comm:
        executor = Executor(network, comm, get_backend("numpy"), BATCH, dtype="float64", seed=5)
        give_weights(model, executor.store.params)
        executor.set_input("x", x)
        executor.set_input("target", t)
        for _ in range(STEPS):
            executor.forward()
            ours.append(executor.loss_value())
            executor.backward()
            executor.reducer.finish()
            for bucket in executor.store.buckets:
                bucket.params -= RATE * bucket.grads
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = model(torch.from_numpy(np.moveaxis(x, -1, 1).copy()))
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(t[..., 0]).long())
        loss.backward()
        optimizer.step()
        theirs.append(loss.item())
    assert theirs[-1] < theirs[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-11)
