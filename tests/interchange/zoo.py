"""torchvision's networks and U-Nets, imported, and one training step on 2 x 2 blocks, against torch.

Not a part of the suite, because it needs torchvision and some minutes.

    python -m tests.interchange.zoo                    all of them
    python -m tests.interchange.zoo resnet50 unet      some of them

Outputs are compared in evaluation, parameters after one step of SGD in training, in float64: the largest difference,
relative to the largest output, and to the largest change of a parameter. Dropout is off in both: it draws its own
numbers in each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import halograd as hg
from halograd.errors import UserError
from halograd.interchange.weights import arrangements
from halograd.kernels import get_backend
from halograd.training.executor import Executor
from tests.interchange import unet
from tests.interchange.support import export, first, predicted, samples, torch
from tests.launch import find_mpiexec

RATE, RANKS, GRID = 0.01, 4, {"height": 2, "width": 2}
Made = tuple[Any, tuple[int, ...]]


def _vision(name: str, resolution: int, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        import torchvision

        return getattr(torchvision.models, name)(weights=None, **options), (resolution, resolution, 3)

    return make


def _deeplab() -> Made:
    import torchvision

    lib = torch()

    class Only(lib.nn.Module):
        """Module that returns only the main output of a network with auxiliary outputs."""

        def __init__(self) -> None:
            super().__init__()
            make = torchvision.models.segmentation.deeplabv3_resnet50
            self.net = make(weights=None, weights_backbone=None, num_classes=5)

        def forward(self, x):
            return self.net(x)["out"]

    return Only(), (64, 64, 3)


def _classic_unet(axes: int) -> Made:
    """Return a U-Net with batch norm, max pooling, transposed convolutions; in 3-D with instance norm, leaky ReLU."""
    lib = torch()
    nn = lib.nn
    conv, up, pool = (getattr(nn, f"{kind}{axes}d") for kind in ("Conv", "ConvTranspose", "MaxPool"))
    norm = nn.BatchNorm2d if axes == 2 else lambda filters: nn.InstanceNorm3d(filters, affine=True)

    def double(channels: int, filters: int) -> Any:
        units: list[Any] = []
        for before in (channels, filters):
            units += [conv(before, filters, 3, padding=1), norm(filters), nn.ReLU() if axes == 2 else nn.LeakyReLU()]
        return nn.Sequential(*units)

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList([double(2, 8), double(8, 16)])
            self.bottom, self.pool = double(16, 32), pool(2)
            self.lift = nn.ModuleList([up(32, 16, 2, 2), up(16, 8, 2, 2)])
            self.up = nn.ModuleList([double(32, 16), double(16, 8)])
            self.head = conv(8, 3, 1)

        def forward(self, x):
            skips = []
            for block in self.down:
                skips.append(block(x))
                x = self.pool(skips[-1])
            x = self.bottom(x)
            for lift, block in zip(self.up and self.lift, self.up):
                x = block(lib.cat([skips.pop(), lift(x)], 1))
            return self.head(x)

    return UNet(), (16,) * axes + (2,)


NETWORKS: dict[str, Callable[[], Made]] = {
    "resnet50": _vision("resnet50", 64, num_classes=10),
    "vgg16": _vision("vgg16", 224, num_classes=10),
    "googlenet": _vision("googlenet", 64, num_classes=10, aux_logits=False, init_weights=False),
    "inception_v3": _vision("inception_v3", 96, num_classes=10, aux_logits=False, init_weights=False),
    "densenet121": _vision("densenet121", 64, num_classes=10),
    "mobilenet_v2": _vision("mobilenet_v2", 64, num_classes=10),
    "mobilenet_v3_large": _vision("mobilenet_v3_large", 64, num_classes=10),
    "efficientnet_b0": _vision("efficientnet_b0", 64, num_classes=10, stochastic_depth_prob=0.0),
    "convnext_tiny": _vision("convnext_tiny", 64, num_classes=10, stochastic_depth_prob=0.0),
    "deeplabv3_resnet50": _deeplab,
    "unet, group norm": lambda: (unet.make(), (*unet.RESOLUTION, unet.CHANNELS)),
    "unet, batch norm": lambda: _classic_unet(2),
    "unet, 3-D": lambda: _classic_unet(3),
}


def _prepare(name: str, exporter: str, folder: Path) -> tuple[Any, np.ndarray, np.ndarray]:
    """Write the file and torch's results; return the module in evaluation, samples and classes."""
    lib = torch()
    lib.manual_seed(1)
    module, shape = NETWORKS[name]()
    module = module.double()
    for layer in module.modules():
        if isinstance(layer, lib.nn.Dropout):
            layer.p = 0.0
    x = samples(*shape)
    _look(module, first(x))
    export(module, first(x), folder / "model.onnx", exporter, training=True)
    module.eval()
    y = module(first(x))
    classes = np.floor(3 * np.random.default_rng(2).random(np.moveaxis(y.detach().numpy(), 1, -1)[..., :1].shape))
    np.savez(folder / "want.npz", x=x, y=np.moveaxis(y.detach().numpy(), 1, -1), classes=classes)
    return module, x, classes


def _look(module: Any, x: Any) -> None:
    """Set running statistics to those of a batch; otherwise a deep network's activations vanish in evaluation."""
    lib = torch()
    norms = [(one, one.momentum) for one in module.modules() if isinstance(one, lib.nn.modules.batchnorm._BatchNorm)]
    for norm, _ in norms:
        norm.momentum = 1.0
    with lib.no_grad():
        module.train()(x)
    for norm, momentum in norms:
        norm.momentum = momentum


def _trained_by_torch(module: Any, x: np.ndarray, classes: np.ndarray, folder: Path) -> None:
    lib = torch()
    module.train()
    loss = lib.nn.functional.cross_entropy(module(first(x)), lib.tensor(classes[..., 0]).long())
    loss.backward()
    before = {key: p.detach().numpy().copy() for key, p in module.named_parameters()}
    lib.optim.SGD(module.parameters(), lr=RATE).step()
    after = {key: p.detach().numpy() for key, p in module.named_parameters()}
    np.savez(folder / "after.npz", **after)
    np.savez(folder / "before.npz", **before)
    (folder / "loss.json").write_text(json.dumps(loss.item()))


def step_on_blocks(folder: Path) -> None:
    """Run one step of the imported network on the ranks of this job; rank 0 prints the differences. Collective."""
    from mpi4py import MPI

    want = np.load(folder / "want.npz")
    imported = hg.onnx.load(folder / "model.onnx", buffers=())
    (logits,) = imported.outputs.values()
    target = hg.Input((*logits.shape[:-1], 1), "target", "int32")
    network = hg.Network({"prediction": logits, "loss": hg.SoftmaxCrossEntropy()(logits, target)})
    with hg.Communicator(MPI.COMM_WORLD) as comm:
        x, strategy = want["x"], hg.Strategy(GRID)
        with Executor(network, comm, get_backend("numpy"), len(x), strategy, "float64") as executor:
            trainer = hg.Trainer(executor, hg.SGD(executor.store), hg.Constant(RATE))
            executor.set_input("x", x)
            executor.set_input("target", want["classes"])
            loss = trainer.step()
            trainer.synchronize()
            found = executor.store.gather(comm, executor.store.params)
    if found is not None:
        print(json.dumps([loss, _difference(network, found, folder)]))


def _difference(network: hg.Network, found: dict[str, np.ndarray], folder: Path) -> float:
    """Return the largest difference of parameters, relative to the largest change of any parameter."""
    before, after = np.load(folder / "before.npz"), np.load(folder / "after.npz")
    largest, change, seen = 0.0, 0.0, set()
    for name, one in arrangements(network).items():
        if name not in found:
            continue
        layer = name.rpartition("/")[0]
        key = one.names[0] if one.names[0] in after else layer
        seen.add(key)
        ours = one.to_torch(found[name]).reshape(after[key].shape)
        largest = max(largest, float(np.abs(ours - after[key]).max()))
        change = max(change, float(np.abs(after[key] - before[key]).max()))
    missing = set(after.files) - seen
    assert not missing, f"parameters of torch that are not trained here: {sorted(missing)[:3]}"
    return largest / change


def _row(name: str, exporter: str) -> tuple[str, str, str, str]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        module, x, classes = _prepare(name, exporter, folder)
        want = np.load(folder / "want.npz")
        try:
            network = hg.onnx.load(folder / "model.onnx", buffers=())
        except UserError as error:
            return name, exporter, f"refused: {str(error).replace(str(folder), '')}", ""
        (found,) = predicted(network, x).values()
        outputs = float(np.abs(found - want["y"]).max() / np.abs(want["y"]).max())
        _trained_by_torch(module, x, classes, folder)
        command = [find_mpiexec(), "-n", str(RANKS), sys.executable, "-m", "tests.interchange.zoo", "--step", made]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return name, exporter, f"{outputs:.1e}", f"failed: {done.stderr.strip().splitlines()[-1]}"
        loss, parameters = json.loads(done.stdout.splitlines()[-1])
        differs = abs(loss - json.loads((folder / "loss.json").read_text())) / abs(loss)
        return name, exporter, f"{outputs:.1e}", f"loss {differs:.1e}, parameters {parameters:.1e}"


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--step"]:
        step_on_blocks(Path(arguments[1]))
        return
    exporters = [a for a in arguments if a in ("old", "dynamo")] or ["old", "dynamo"]
    chosen = [name for name in NETWORKS if not set(arguments) - {"old", "dynamo"} or name.split(",")[0] in arguments]
    for name in chosen:
        for exporter in exporters:
            print(" | ".join(_row(name, exporter)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
