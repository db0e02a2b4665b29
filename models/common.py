"""Common parts of the models: types of their options, units of layers, the loss of a classifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from halograd.schema import Below1, Count, NotNegative, Positive, Text

from ..layers import BatchNorm, Conv, Dense, Dropout, Input, Network, Node, ReLU, SoftmaxCrossEntropy, training_only

__all__ = [
    "Balanced",
    "ClassWeights",
    "Extent",
    "Extents",
    "Factor",
    "Filters",
    "Ignored",
    "Name",
    "Rate",
    "Statistics",
    "Times",
    "Weight",
    "classifier",
    "hidden",
    "scaled",
    "unit",
]

# `halograd.models.build` checks options by these types.
#: Number of cells, pixels or voxels along one axis.
Extent = Annotated[Count, Field(le=2**17)]
Extents = Annotated[Sequence[Extent], Field(min_length=1, max_length=3)]
#: Number of channels, classes, or filters of a convolution.
Filters = Annotated[Count, Field(le=2**20)]
#: Number of repetitions: convolutions of a block, blocks of a stage.
Times = Annotated[Count, Field(le=256)]
#: Factor of all filters and hidden units; 1 is the published network.
Factor = Annotated[Positive, Field(le=64)]
#: Weight of positive targets in a loss.
Weight = Annotated[Positive, Field(le=1e6)]
#: Weights that follow from the counts of classes in the training samples.
Balanced = Literal["balanced"]
#: One weight per class, or "balanced".
ClassWeights = Annotated[Sequence[NotNegative], Field(min_length=1, max_length=2**16)] | Balanced | None
#: Class index of targets that do not count in the loss.
Ignored = Annotated[int, Field(ge=-(2**24), le=2**24)] | None
#: Rate of dropout, or of label smoothing.
Rate = Below1
#: Elements over which batch norm computes mean and variance.
Statistics = Literal["global", "sample", "local"]
Name = Text


def scaled(filters: int, width: float, multiple: int = 1) -> int:
    """Return `filters` times `width`, rounded to a positive multiple of `multiple`.

    Raises
    ------
    ValueError
        If the width is not positive.

    >>> scaled(96, 0.1), scaled(96, 0.1, 4), scaled(16, 0.01), scaled(48, 1)
    (10, 8, 1, 48)
    """
    if not width > 0:
        raise ValueError(f"width: expected a number > 0 (1 is the published network), got {width!r}")
    # Groups of a convolution must divide its filters, so these are multiples.
    return max(1, round(filters * width / multiple)) * multiple


def unit(
    y: Node,
    filters: int,
    kernel: int | tuple[int, int],
    label: str,
    stride: int = 1,
    padding: str | int = "same",
    **norm: Any,
) -> Node:
    """Add a bias-free convolution, batch norm and ReLU; `norm` are options of the batch norm.

    With odd kernels and stride 1, "same" pads both sides equally.
    """
    # No bias: the norm subtracts the mean, and with it any bias.
    y = Conv(filters, kernel, stride, padding, bias=False, name=f"conv{label}")(y)
    return BatchNorm(activation="relu", name=f"bn{label}", **norm)(y)


def hidden(y: Node, units: int, label: str, dropout: float | None = None) -> Node:
    """Add a hidden layer of a head: dense, ReLU and, with a rate, dropout."""
    y = ReLU(name=f"relu{label}")(Dense(units, name=f"dense{label}")(y))
    return y if dropout is None else Dropout(dropout, name=f"dropout{label}")(y)


def classifier(
    logits: Node,
    name: str,
    class_weights: Sequence[float] | str | None = None,
    auxiliary: Sequence[Node] = (),
    weight: float = 0.3,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
) -> Network:
    """Return the network with softmax cross-entropy on `logits (classes,)` or ``(*spatial, classes)``.

    Parameters
    ----------
    auxiliary, weight
        Logits of auxiliary classifiers, and the weight of each in the loss of training.
    class_weights, label_smoothing, ignore_index
        Options of all losses.

    Returns
    -------
    Network
        Inputs ``x`` and ``target (1,)`` or ``(*spatial, 1)`` (class index); outputs ``prediction`` (logits) and
        ``loss``.
    """
    target = Input((*logits.shape[:-1], 1), name="target", dtype="int32")
    options: dict[str, Any] = {
        "class_weights": class_weights,
        "label_smoothing": label_smoothing,
        "ignore_index": ignore_index,
    }
    loss = SoftmaxCrossEntropy(**options, name="ce")(logits, target)
    for other in auxiliary:
        # Evaluation leaves auxiliary classifiers out.
        loss = loss + training_only(weight * SoftmaxCrossEntropy(**options)(other, target))
    return Network({"prediction": logits, "loss": loss}, name=name)
