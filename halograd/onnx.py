"""ONNX files: ``halograd.onnx.load`` builds a network from a file, ``halograd.onnx.save`` writes one."""

from .interchange.onnx_export import save
from .interchange.onnx_import import load

__all__ = ["load", "save"]
