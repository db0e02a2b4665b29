"""Networks that other projects wrote, in small configurations and without downloads: what `hg.from_torch` must import.

Each entry of `NETWORKS` returns a module of torch and the shape ``(C, *spatial)`` of its samples. Random depth is off,
because torch and halograd draw different numbers; so is dropout.

    mpirun -n 4 python -m tests.interchange.foreign           all of them on 2 x 2 blocks of every sample
    mpirun -n 4 python -m tests.interchange.foreign MONAI     some of them
"""

from __future__ import annotations

import copy
import functools
import operator
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import halograd as hg
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.training.executor import Executor
from halograd.training.root import on_root
from tests.interchange.support import first, last, samples

__all__ = ["NETWORKS", "compared", "let_torchvision_load", "make", "returned"]

Made = tuple[Any, tuple[int, ...]]


def _nnunet(kind: str, axes: int) -> Made:
    """Return a network of nnU-Net as its plans describe it, with three stages and deep supervision."""
    from dynamic_network_architectures.architectures import unet
    from torch import nn

    conv, norm = getattr(nn, f"Conv{axes}d"), getattr(nn, f"InstanceNorm{axes}d")
    residual = kind == "ResidualEncoderUNet"
    depth = {"n_blocks_per_stage" if residual else "n_conv_per_stage": [1, 2, 2] if residual else [2, 2, 2]}
    network = getattr(unet, kind)(
        input_channels=2,
        n_stages=3,
        features_per_stage=[4, 8, 12],
        conv_op=conv,
        kernel_sizes=[3, 3, 3],
        strides=[1, 2, 2],
        **depth,
        num_classes=3,
        n_conv_per_stage_decoder=[1, 1],
        conv_bias=True,
        norm_op=norm,
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
        deep_supervision=True,
    )
    return network, (2,) + (16,) * axes


def _monai(kind: str, shape: tuple[int, ...], **options: Any) -> Made:
    from monai.networks import nets

    return getattr(nets, kind)(**options), shape


def _smp(kind: str, encoder: str = "mobilenet_v2", extent: int = 64, **options: Any) -> Made:
    import segmentation_models_pytorch as smp

    made = getattr(smp, kind)(encoder, encoder_weights=None, in_channels=3, classes=3, **options)
    return made, (3, extent, extent)


def _swin() -> Made:
    from torchvision.models import SwinTransformer

    return SwinTransformer(
        patch_size=[4, 4],
        embed_dim=12,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
        num_classes=5,
        stochastic_depth_prob=0.0,
    ), (3, 32, 32)


def _vit() -> Made:
    from torchvision.models import VisionTransformer

    network = VisionTransformer(
        image_size=32, patch_size=16, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=5
    )
    network.heads.head.reset_parameters()  # torchvision begins with zeros, so that all outputs are 0
    return network, (3, 32, 32)


def _convnext() -> Made:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 2)], num_classes=5), (3, 32, 32)


def _efficient(axes: int) -> Made:
    from monai.networks.nets.efficientnet import EfficientNet

    # The first stage has 32 channels, as that of EfficientNetBN("efficientnet-b0").
    blocks = ["r1_k3_s11_e1_i32_o8_se0.25", "r2_k3_s22_e2_i8_o8_se0.25"]
    return EfficientNet(blocks, axes, 1, 3, image_size=16), (1,) + (16,) * axes


_DYNAMIC_UNET: dict[str, Any] = {
    "in_channels": 1,
    "out_channels": 2,
    "kernel_size": [3, 3, 3, 3],
    "strides": [1, 2, 2, 2],
    "upsample_kernel_size": [2, 2, 2],
    "filters": [4, 4, 8, 8],
    "deep_supervision": True,
    "deep_supr_num": 2,
    "res_block": True,
}
_HIGH_RESOLUTION: dict[str, Any] = {
    "in_channels": 1,
    "out_channels": 2,
    "layer_params": (
        {"name": "conv_0", "n_features": 4, "kernel_size": 3},
        {"name": "res_1", "n_features": 4, "kernels": (3, 3), "repeat": 1},
        {"name": "res_2", "n_features": 9, "kernels": (3, 3), "repeat": 2},
        {"name": "conv_1", "n_features": 8, "kernel_size": 1},
        {"name": "conv_2", "kernel_size": 1},
    ),
}
_ATTENTION_UNET: dict[str, Any] = {"in_channels": 1, "out_channels": 2, "channels": (4, 8, 16), "strides": (2, 2)}

#: Functions that make a module and the shape of a sample, by the name in the table of docs/torch.md.
NETWORKS: dict[str, Callable[[], Made]] = {
    "nnU-Net PlainConvUNet, 2-D": lambda: _nnunet("PlainConvUNet", 2),
    "nnU-Net PlainConvUNet, 3-D": lambda: _nnunet("PlainConvUNet", 3),
    "nnU-Net ResidualEncoderUNet, 2-D": lambda: _nnunet("ResidualEncoderUNet", 2),
    "nnU-Net ResidualEncoderUNet, 3-D": lambda: _nnunet("ResidualEncoderUNet", 3),
    "MONAI BasicUNet, 2-D": lambda: _monai(
        "BasicUNet", (1, 32, 32), spatial_dims=2, in_channels=1, out_channels=2, features=(4, 4, 8, 8, 16, 4)
    ),
    "MONAI BasicUNet, 3-D": lambda: _monai(
        "BasicUNet", (1, 32, 32, 32), spatial_dims=3, in_channels=1, out_channels=2, features=(2, 2, 4, 4, 8, 2)
    ),
    "MONAI SegResNet, 3-D": lambda: _monai(
        "SegResNet",
        (1, 16, 16, 16),
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
        init_filters=8,
        blocks_down=(1, 1, 1),
        blocks_up=(1, 1),
    ),
    "MONAI AttentionUnet, 2-D": lambda: _monai("AttentionUnet", (1, 16, 16), spatial_dims=2, **_ATTENTION_UNET),
    "MONAI AttentionUnet, 3-D": lambda: _monai("AttentionUnet", (1, 16, 16, 16), spatial_dims=3, **_ATTENTION_UNET),
    "MONAI DynUNet, 2-D": lambda: _monai("DynUNet", (1, 32, 32), spatial_dims=2, **_DYNAMIC_UNET),
    "MONAI DynUNet, 3-D": lambda: _monai("DynUNet", (1, 16, 16, 16), spatial_dims=3, **_DYNAMIC_UNET),
    "MONAI HighResNet, 2-D": lambda: _monai("HighResNet", (1, 16, 16), spatial_dims=2, **_HIGH_RESOLUTION),
    "MONAI HighResNet, 3-D": lambda: _monai("HighResNet", (1, 8, 8, 8), spatial_dims=3, **_HIGH_RESOLUTION),
    "MONAI EfficientNet, 2-D": lambda: _efficient(2),
    "MONAI EfficientNet, 3-D": lambda: _efficient(3),
    "MONAI UNETR, 2-D": lambda: _monai(
        "UNETR",
        (1, 32, 32),
        in_channels=1,
        out_channels=2,
        img_size=(32, 32),
        feature_size=4,
        hidden_size=16,
        mlp_dim=32,
        num_heads=2,
        spatial_dims=2,
    ),
    "MONAI SwinUNETR, 2-D": lambda: _monai(
        "SwinUNETR",
        (1, 64, 64),
        in_channels=1,
        out_channels=2,
        patch_size=2,
        depths=(2, 2, 2, 2),
        num_heads=(1, 2, 2, 2),
        window_size=4,
        feature_size=12,
        spatial_dims=2,
    ),
    "smp Unet": lambda: _smp("Unet"),
    "smp UnetPlusPlus": lambda: _smp("UnetPlusPlus"),
    "smp FPN": lambda: _smp("FPN"),
    "smp DeepLabV3Plus": lambda: _smp("DeepLabV3Plus"),
    "smp MAnet": lambda: _smp("MAnet"),
    "smp Segformer": lambda: _smp("Segformer", "mit_b0"),
    "torchvision Swin-T": _swin,
    "torchvision ViT-B/16": _vit,
    "torchvision ConvNeXt": _convnext,
}


def let_torchvision_load() -> None:
    """Declare the operator that torchvision's import needs, and which it lacks beside torch's build without CUDA."""
    import torch

    if not hasattr(torch.ops.torchvision, "nms"):
        _DECLARED.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in ("nms", "qnms"):
            _DECLARED[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


#: Declared operators, which live as long as this object.
_DECLARED: list[Any] = []


def make(name: str) -> Made:
    """Return a module in float64 without dropout, and the shape of its samples. Initial values are always the same."""
    import torch

    let_torchvision_load()
    torch.manual_seed(1)
    module, shape = NETWORKS[name]()
    for layer in module.modules():
        if isinstance(layer, torch.nn.modules.dropout._DropoutNd):
            layer.p = 0.0
        if hasattr(layer, "drop_prob"):
            layer.drop_prob = 0.0
        if hasattr(layer, "drop_connect_rate"):
            layer.drop_connect_rate = 0.0
    return module.double(), shape


def compared(name: str, comm: hg.Communicator, cut: Mapping[str, int]) -> tuple[float, float]:
    """Compare a network with torch in float64; only rank 0 imports torch. Collective.

    The loss is the sum over the outputs of the mean squares of differences from 1. The step is one of SGD.

    Returns
    -------
    The largest difference of an output in evaluation, relative to the largest output, and that of a parameter or
    running statistic after the step, relative to the largest change.
    """
    module, x, found = _trained(name, comm, cut, "float64", 1)
    before, _, trained = found
    return on_root(comm.mpi, lambda: _differences(module, x, before, trained))


def returned(name: str, comm: hg.Communicator, cut: Mapping[str, int]) -> float:
    """Train a network for three steps in float32, put its parameters back into the module, and compare the outputs.

    Collective. Return the largest difference of an output in evaluation, which is of the order of 1.
    """
    _, x, (_, after, trained) = _trained(name, comm, cut, "float32", 3)

    def difference() -> float:
        return max(float(np.abs(y - ours).max()) for y, ours in zip(_outputs(trained, x), after, strict=True))

    return on_root(comm.mpi, difference)


def _trained(
    name: str, comm: hg.Communicator, cut: Mapping[str, int], dtype: str, steps: int
) -> tuple[Any, np.ndarray, tuple[Any, Any, Any]]:
    """Return module, samples, and outputs before and after steps of training with the trained module. Collective."""
    module, shape = make(name) if comm.rank == 0 else (None, None)
    shape = comm.bcast(shape)
    x = samples(*shape[1:], shape[0])
    network = hg.from_torch(module, None if module is None else first(x), comm=comm.mpi)
    terms = [hg.MeanSquaredError()(y, hg.Input(y.shape, f"{key}_target")) for key, y in network.outputs.items()]
    network = hg.Network({**network.outputs, "loss": functools.reduce(operator.add, terms)})
    with Executor(network, comm, get_backend("numpy"), len(x), hg.Strategy(cut), dtype) as executor:

        def outputs() -> list[Any]:
            executor.forward(training=False)
            return [executor.gather(network.names[y]) for key, y in network.outputs.items() if key != "loss"]

        for key, node in network.inputs.items():
            executor.set_input(key, x if key not in network.targets else np.ones((len(x), *node.shape)))
        before = outputs()
        trainer = hg.Trainer(executor, hg.SGD(executor.store), hg.Constant(RATE))
        for _ in range(steps):
            trainer.step()
            trainer.synchronize()
        return module, x, (before, outputs(), hg.to_torch(executor, copy.deepcopy(module), strict=False))


#: Learning rate of the step.
RATE = 0.01


def _differences(module: Any, x: np.ndarray, found: list[np.ndarray], trained: Any) -> tuple[float, float]:
    import torch

    before = {key: value.clone() for key, value in module.state_dict().items()}
    outputs = _outputs(module, x)
    assert len(outputs) == len(found)
    largest = max(float(np.abs(y).max()) for y in outputs)
    wrong = max(float(np.abs(y - other).max()) for y, other in zip(outputs, found))
    module.train()
    sum(((y - 1) ** 2).mean() for y in _listed(module(first(x)), x.ndim)).backward()
    torch.optim.SGD(module.parameters(), RATE).step()
    step, change = 0.0, 0.0
    for key, value in trained.state_dict().items():
        if not key.endswith("num_batches_tracked"):
            after = module.state_dict()[key]
            step = max(step, float((value - after).abs().max()))
            change = max(change, float((before[key] - after).abs().max()))
    return wrong / largest, step / change


def _outputs(module: Any, x: np.ndarray) -> list[np.ndarray]:
    """Return all outputs of a module in evaluation.

    MONAI's DynUNet returns those of deep supervision only if it is in training itself; norms and dropout are its parts.
    """
    import torch

    module.eval()
    module.training = type(module).__name__ == "DynUNet"
    with torch.no_grad():
        return [last(y) for y in _listed(module(first(x)), x.ndim)]


def _listed(y: Any, axes: int) -> list[Any]:
    """Return the outputs ``(N, C, *spatial)``, of so many axes; those of a stack are along axis 1."""
    if isinstance(y, tuple | list):
        return list(y)
    return list(y.unbind(1)) if y.ndim > axes else [y]


def main(wanted: list[str]) -> None:
    """Print a line for each network. Collective over all ranks of the job."""
    with hg.Communicator(hg.boot()) as comm:
        cut = {"height": 2, "width": comm.size // 2} if comm.size > 1 else {}
        for name in NETWORKS:
            if not wanted or any(part.lower() in name.lower() for part in wanted):
                try:
                    cells = "{:.0e} | {:.0e}".format(*compared(name, comm, cut))
                except UserError as error:
                    nodes = re.findall(r"node '([^']*)' \((\w+)\)", str(error))
                    cells = f"refused: node `{nodes[0][0]}` ({nodes[0][1]}) |" if nodes else f"refused: {error} |"
                if comm.rank == 0:
                    print(f"| {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
