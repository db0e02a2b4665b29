"""From and to other frameworks: ONNX files, and weights under torch's names."""

from .onnx_export import save
from .onnx_import import load

__all__ = ["load", "save"]
