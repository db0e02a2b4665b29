"""Functions that create several layers in one call: sequences, splits, crops, patches. They are not layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from .convolution import Conv
from .group_norm import LayerNorm
from .layer import Layer, Node
from .padding import Pad, Slice
from .reshape import PixelUnshuffle

__all__ = ["Crop", "PatchEmbedding", "PatchMerging", "Sequential", "Split"]


class Sequential:
    """Chain of layers: a call creates their nodes in order, as ``c(b(a(x)))`` does.

    Parameters
    ----------
    layers
        Layers, other sequences, or functions from nodes to a node. The first may take several nodes.

    Examples
    --------
    >>> from halograd.layers import Conv, Input, MaxPool
    >>> Sequential(Conv(4, 3), MaxPool(2))(Input((10, 10, 3))).shape
    (4, 4, 4)

    Raises
    ------
    TypeError
        If a layer is not callable, or there are none.
    """

    def __init__(self, *layers: Callable[..., Node]) -> None:
        bad = [repr(layer) for layer in layers if not callable(layer)]
        if bad or not layers:
            raise TypeError(f"Sequential: expected one or more layers, got {', '.join(bad) or 'none'}")
        self.layers = layers

    def __call__(self, *inputs: Node) -> Node:
        """Return the output of the last layer."""
        node = self.layers[0](*inputs)
        for layer in self.layers[1:]:
            node = layer(node)
        return node


class Split:
    """Split of the channels into consecutive pieces, one :class:`Slice` each.

    Parameters
    ----------
    sizes
        Number of equal pieces, or the number of channels of each piece.
    name
        Common name; the pieces are named ``name_0``, ``name_1``, ...

    Examples
    --------
    >>> from halograd.layers import Input
    >>> [piece.shape for piece in Split((2, 4))(Input((8, 8, 6)))]
    [(8, 8, 2), (8, 8, 4)]
    """

    def __init__(self, sizes: int | Sequence[int], name: str | None = None) -> None:
        self.sizes, self.name = sizes, name

    def __call__(self, node: Node) -> tuple[Node, ...]:
        """Return one node per piece."""
        channels = node.shape[-1]
        sizes = self._pieces(channels)
        if min(sizes, default=0) < 1 or sum(sizes) != channels:
            raise ValueError(f"Split: expected pieces of {channels} channels, got {self.sizes}")
        ends = itertools.accumulate(sizes)
        return tuple(
            Slice(end - n, end, self.name and f"{self.name}_{i}")(node) for i, (n, end) in enumerate(zip(sizes, ends))
        )

    def _pieces(self, channels: int) -> Sequence[int]:
        if not isinstance(self.sizes, int):
            return tuple(self.sizes)
        if self.sizes < 1 or channels % self.sizes:
            raise ValueError(f"Split: expected a number of pieces that divides {channels} channels, got {self.sizes}")
        return (channels // self.sizes,) * self.sizes


class Crop:
    """Removal of rows at the ends of the spatial axes: :class:`Pad` with negative amounts.

    Parameters
    ----------
    amounts
        Rows to remove before and after, per spatial axis; one number or pair for all axes. None: the middle of the
        first node remains, with the extent of a second node (a U-Net of convolutions without padding; Ronneberger et
        al. 2015).

    Examples
    --------
    >>> from halograd.layers import Input
    >>> x, small = Input((9, 8, 3)), Input((4, 6, 1), "small")
    >>> Crop((1, 2))(x).shape, Crop()(x, small).shape
    ((6, 5, 3), (4, 6, 3))
    """

    def __init__(self, amounts: Any = None, name: str | None = None) -> None:
        self.amounts, self.name = amounts, name

    def __call__(self, node: Node, like: Node | None = None) -> Node:
        """Return the cropped node; without amounts, it has the spatial extent of `like`."""
        if (self.amounts is None) == (like is None):
            what = "none" if like is None else "both"
            raise ValueError(f"Crop: expected amounts, or a second node for its extent, got {what}; give one")
        # `pairs` makes one pair per axis of a number or a pair.
        away = self._to_extent(node, like) if like is not None else Pad(self.amounts).pairs(node.shape)
        if any(n < 0 for pair in away for n in pair):
            raise ValueError(f"Crop: expected rows to remove from {node.shape[:-1]}, got {away}; use Pad to add some")
        return Pad([(-low, -high) for low, high in away], name=self.name)(node)

    @staticmethod
    def _to_extent(node: Node, like: Node) -> Sequence[tuple[int, int]]:
        if len(like.shape) != len(node.shape):
            raise ValueError(f"Crop: expected two nodes of as many axes, got {node.shape} and {like.shape}")
        more = [n - smaller for n, smaller in zip(node.shape[:-1], like.shape[:-1])]
        return [(n // 2, n - n // 2) for n in more]  # an odd row is removed at the end


class PatchEmbedding:
    """Embedding of patches: a convolution whose kernel is its stride (Dosovitskiy et al. 2021).

    Parameters
    ----------
    patch
        Extents of a patch, one number for all axes or one per axis.
    channels
        Number of channels of the embedding.
    options
        Further options of :class:`Conv`.

    Examples
    --------
    >>> from halograd.layers import Input
    >>> PatchEmbedding(4, 96)(Input((224, 224, 3))).shape
    (56, 56, 96)
    """

    def __init__(self, patch: int | Sequence[int], channels: int, name: str | None = None, **options: Any) -> None:
        # The stride is the kernel, so windows are the patches.
        self.layer = Conv(channels, patch, patch, name=name, **options)

    def __call__(self, node: Node) -> Node:
        """Return the embedded patches. Raises ValueError if patches do not divide the extents."""
        size = self.layer.stencil.kernel
        kernel = (size,) * (len(node.shape) - 1) if isinstance(size, int) else size
        # zip() ends with the kernel, before the channels.
        if any(n % k for n, k in zip(node.shape, kernel)):
            raise ValueError(
                f"PatchEmbedding: expected extents that are multiples of the patch {kernel}, got {node.shape[:-1]}; "
                "pad them before"
            )
        return self.layer(node)


class PatchMerging:
    """Merging of 2 positions along each axis: their channels are joined, normalized, projected (Swin: Liu et al. 2021).

    Odd extents are padded with zeros at the end. The order of the channels is that of torchvision.

    Parameters
    ----------
    channels
        Number of channels of the output; None: twice those of the input.
    name
        Common name; the layers are named ``name.pad`` (if extents are odd), ``name.patches``, ``name.norm`` and
        ``name.reduction``.

    Examples
    --------
    >>> from halograd.layers import Input
    >>> PatchMerging()(Input((7, 6, 8))).shape
    (4, 3, 16)
    """

    def __init__(self, channels: int | None = None, name: str | None = None) -> None:
        self.channels, self.name = channels, name
        self._layers: dict[Any, Layer] = {}

    def __call__(self, node: Node) -> Node:
        """Return the merged positions. A further call uses the same parameters, as with a layer."""
        amounts = [(0, n % 2) for n in node.shape[:-1]]
        filters = 2 * node.shape[-1] if self.channels is None else self.channels
        if any(map(any, amounts)):
            node = self._layer("pad", tuple(amounts), lambda name: Pad(amounts, name=name))(node)
        node = self._layer("patches", (), lambda name: PixelUnshuffle(2, name, order="position"))(node)
        node = self._layer("norm", (), lambda name: LayerNorm("channels", name=name))(node)
        return self._layer("reduction", (), lambda name: Conv(filters, 1, bias=False, name=name))(node)

    def _layer(self, part: str, settings: tuple, make: Callable[[str | None], Layer]) -> Layer:
        """Return the layer of a part with these settings; the first has the name of the part."""
        if (part, settings) not in self._layers:
            # Names are unique in a network: a second layer of the part, for other extents, gets a default name.
            first = not any(other == part for other, _ in self._layers)
            self._layers[part, settings] = make(f"{self.name}.{part}" if self.name and first else None)
        return self._layers[part, settings]
