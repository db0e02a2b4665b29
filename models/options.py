"""Types of the options that models take: what `halograd.models.build` lets through, option by option."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from halograd.schema import Below1, Count, NotNegative, Positive, Text

__all__ = [
    "Balanced",
    "ClassWeights",
    "Extent",
    "Extents",
    "Factor",
    "Filters",
    "Name",
    "Rate",
    "Statistics",
    "Times",
    "Weight",
]

#: Cells, pixels or voxels along one axis.
Extent = Annotated[Count, Field(le=2**17)]
Extents = Annotated[Sequence[Extent], Field(min_length=1, max_length=3)]
#: Channels, classes, filters of a convolution.
Filters = Annotated[Count, Field(le=2**20)]
#: How often something is repeated: convolutions of a block, blocks of a stage.
Times = Annotated[Count, Field(le=256)]
#: Of all filters and hidden units, 1 as published.
Factor = Annotated[Positive, Field(le=64)]
Weight = Annotated[Positive, Field(le=1e6)]
#: By how often classes occur in the training samples.
Balanced = Literal["balanced"]
#: One per class, or "balanced".
ClassWeights = Annotated[Sequence[NotNegative], Field(min_length=1, max_length=2**16)] | Balanced | None
#: Of dropout, or of smoothed labels.
Rate = Below1
Statistics = Literal["global", "sample", "local"]
Name = Text
