"""Origins of the arrays of an ONNX file: parameters that torch trains, buffers, and other constants of the source."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from .graph import TELL_BUFFERS, OnnxConstant

__all__ = ["FROZEN", "KIND", "Origins", "computed_from", "is_named"]


def is_named(name: str) -> bool:
    """Return whether a weight has a name of the module, and not one of the exporter such as ``onnx::Conv_11`` or
    ``val_3``.
    """
    return not re.fullmatch(r"val_\d+|(scalar_tensor_default|lifted_tensor)(_\d+)*|\d+|.*::.*", name)


def computed_from(sources: Sequence[OnnxConstant]) -> tuple[str, ...]:
    """Return the names of the parameters among the constants, and of those from which constants are computed."""
    names = (name for one in sources for name in (one.made_of if one.is_fixed else (one.name,)))
    return tuple(dict.fromkeys(name for name in names if name))


#: Names of values that the new exporter folds into a weight; they show that it is computed from others.
_ARITHMETIC = (
    r"(mul|div|sub|add|addcmul|neg|pow|square|sqrt|rsqrt|reciprocal|exp|log|abs|sum|mean|std|var|linalg_vector_norm|norm|"
    r"softplus|sigmoid|tanh|softmax|relu|clamp|where|mm|mv|bmm|matmul|dot|vdot|einsum|cat|stack)(_\d+)?"
)
_PARAMETRIZED = r"(.*\.)?parametrizations\..*|.*_orig|.*weight_[gv]"
#: Entry of the parameters that torch does not train (``requires_grad=False``); `hg.from_torch` writes it.
FROZEN = "halograd.frozen"
KIND, _FOLDED = "pkg.torch.export.graph_signature.InputSpec.kind", "pkg.onnxscript.optimizer.folded_from"


class Origins:
    """Origins of the arrays of a file: parameters of the module, buffers, or other constants.

    The new exporter of torch stores them. The old one does not, so a buffer that multiplies looks like a learned
    factor. In its files the last part of the name decides for names of torch's own modules, and `buffers` for others.
    """

    def __init__(self, model: Any, buffers: Collection[str] | None) -> None:
        self.buffers = buffers
        self.by_torch, self.is_ours = (model.producer_name == name for name in ("pytorch", "halograd"))
        self.stored = {
            value.name: {entry.key: entry.value for entry in value.metadata_props} for value in model.graph.value_info
        }

    def of(self, name: str, count: int = 0) -> dict[str, Any]:
        """Return the attributes `name`, `origin` and `made_of` of a constant of `count` numbers."""
        stored = self.stored.get(name, {})
        folded = re.findall(r"'([^']*)'", stored.get(_FOLDED, ""))
        parts = [one for one in (*folded, name) if is_named(one)]
        if folded and any(re.fullmatch(f"{_ARITHMETIC}|{_PARAMETRIZED}", one) for one in parts):
            return {"made_of": tuple(one for one in parts if not re.fullmatch(_ARITHMETIC, one)) or (name,)}
        kind = stored.get(KIND, "").lower()
        kind = "buffer" if kind.startswith("constant") else kind
        if not is_named(name) or (folded and count == 1):
            return {"origin": kind or ("unknown" if self.by_torch and count > 1 else "number")}
        return {"name": name, "origin": self._origin(name, kind), "frozen": FROZEN in stored}

    def _origin(self, name: str, kind: str) -> str:
        if self.buffers is not None:
            return "buffer" if name in self.buffers else kind or "parameter"
        last = name.rpartition(".")[2]
        if kind:
            return kind
        normed = last in ("original0", "original1", "weight_g", "weight_v")
        if normed or last.endswith(("weight", "bias")) or self.is_ours:
            return "parameter"
        return "buffer" if last in ("running_mean", "running_var", "num_batches_tracked") else "unknown"

    def remedy(self, names: Sequence[str]) -> str:
        """Return the remedy for weights that are computed from these parameters in every step."""
        if any(re.fullmatch(_PARAMETRIZED, name) for name in names):
            return "remove the parametrization before the export (torch.nn.utils.parametrize.remove_parametrizations)"
        if all(self.of(name).get("origin") == "unknown" for name in names):
            return TELL_BUFFERS
        stored = self.buffers is not None or any(KIND in self.stored.get(name, {}) for name in names)
        return (
            "compute them once, before the export, or write this layer with halograd's own"
            + ("" if stored else "; if they are buffers, name them: load(path, buffers=[...])")
        )
