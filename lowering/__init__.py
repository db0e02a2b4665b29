"""Lowering of layers: views of memory, operations on them, and the context in which a layer adds its operations."""
