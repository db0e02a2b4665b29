"""Exchange with other frameworks: ONNX files, and weights under torch's names."""

from .onnx_export import save
from .onnx_import import load
from .weights import load_weights, save_weights

__all__ = ["load", "load_weights", "save", "save_weights"]
