"""``[data]`` of a configuration: the files of a run, and the treatment of their samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from halograd.registry import Chosen
from halograd.schema import Below1, Count, FilePath, Table, Text

from ..data.augment import AUGMENTATIONS, AugmentationSettings
from ..data.targets import check_numbers

__all__ = ["DataConfig"]



class DataConfig(Table):
    """``[data]``: the files of a run, their datasets, and the selection of samples."""

    path: FilePath | Annotated[list[FilePath], Field(min_length=1)]
    """A file, a pattern (``"runs/*/fields.h5"``), a folder, or a list of these. Samples are numbered over all files."""
    file: FilePath | None = None
    """``"data.py:open"`` or ``"package.module:open"``: a function that returns a data set of another format
    (:class:`halograd.data.Dataset`) for `path` and `options`. Then `inputs`, `targets`, `layout` and `open_files` are
    not read."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function of `file`."""
    inputs: FilePath | Annotated[dict[Text, FilePath], Field(min_length=1)] = "inputs"
    """Dataset of the network's input; for several inputs, a table of datasets by the name of the input. They are
    normalized."""
    targets: FilePath | Annotated[dict[Text, FilePath], Field(min_length=1)] = "mask"
    """Datasets of the targets, in the same way: ``[data.targets]``, ``mask = "label"``. They are not normalized."""
    layout: Literal["NHWC", "NCHW"] | None = None
    """Order of axes on the disk, if the file does not define it."""
    rule: Literal["any", "all", "majority", "fraction", "max", "center"] | None = None
    """Rule from targets per cell to targets of the patches that the network predicts: 0 or 1 by `any`, `all` or
    `majority` (more than half) of the cells; their mean (`fraction`) or maximum (`max`); the cell in the middle
    (`center`)."""
    validation: Below1 = 0.1
    """Fraction of the samples that is held out."""
    normalize: bool | list[Text] = True
    """Whether to normalize inputs to mean 0 and standard deviation 1 per channel over the training samples; or the
    names of the inputs to normalize."""
    transforms: dict[str, str] = Field(default_factory=dict)
    """Rules by the name of a channel, or of an input for all its channels, instead of the default rules: ``"none"``,
    ``"log"`` (``sign(x) log(1 + |x|)``), ``"asinh"``, ``"metric"`` (as ``"log"``, of at most 1e6: quality metrics of
    meshes); ``"clip"`` bounds what normalization gives."""
    shuffle: bool = True
    """Whether to read training samples in another order in every epoch."""
    prefetch: Annotated[Count, Field(le=64)] = 1
    """Number of batches to read ahead."""
    allow_external: bool = False
    """Whether virtual datasets, external links and external datasets of a file may refer to files outside its
    folder."""
    unpack: bool = True
    """Whether to apply the attributes of packed data: ``scale_factor``, ``add_offset``, ``_Unsigned``; and
    ``_FillValue``, ``missing_value``, ``valid_range``, ``valid_min`` and ``valid_max``, which mark missing numbers:
    these become NaN, see `invalid`. Otherwise numbers are read as stored."""
    split: Literal["auto", "random", "group", "file"] = "auto"
    """Units that `validation` holds out: random samples, whole groups (with one number in the dataset ``simulation``),
    or whole files; ``"auto"``: groups if there are any, else samples."""
    open_files: Annotated[Count, Field(le=65536)] = 64
    """Maximum number of files that a rank keeps open."""
    invalid: Literal["refuse", "skip", "fill"] = "refuse"
    """Treatment of NaN, infinity and targets out of range. ``"refuse"`` ends the run; ``"skip"`` leaves out samples
    with such numbers; ``"fill"`` replaces NaN and infinity in inputs by the mean of their channel (0 if it is not
    normalized). The last two read all samples once before the run, each rank a share of them."""
    augment: Annotated[AugmentationSettings, Chosen(AUGMENTATIONS, "standard")] | None = None
    labels: Annotated[dict[str, int | dict[str, int]], AfterValidator(check_numbers)] = Field(default_factory=dict)
    """Replacements of whole numbers of a target, ``{ 255 = -1, 7 = 1 }``, or by target: ``[data.labels.mask]``. Numbers
    that are not listed do not change. Replacements precede `rule` and the check of targets."""

    @property
    def where(self) -> str:
        """The path, or the first of several paths, for messages."""
        if isinstance(self.path, str):
            return self.path
        return self.path[0] + (f" (and {len(self.path) - 1} more)" if len(self.path) > 1 else "")
