"""How exactly a convolution or matrix product is computed, by name."""

from __future__ import annotations

from dataclasses import dataclass

from halograd.kernels.errors import KernelError

__all__ = ["HALF", "PRECISIONS", "Arithmetic"]

PRECISIONS = ("strict", "tf32")
HALF = ("float16", "bfloat16")

# Engines that multiply rounded inputs, or compute other sums than the plain ones.
_ROUNDED = ("TENSOR_CORE", "DOWN_CONVERT_INPUTS")
_TRANSFORMED = ("FFT", "WINOGRAD", "WINOGRAD_TILE_4x4", "WINOGRAD_TILE_6x6", "WINOGRAD_TILE_13x13")

# cublasComputeType_t; the values are part of cuBLAS's binary interface.
_COMPUTE_32F, _COMPUTE_64F, _COMPUTE_TF32 = 68, 70, 77


@dataclass(frozen=True)
class Arithmetic:
    """What an algorithm may do to be fast.

    Parameters
    ----------
    precision
        Of float32: ``"strict"`` computes plain float32 sums of float32 products; ``"tf32"`` may round the factors to
        11 significant bits, which tensor cores take. float16 and bfloat16 are always summed in float32, float64 in
        float64.
    deterministic
        Whether two runs must agree in every bit. Sums by atomic addition are left out then.

    Raises
    ------
    KernelError
        If there is no such precision.
    """

    precision: str = "strict"
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise KernelError(
                f"expected a precision out of {', '.join(PRECISIONS)}, got {self.precision!r}; choose one "
                "(float16 and bfloat16 are dtypes of the arrays)"
            )

    def refused(self, dtype: str) -> tuple[str, ...]:
        """Names of the numerical notes of cuDNN whose engines may not be used for arrays of `dtype`."""
        notes: tuple[str, ...] = ()
        if dtype == "float32" and self.precision == "strict":
            notes = _ROUNDED + _TRANSFORMED
        elif dtype in HALF:
            notes = ("REDUCED_PRECISION_REDUCTION",)
        return (*notes, "NONDETERMINISTIC") if self.deterministic else notes

    def describe(self, dtype: str) -> str:
        """How products of float32 are made, and how to choose otherwise; nothing of dtypes without a choice."""
        if dtype != "float32":
            return ""
        if self.precision == "tf32":
            return 'float32 on tensor cores (TF32: factors of 11 bits; backend.precision = "strict" for plain float32)'
        return 'float32 without tensor cores (backend.precision = "tf32" to use them: factors of 11 bits)'

    def compute_type(self, dtype: str) -> int:
        """cuBLAS's number of the arithmetic for arrays of `dtype`."""
        if dtype == "float64":
            return _COMPUTE_64F
        return _COMPUTE_TF32 if dtype == "float32" and self.precision == "tf32" else _COMPUTE_32F
