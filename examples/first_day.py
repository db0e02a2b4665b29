"""A first day: a U-Net from PyTorch, forty files (some with missing values), and back to PyTorch.

    mpirun -n 2 python examples/first_day.py FOLDER

The script writes to FOLDER: the data (one simulation per file), the model that torch has exported, a run, predictions
of files without labels, and the trained model as ONNX and as weights for torch. The last line has the difference
between torch and halograd on the files without labels. It needs ``pip install 'halograd[interchange]' torch
onnxscript``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from mpi4py import MPI

import halograd as hg
from halograd.data import ChannelStatistics

EDGE, CHANNELS, CLASSES, FILES, SAMPLES = 64, 3, 3, 40, 4


def write_files(folder: Path, first: int, labelled: bool) -> None:
    """Write travelling waves, sampled in time. Classes depend on the height of the wave; some samples have NaN."""
    folder.mkdir(parents=True)
    y, x = np.meshgrid(*[np.linspace(0, 2 * np.pi, EDGE, endpoint=False)] * 2, indexing="ij")
    for number in range(first, first + (FILES if labelled else 4)):
        rng = np.random.default_rng(number)
        (k, m), phase, speed = rng.integers(1, 4, 2), rng.uniform(0, 6.3), rng.uniform(0.2, 1)
        fields, classes = [], []
        for time in range(SAMPLES):
            height = np.sin(k * x + phase + speed * time) * np.cos(m * y)
            fields.append([100 + 30 * height, *np.gradient(height)])
            classes.append(np.digitize(height, [-0.3, 0.3]))
        fields = np.array(fields, np.float32) + rng.normal(0, 0.01, (SAMPLES, CHANNELS, EDGE, EDGE)).astype(np.float32)
        if labelled and number % 10 == 3:
            fields[1, 0, 5, 7] = np.nan
        with h5py.File(folder / f"wave-{number:03d}.h5", "w") as file:
            file.create_dataset("inputs", data=fields).attrs.update(layout="NCHW", channel_names=["h", "hy", "hx"])
            if labelled:
                file["classes"] = np.array(classes, np.uint8)


def torch_unet() -> Any:
    """Return a U-Net in torch: group norm, strided convolutions, bilinear upsampling, skip connections."""
    import torch
    from torch import nn

    def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(4, outputs), nn.SiLU())

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.down1, self.down2 = block(CHANNELS, 8), block(8, 16, 2), block(16, 16, 2)
            self.up1, self.up0, self.head = block(32, 16), block(24, 8), nn.Conv2d(8, CLASSES, 1)

        def forward(self, x: Any) -> Any:
            a = self.first(x)
            b = self.down1(a)
            y = torch.nn.functional.interpolate(self.down2(b), scale_factor=2, mode="bilinear")
            y = self.up1(torch.cat([y, b], 1))
            y = torch.nn.functional.interpolate(y, scale_factor=2, mode="bilinear")
            return self.head(self.up0(torch.cat([y, a], 1)))

    torch.manual_seed(0)
    return UNet()


def export_unet(path: Path) -> None:
    """Export the torch model as ONNX."""
    import torch

    training: Any = torch.onnx.TrainingMode.TRAINING
    names: dict[str, Any] = {"input_names": ["x"], "output_names": ["logits"]}
    example = (torch.randn(1, CHANNELS, EDGE, EDGE),)
    torch.onnx.export(torch_unet(), example, path, **names, dynamo=False, training=training, do_constant_folding=False)


def with_losses(path: Path) -> hg.Network:
    """Load the model in halograd and add its losses: cross-entropy and Dice."""
    logits = hg.onnx.load(path).outputs["logits"]
    target = hg.Input((EDGE, EDGE, 1), "classes", "int32")
    loss = hg.SoftmaxCrossEntropy()(logits, target) + 0.5 * hg.Dice("softmax")(logits, target)
    return hg.Network({"logits": logits, "loss": loss}, name="waves")


def difference_to_torch(folder: Path, statistics: ChannelStatistics) -> float:
    """Return the largest difference between the logits of halograd and those of torch or of the exported ONNX file.

    The ONNX file normalizes the data itself.
    """
    import onnxruntime
    import safetensors.torch
    import torch

    with h5py.File(folder / "predicted.h5") as file:
        logits = file["logits"][()]
    data = np.concatenate([h5py.File(path)["inputs"][()] for path in sorted((folder / "new").glob("*.h5"))])
    session = onnxruntime.InferenceSession(folder / "trained.onnx")
    (by_onnx,) = session.run(["logits"], {"x": data})
    model = torch_unet()
    model.load_state_dict(safetensors.torch.load_file(folder / "trained.safetensors"))
    scaled = (data - statistics.mean[:, None, None]) / statistics.std[:, None, None]
    with torch.no_grad():
        by_torch = model(torch.from_numpy(scaled.astype(np.float32))).numpy()
    return max(float(np.abs(np.moveaxis(other, 1, -1) - logits).max()) for other in (by_onnx, by_torch))


def main(folder: Path) -> None:
    comm = MPI.COMM_WORLD
    if comm.rank == 0:
        write_files(folder / "data", 0, labelled=True)
        write_files(folder / "new", FILES, labelled=False)
        export_unet(folder / "unet.onnx")
    comm.barrier()
    run = hg.fit(
        with_losses(folder / "unet.onnx"),
        {"path": str(folder / "data"), "targets": {"classes": "classes"}},
        folder / "run",
        epochs=4,
        batch=8,
        validation=0.2,
        split="file",  # whole simulations are held out
        invalid="skip",
        augment={"flips": ["height", "width"], "shifts": ["width"], "vectors": [["hy", "hx"]]},
        schedule={"kind": "cosine", "learning_rate": 3e-3},
        strategy={"height": comm.size},
        output={"best": "iou"},
    )
    run.apply(str(folder / "new"), folder / "predicted.h5", which="best")
    run.export(folder / "trained.onnx", which="best", normalize=True)
    run.export(folder / "trained.safetensors", to="safetensors", which="best")
    if comm.rank == 0:
        before, after = run.history["iou"][0], run.best["value"]
        print(f"held-out IoU {before:.3f} after the first epoch, {after:.3f} at best")
        print(
            f"torch and halograd differ by {difference_to_torch(folder, run.normalization('best')['x']):.1e} in logits"
        )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("expected a folder that is not there yet, as the only argument")
    main(Path(sys.argv[1]))
