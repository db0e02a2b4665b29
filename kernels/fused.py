"""Activations by name, as separate kernels or fused into other kernels."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ACTIVATIONS", "BY_OUTPUT", "FusedActivation", "reads_input"]

#: The CUDA kernels identify activations by their index here.
ACTIVATIONS = (
    *("relu", "leaky_relu", "sigmoid", "tanh", "gelu", "silu", "elu", "hard_sigmoid", "hard_swish", "softplus", "mish"),
    "gelu_tanh",
)
#: Activations whose derivative is computed from the output. For the others, the output near saturation is rounded to
#: its limit, and the derivative, which is small there, would lose its digits.
BY_OUTPUT = ("relu", "leaky_relu")


def reads_input(kind: str, alpha: float = 0.0) -> bool:
    """Return whether the derivative of an activation is computed from its input (True) or its output (False).

    The other array may have been overwritten.
    """
    return kind not in BY_OUTPUT or (kind == "leaky_relu" and alpha < 0)


@dataclass(frozen=True)
class FusedActivation:
    """An elementwise function that a kernel applies to its result before it writes it.

    Attributes
    ----------
    kind, alpha
        Arguments of :meth:`halograd.kernels.Backend.activation`.
    """

    kind: str
    alpha: float = 0.0

    @property
    def by_input(self) -> bool:
        """Whether the derivative is computed from the input."""
        return reads_input(self.kind, self.alpha)
