"""Axes along which a layer is cut."""

from __future__ import annotations

__all__ = ["AXES"]

# Axes of the process grid of a layer, the last one fastest. "channel" cuts the output's channels (and the filters that
# make them), "input_channel" the sum over the input's channels: its partial sums are added up and spread over the
# output's channels, which are so cut into channel * input_channel blocks.
AXES: tuple[str, ...] = ("sample", "depth", "height", "width", "channel", "input_channel")
