"""``[data]`` of a configuration: which files a run reads, and what becomes of their samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from halograd.schema import Below1, Count, FilePath, NotNegative, Table, Text

from ..data.targets import check_numbers

__all__ = ["AugmentConfig", "DataConfig"]

Axis = Literal["depth", "height", "width"]


class AugmentConfig(Table):
    """``[data.augment]``: how samples are varied in training, drawn by seed, epoch and number of the sample.

    All fields with space are moved alike, targets too. `noise`, `brightness` and `contrast` change inputs only, after
    normalization.
    """

    flips: list[Axis] = Field(default_factory=list)
    """Axes along which a sample is mirrored, each with the probability 1/2."""
    turns: bool = False
    """Turn samples by quarters, in the plane of height and width."""
    shifts: list[Axis] = Field(default_factory=list)
    """Axes along which a sample is shifted in a circle, by any distance."""
    crop: bool = False
    """Samples may be larger than the network reads: a window at random, in evaluation the middle one."""
    noise: NotNegative = 0.0
    """Standard deviation of what is added to every number."""
    brightness: NotNegative = 0.0
    """What is at most added to all of a channel."""
    contrast: Below1 = 0.0
    """A channel is multiplied by ``1 - contrast`` to ``1 + contrast``."""
    vectors: list[list[Text]] = Field(default_factory=list)
    """Names of channels of a dataset that are the components of a vector along the spatial axes. They change sign when
    a sample is mirrored, and places when it is turned."""


class DataConfig(Table):
    """``[data]``: the files of a run, their datasets, and how samples are drawn."""

    path: FilePath | Annotated[list[FilePath], Field(min_length=1)]
    """A file, a pattern (``"runs/*/fields.h5"``), a folder, or a list of these. Samples are numbered over all files."""
    file: FilePath | None = None
    """``"data.py:open"`` or ``"package.module:open"``: a function that gives a data set of another format
    (:class:`halograd.data.Dataset`) for `path` and `options`. Then `inputs`, `targets`, `layout` and `open_files` are
    not read."""
    options: dict[str, Any] = Field(default_factory=dict)
    """What the function of `file` is called with, by name."""
    inputs: FilePath | Annotated[dict[Text, FilePath], Field(min_length=1)] = "inputs"
    """The dataset of the network's input; of several inputs a table of datasets by the name of the input. They are
    normalized."""
    targets: FilePath | Annotated[dict[Text, FilePath], Field(min_length=1)] = "mask"
    """The same for what the loss compares with: ``[data.targets]``, ``mask = "label"``. They are not normalized."""
    layout: Literal["NHWC", "NCHW"] | None = None
    """Order of axes on the disk, where the file does not say it."""
    rule: Literal["any", "all", "majority", "fraction", "max", "center"] | None = None
    """How targets per cell become targets of the patches that the network predicts: 0 or 1 by `any`, `all` or
    `majority` (more than half) of the cells; their mean, their maximum; the cell in the middle."""
    validation: Below1 = 0.1
    """Share of the samples that is held out."""
    normalize: bool | list[Text] = True
    """Whether inputs have mean 0 and standard deviation 1 per channel over the training samples; or the names of the
    inputs that do."""
    transforms: dict[str, str] = Field(default_factory=dict)
    """Rules by the name of a channel, or of an input for all its channels, in place of the default ones: ``"none"``,
    ``"log"`` (``sign(x) log(1 + |x|)``), ``"asinh"``, ``"metric"`` (as ``"log"``, of at most 1e6: quality metrics of
    meshes); ``"clip"`` bounds what normalization gives."""
    shuffle: bool = True
    """Draw training samples in another order in every epoch."""
    prefetch: Annotated[Count, Field(le=64)] = 1
    """Batches that are read ahead."""
    allow_external: bool = False
    """Numbers may lie in files outside the folder of the file, to which its virtual datasets, external links and
    external datasets refer."""
    unpack: bool = True
    """Apply the attributes of packed data: ``scale_factor``, ``add_offset``, ``_Unsigned``; and ``_FillValue``,
    ``missing_value``, ``valid_range``, ``valid_min`` and ``valid_max``, by which numbers are missing: they are NaN, see
    `invalid`. Without, numbers are read as they are stored."""
    split: Literal["auto", "random", "group", "file"] = "auto"
    """What `validation` holds out: samples at random, whole groups (of one number in the dataset ``simulation``), or
    whole files; ``"auto"``: groups where there are some, else samples."""
    open_files: Annotated[Count, Field(le=65536)] = 64
    """Files that a rank keeps open at most."""
    invalid: Literal["refuse", "skip", "fill"] = "refuse"
    """What becomes of NaN, infinity and targets out of range. ``"refuse"`` ends the run; ``"skip"`` leaves out samples
    that have some; ``"fill"`` takes NaN and infinity in inputs for the mean of their channel (0 where it is not
    normalized). The last two read all samples once before the run, each rank a share of them."""
    augment: AugmentConfig | None = None
    labels: Annotated[dict[str, int | dict[str, int]], AfterValidator(check_numbers)] = Field(default_factory=dict)
    """Whole numbers of a target that stand for others, ``{ 255 = -1, 7 = 1 }``, or by target: ``[data.labels.mask]``.
    Numbers that are not listed stay what they are. It comes before `rule`, and before targets are checked."""

    @property
    def where(self) -> str:
        """The path, of several the first, for messages."""
        if isinstance(self.path, str):
            return self.path
        return self.path[0] + (f" (and {len(self.path) - 1} more)" if len(self.path) > 1 else "")
