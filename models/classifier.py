"""What the image classifiers share: scaled widths, and the end of the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..layers import Dense, Dropout, Input, Network, Node, ReLU, SoftmaxCrossEntropy, training_only

__all__ = ["classifier", "dense_relu_dropout", "scaled"]


def scaled(filters: int, width: float, multiple: int = 1) -> int:
    """`filters` times `width`, rounded to a positive multiple of `multiple`.

    Raises
    ------
    ValueError
        For a width that is not positive.

    >>> scaled(96, 0.1), scaled(96, 0.1, 4), scaled(16, 0.01), scaled(48, 1)
    (10, 8, 1, 48)
    """
    if not width > 0:
        raise ValueError(f"width: expected a number > 0 (1 is the published network), got {width!r}")
    return max(1, round(filters * width / multiple)) * multiple


def dense_relu_dropout(y: Node, units: int, dropout: float, label: str) -> Node:
    """Dense, ReLU, dropout: the hidden layers of AlexNet's and VGG's heads."""
    y = ReLU(name=f"relu{label}")(Dense(units, name=f"dense{label}")(y))
    return Dropout(dropout, name=f"dropout{label}")(y)


def classifier(
    logits: Node,
    name: str,
    auxiliary: Sequence[Node] = (),
    weight: float = 0.3,
    label_smoothing: float = 0.0,
    class_weights: Sequence[float] | str | None = None,
) -> Network:
    """The network with softmax cross-entropy behind `logits (classes,)`.

    Parameters
    ----------
    auxiliary, weight
        Logits of auxiliary classifiers, and the weight of each in the loss of training.
    label_smoothing, class_weights
        Of all losses.

    Returns
    -------
    Network
        Inputs ``x`` and ``target (1,)`` (class index); outputs ``prediction`` (logits) and ``loss``.
    """
    target = Input((1,), name="target", dtype="int32")
    options: dict[str, Any] = {"class_weights": class_weights, "label_smoothing": label_smoothing}
    loss = SoftmaxCrossEntropy(**options, name="ce")(logits, target)
    for other in auxiliary:
        loss = loss + training_only(weight * SoftmaxCrossEntropy(**options)(other, target))
    return Network({"prediction": logits, "loss": loss}, name=name)
