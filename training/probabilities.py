"""What a prediction says of the classes, as probabilities. On the host."""

from __future__ import annotations

import numpy as np

__all__ = ["sigmoid", "softmax"]


def sigmoid(block: np.ndarray) -> np.ndarray:
    """Compute the probability of each logit by itself; neither overflows nor cancels."""
    found = np.tanh(0.5 * block)  # saturates where an exponential would overflow
    found += 1
    found *= 0.5
    return found


def softmax(block: np.ndarray) -> np.ndarray:
    """Compute probabilities of logits ``(N, ..., K)``, over the last axis."""
    found = block - block.max(axis=-1, keepdims=True)
    np.exp(found, out=found)
    found /= found.sum(axis=-1, keepdims=True)
    return found
