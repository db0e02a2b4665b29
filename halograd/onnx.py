"""ONNX files: ``halograd.onnx.load`` makes a network of one, ``halograd.onnx.save`` writes one."""

from .interchange.onnx_export import save
from .interchange.onnx_import import load

__all__ = ["load", "save"]
