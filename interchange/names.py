"""Names of layers in torch: their own, and for some of our models those that torchvision gives.

`vgg_a` is torchvision's ``vgg11``. GoogLeNet has batch norms there and none in its paper and here, so no file fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ..layers import Network

__all__ = ["module_names"]

Rules = tuple[tuple[str, str], ...]

_RESNET_PARTS = {"a": "1", "b": "2", "c": "3"}
#: What a name of ours matches, and torchvision's in its place. Of Inception-v3 the rest is in `_inception`.
_INCEPTION: Rules = (
    (r"1a", "Conv2d_1a_3x3"),
    (r"2a", "Conv2d_2a_3x3"),
    (r"2b", "Conv2d_2b_3x3"),
    (r"3b", "Conv2d_3b_1x1"),
    (r"4a", "Conv2d_4a_3x3"),
    (r"_aux_1", "AuxLogits.conv0"),
    (r"_aux_2", "AuxLogits.conv1"),
    (r"7a_7x7_(\d)", r"Mixed_7a.branch7x7x3_\1"),
    (r"(\w\w)_(1x1|5x5_\d|7x7_\d)", r"Mixed_\1.branch\2"),
    (r"(\w\w)_pool", r"Mixed_\1.branch_pool"),
    (r"(5[bcd])_3x3_(\d)", r"Mixed_\1.branch3x3dbl_\2"),
    (r"(7a)_3x3_(\d)", r"Mixed_\1.branch3x3_\2"),
    (r"6a_3x3", "Mixed_6a.branch3x3"),
    (r"6a_double_(\d)", r"Mixed_6a.branch3x3dbl_\1"),
    (r"(6[b-e])_double_(\d)", r"Mixed_\1.branch7x7dbl_\2"),
    (r"(7[bc])_3x3", r"Mixed_\1.branch3x3_1"),
    (r"(7[bc])_1x3", r"Mixed_\1.branch3x3_2a"),
    (r"(7[bc])_3x1", r"Mixed_\1.branch3x3_2b"),
    (r"(7[bc])_double_1x3", r"Mixed_\1.branch3x3dbl_3a"),
    (r"(7[bc])_double_3x1", r"Mixed_\1.branch3x3dbl_3b"),
    (r"(7[bc])_double_(\d)", r"Mixed_\1.branch3x3dbl_\2"),
)


def module_names(network: Network) -> Callable[[str], tuple[str, ...]]:
    """A function from a layer's name to those of its module in torch: first the one to write."""
    kind = re.sub(r"\d.*|_a$", "", network.name)
    table = {"resnet": _resnet, "vgg": _vgg(network), "inception_v": _inception}.get(kind)

    def names(layer: str) -> tuple[str, ...]:
        other = None if table is None else table(layer)
        return (layer,) if other is None else (other, layer)

    return names


def _resnet(layer: str) -> str | None:
    """``conv3_2b`` is ``layer2.1.conv2``."""
    if layer == "dense":
        return "fc"
    found = re.fullmatch(r"(conv|bn)(\d+)_(\d+)([abcs])", layer)
    if found is None:
        return None
    kind, stage, block, part = found.groups()
    module = f"layer{int(stage) - 1}.{int(block) - 1}"
    if part == "s":
        return f"{module}.downsample.{0 if kind == 'conv' else 1}"
    return f"{module}.{kind}{_RESNET_PARTS[part]}"


def _vgg(network: Network) -> Callable[[str], str | None]:
    """Features are numbered with the ReLU behind every convolution, and the poolings."""
    places, number = {}, 0
    for layer in network.layers:
        if re.fullmatch(r"conv\d+_\d+", layer):
            places[layer] = f"features.{number}"
            number += 2
        elif re.fullmatch(r"pool\d+", layer):
            number += 1
    places |= {f"dense{i}": f"classifier.{3 * (i - 1)}" for i in (1, 2, 3)}
    return places.get


def _inception(layer: str) -> str | None:
    heads = {"dense": "fc", "dense_aux": "AuxLogits.fc"}
    found = re.fullmatch(r"(conv|bn)(\w+)", layer)
    if found is None:
        return heads.get(layer)
    for pattern, module in _INCEPTION:
        matched = re.fullmatch(pattern, found[2])
        if matched is not None:
            return f"{matched.expand(module)}.{found[1]}"
    return None
