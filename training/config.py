"""Configurations: the TOML file of a run, checked before anything is built.

Every table is a pydantic model that rejects unknown keys and wrong types (no silent conversion). An error message is
one line with the path of the key, the expected and the actual value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from halograd.documents import is_one_line, parse_option, parse_toml, read_toml, shown, shown_path
from halograd.errors import UserError
from halograd.registry import Chosen
from halograd.schema import (
    Below1,
    Count,
    FilePath,
    NotNegative,
    Positive,
    Size,
    Table,
    Text,
    Threads,
    Whole,
    build,
)
from halograd.user_code import check_files, checksums

from ..comm.gpu.choice import named_route
from ..data.augment import AUGMENTATIONS, AugmentationSettings
from ..data.targets import check_numbers
from ..layers.reduction_scheme import KINDS, Name, Scheme
from ..layers.strategy import CutField
from ..perfmodel.quantities import parse_quantity
from .optimizers import OPTIMIZERS, OptimizerSettings
from .schedules import SCHEDULES, ScheduleSettings

__all__ = [
    "BackendConfig",
    "Config",
    "DataConfig",
    "ModelConfig",
    "OutputConfig",
    "ReductionConfig",
    "RunConfig",
    "StrategyConfig",
    "TrainingConfig",
    "check_config",
    "load_config",
    "parse_config",
]

#: Name of a dataset, or of the files of each sample whose channels are concatenated.
Names = FilePath | Annotated[list[FilePath], Field(min_length=1)]
Minutes = Annotated[NotNegative, Field(le=1e6)]


def _size(text: str) -> str:
    # Only checked: a configuration keeps the text of the user.
    parse_quantity(text, "B")
    return text


#: Keys of ``[model]`` of which one is required.
_SOURCES = ("name", "file", "torch", "onnx")


class ModelConfig(Table):
    """``[model]``: a network, and the options of the function that builds it, which `halograd.models.build` checks.

    One of `name`, `file`, `torch` and `onnx` is required. Paths are relative to the working folder.
    """

    model_config = ConfigDict(extra="allow")
    name: Text | None = None
    """Name of a model of halograd."""
    file: FilePath | None = None
    """``"net.py:build"`` or ``"package.module:build"``: a function that returns a network."""
    torch: FilePath | None = None
    """``"net.py:make"`` or ``"package.module:make"``: a function that returns a ``torch.nn.Module`` and an example of
    its inputs. A run keeps it as ``model.onnx`` in its folder, and needs torch only once. ``loss`` goes with it:
    ``"SoftmaxCrossEntropy"``, ``"MeanSquaredError"``, ``"AbsoluteError"``, ``"Huber"`` or
    ``"BinaryCrossEntropyWithLogits"`` of a single output and the input ``target``; or ``"FILE.py:FUNCTION"``, a
    function from the network to one with a loss."""
    onnx: FilePath | None = None
    """An ONNX file (:func:`halograd.onnx.load`), with ``loss`` as for `torch`."""

    @model_validator(mode="after")
    def _check_source(self) -> ModelConfig:
        sources = [key for key in _SOURCES if getattr(self, key) is not None]
        if not sources:
            raise ValueError('name: expected a model, or file = "net.py:build", got neither')
        # A run of `torch` keeps its graph, and `kept_model` sets `onnx` in addition.
        if len(sources) > 1 and sources != ["torch", "onnx"]:
            raise ValueError(f"{sources[1]}: expected no {sources[0]} with it, got one; remove one of them")
        for key in ("file", "torch"):
            value = getattr(self, key)
            if value is not None and ":" not in value:
                raise ValueError(f'{key}: expected "FILE.py:FUNCTION" or "MODULE:FUNCTION", got {shown(value)}')
        extra = self.model_extra or {}
        if sources[0] in ("torch", "onnx") and not isinstance(extra.get("loss"), str):
            raise ValueError(f'loss: expected a loss with {sources[0]}, "SoftmaxCrossEntropy" or another, got none')
        # `extra` has at least `loss`, as checked above.
        if sources == ["onnx"] and len(extra) > 1:
            raise ValueError(f"{min(set(extra) - {'loss'})}: expected no option but loss with onnx, got one")
        return self

    @property
    def source(self) -> str:
        """Name of a model, or of a file with a network, for `halograd.models.build`."""
        foreign = next((f"{key}:{value}" for key in ("onnx", "torch") if (value := getattr(self, key))), "")
        return self.name or self.file or foreign

    @property
    def options(self) -> dict[str, Any]:
        """Options of the model: all other keys; with `onnx`, only the loss."""
        extra = self.model_extra or {}
        # The graph was made with the other options.
        return dict(extra) if self.onnx is None else {"loss": extra["loss"]}


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
    format: FilePath | None = None
    """Format of the files: ``"hdf5"`` (also netCDF-4), ``"zarr"``, ``"nifti"``, ``"tiff"``, or ``"FILE.py:CLASS"``; by
    default that of their suffix, HDF5 for unknown ones."""
    inputs: Names | Annotated[dict[Text, Names], Field(min_length=1)] = "inputs"
    """Dataset of the network's input; for several inputs, a table of datasets by the name of the input. They are
    normalized. In place of a dataset a list of some, whose channels are concatenated: ``["tos", "uo"]``. With
    ``{sample}`` it is the name of a file of each sample in the folder `path`: ``"{sample}_t1.nii.gz"``."""
    targets: Names | Annotated[dict[Text, Names], Field(min_length=1)] = "mask"
    """Datasets of the targets, in the same way: ``[data.targets]``, ``mask = "label"``. They are normalized by
    `normalize_targets`."""
    layout: Literal["NHWC", "NCHW", "NHW"] | None = None
    """Order of axes on the disk, if the file does not define it, for any number of spatial axes; ``"NHW"``: there are
    no channels."""
    rule: Literal["any", "all", "majority", "fraction", "max", "center"] | None = None
    """Rule from targets per cell to targets of the patches that the network predicts: 0 or 1 by `any`, `all` or
    `majority` (more than half) of the cells; their mean (`fraction`) or maximum (`max`); the cell in the middle
    (`center`)."""
    validation: Below1 | Annotated[list[Text], Field(min_length=1)] = 0.1
    """Fraction of the samples that is held out; or names, ``["2018", "patient07"]``: names of files (with or without
    suffix, or patterns with ``*``), names of samples in several files, values of the dataset ``simulation``, or years
    of the time coordinate."""
    normalize: bool | list[Text] = True
    """Whether to normalize inputs to mean 0 and standard deviation 1 per channel over the training samples; or the
    names of the inputs to normalize."""
    normalize_targets: bool | list[Text] = False
    """Whether to normalize targets that may be any number (regression) in the same way; or the names of the targets to
    normalize. The loss is that of normalized numbers. Predictions that are written, and the errors of metrics, have the
    units of the data."""
    statistics: Count | None = None
    """Number of training samples, drawn by the seed, from which means and standard deviations are computed; by default
    all. With a number they are kept in the folder of the data, if it is writable, for other runs on these samples."""
    transforms: dict[str, str] = Field(default_factory=dict)
    """Rules by the name of a channel, or of an input for all its channels, instead of the default rules: ``"none"``,
    ``"log"`` (``sign(x) log(1 + |x|)``), ``"asinh"``, ``"metric"`` (as ``"log"``, of at most 1e6: quality metrics of
    meshes); ``"clip"`` bounds what normalization gives."""
    shuffle: bool = True
    """Whether to read training samples in a new random order in every epoch."""
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
    invalid: Literal["refuse", "skip", "fill", "mask"] = "refuse"
    """Treatment of NaN, infinity and targets out of range. ``"refuse"`` ends the run; ``"skip"`` leaves out samples
    with such numbers; ``"fill"`` replaces NaN and infinity in inputs by the mean of their channel (0 if it is not
    normalized). These two read all samples once before the run, each rank a share of them. ``"mask"`` fills inputs in
    the same way, and sets the weights of the loss to 0 where a target is invalid; weights need no dataset then."""
    augment: Annotated[AugmentationSettings, Chosen(AUGMENTATIONS, "standard")] | None = None
    lag: Whole = 0
    """Samples are successive time points: targets are those of `lag` samples later, in the same simulation (dataset
    ``simulation``) and file, without copies. 0: targets of the sample itself."""
    history: Count = 1
    """Number of time points of the inputs, at intervals of `lag` samples, the last one that of the sample; their
    channels are concatenated, oldest first."""
    rollout: Count = 1
    """Number of time points of the targets, at intervals of `lag` samples; their channels are concatenated."""
    evaluate: Literal["whole", "middle"] | None = None
    """Part of the samples that validations and `halograd evaluate` compute for a network that is trained on windows:
    whole samples, cut over the ranks, or their middle windows. By default whole samples if their sizes differ, or with
    `patches`, if the network allows it, else middle windows."""
    extents: Annotated[list[Count], Field(min_length=1, max_length=3)] | None = None
    """Spatial extents of the samples, if the network is to take samples of another size than it is built for. What the
    network cannot divide is padded with zeros, and cut off its predictions. `halograd apply` and `evaluate` set it."""
    patches: Whole = 0
    """Number of windows of the network's size that an epoch takes from every sample, at random positions; samples may
    be larger or smaller, and differ in size. `evaluate` sets what is evaluated. 0: samples have the network's size,
    unless ``augment.crop`` is set."""
    foreground: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of the windows that are placed around a random foreground element, as far as the edges of the sample
    allow."""
    foreground_classes: list[Count] = Field(default_factory=list)
    """Classes that are foreground: one of those in the sample is chosen, then one of its elements. By default all
    elements with a target above 0."""
    labels: Annotated[dict[str, int | dict[str, int]], AfterValidator(check_numbers)] = Field(default_factory=dict)
    """Replacements of whole numbers of a target, ``{ 255 = -1, 7 = 1 }``, or by target: ``[data.labels.mask]``. Numbers
    that are not listed do not change. Replacements precede `rule` and the check of targets."""

    @model_validator(mode="after")
    def _times(self) -> DataConfig:
        for key in ("history", "rollout"):
            if getattr(self, key) > 1 and not self.lag:
                raise ValueError(f"{key}: expected lag = 1 or more with it, got 0; set data.lag, or remove {key}")
        return self

    @property
    def where(self) -> str:
        """The path, or the first of several paths, for messages."""
        if isinstance(self.path, str):
            return self.path
        return self.path[0] + (f" (and {len(self.path) - 1} more)" if len(self.path) > 1 else "")


#: Keys of ``[strategy]`` that go with ``auto`` only.
_PLANNED = frozenset({"planner", "memory", "machine", "robust", "budget"})


class StrategyConfig(Table):
    """``[strategy]``: how samples and layers are cut: by parts per axis, by a file, or by a plan.

    A number of parts cuts evenly; a list gives the share of each part. ``strategy = "auto"`` in place of the table is
    ``auto = true``. `planner`, `machine`, `robust` and `budget` apply only with `auto`.
    """

    sample: CutField | None = None
    """Parts of the batch; by default all remaining ranks."""
    depth: CutField = 1
    """Parts along the first of three spatial axes."""
    height: CutField = 1
    """Parts along the rows."""
    width: CutField = 1
    """Parts along the columns."""
    small: Literal["auto", "keep"] = "auto"
    """Layers whose blocks are too small under this cut: on fewer ranks, or cut along channels, where the model of a
    common processor predicts that the step is faster (``"auto"``, on CPUs); or cut as all other layers
    (``"keep"``). Results are the same."""
    halo: Literal["auto", "pad", "overlap"] = "auto"
    """Time at which convolutions wait for their halos: before they compute (``"pad"``), or after their interior
    (``"overlap"``); ``"auto"``: `overlap` if halos cross a network, `pad` between ranks that share memory."""
    attention: Literal["auto", "gather", "ring"] = "auto"
    """Time at which attention over whole samples gets the keys and values of other ranks: all before it computes
    (``"gather"``), or block by block while it computes (``"ring"``: hidden messages, more and smaller
    kernels); ``"auto"`` follows `halo`: a ring for ``"overlap"``."""
    statistics: Literal["global", "sample", "local"] | None = None
    """Elements over which batch norms compute statistics: those of all ranks, of the ranks that share samples, or of
    one block; by default the setting of each layer."""
    recompute: Literal["none", "auto", "pointwise", "block"] | None = None
    """Outputs that are not kept for the backward pass, but computed again in it, with the same results: none; if the
    memory does not suffice, those that make the step the least slower (``"auto"``, the default of a plan); those of
    norms, activations, sums and other pointwise layers (``"pointwise"``: about half of the memory for a few percent of
    the time); or all but a few (``"block"``: the least memory, for one more forward pass). A plan computes again what
    it has to, and with ``"pointwise"`` only such layers."""
    recompute_halo: Literal["keep", "exchange"] = "keep"
    """Halos of outputs that are computed again: kept in small arrays (``"keep"``), or exchanged again in the backward
    pass (``"exchange"``: less memory, more messages to wait for)."""
    bucket_bytes: Size = 4 << 20
    """Size of the buckets in which gradients are summed [B]."""
    passes: list[Text] = Field(default_factory=list)
    """Passes that transform the program of a step, in order: ``"fuse"``, ``"sums"``, ``"overlap"``, ``"fork"`` (whose
    gain predictions leave out), or ``"FILE.py:CLASS"``."""
    file: FilePath | None = None
    """File that :meth:`Strategy.save` or `halograd plan` wrote; no other key may be set with it."""
    auto: bool = False
    """Plan the cut of every layer before the run starts."""
    planner: str = "elimination"
    """A planner, or a baseline: ``"data"``, ``"spatial"``, ``"model"``, ``"owt"``, ``"grid"``; or a class of your own,
    ``"FILE.py:CLASS"``.
    """
    memory: Annotated[str, AfterValidator(_size)] | None = None
    """Memory limit of a rank, also without `auto` for ``recompute = "auto"``; by default the memory of the machine."""
    machine: FilePath | None = None
    """Name or file of the machine to plan for. Without it, this machine is measured, and steps of the plan and of
    baselines close to it are tried."""
    robust: bool | None = None
    """Whether to choose the plan that loses the least time if latency, launch time or compute rate of the machine is
    off by 3 x; by default for a `machine`, whose numbers are not measured, and networks whose search takes seconds."""
    budget: NotNegative | None = None
    """Time to measure layers [s]; by default as long as necessary. 0: measure nothing, try nothing."""

    @model_validator(mode="after")
    def _one_way(self) -> StrategyConfig:
        keys = self.model_fields_set
        # A plan takes these keys as they are.
        others = sorted(keys - _PLANNED - {"auto", "statistics", "bucket_bytes", "recompute"})
        if self.auto and others:
            raise ValueError(f"auto: expected no {others[0]} with it, which the plan decides; remove one of them")
        # Without a plan, `memory` is the limit of `recompute = "auto"`.
        planned = keys & _PLANNED - ({"memory"} if self.recompute == "auto" else set())
        if not self.auto and planned:
            key = min(planned)
            raise ValueError(f"{key}: expected auto = true with it, got none; add that, or remove {key}")
        if self.file is not None and keys != {"file"}:
            raise ValueError(f"file: expected no other key with it, got {min(keys - {'file'})}")
        return self


_TUNING = {"interval", "step", "range"}


class ReductionConfig(Table):
    """``[reduction]``: how gradients are summed over the ranks, as in :class:`Scheme`.

    If the table is present, it overrides the scheme of a plan or of a strategy's file. `interval`, `step` and `range`
    apply only to ``name = "auto"``.
    """

    name: Name = "bucketed"
    first_layers: Whole = 0
    chunk: Count = 1
    replicated_dense: Whole = 0
    payload: Text = "float32"
    error_feedback: bool = True
    deterministic: bool = False
    interval: Annotated[Count, Field(ge=2)] = 10
    """Number of steps for which each scheme is tried."""
    step: Whole = 10
    """Size of the jumps of the search for a chunk size (Le et al. 2018, Algorithm 1) [layers]; 0: no search."""
    range: Count = 5
    """Number of jumps of this search beyond the best size."""

    @model_validator(mode="after")
    def _together(self) -> ReductionConfig:
        others = sorted(self.model_fields_set & _TUNING)
        if others and not KINDS[self.name].searches:
            raise ValueError(f'{others[0]}: expected name = "auto" with it, got "{self.name}"; remove one of them')
        # A `Scheme` checks its fields together when it is made.
        self.scheme()
        return self

    def scheme(self) -> Scheme:
        """Return the scheme of these keys, as a strategy holds it."""
        return Scheme(**self.model_dump(exclude=_TUNING))


class TrainingConfig(Table):
    """``[training]``: duration, batch size and precision of the training."""

    epochs: Count
    """Number of passes over all training samples."""
    batch: Count
    """Number of samples of a step, over all ranks."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of initial values, shuffling, dropout and augmentation: runs with one seed draw the same numbers under every
    cut."""
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    """Dtype of activations. ``"bfloat16"`` and ``"float16"`` need a GPU, or a processor that computes in them (see
    docs/kernels.md); parameters stay float32, and with float16 the loss is scaled."""
    clip_norm: Positive | None = None
    """Global norm to which gradients are scaled down; by default they are not clipped."""
    patience: Whole = 0
    """Number of consecutive validations without improvement, by the score `output.best`, after which training ends;
    validations with an undefined score do not count. 0: training continues to the last epoch."""
    steps_per_epoch: Whole = 0
    """Number of updates of an epoch, whatever the number of samples: for a few large images in patches. 0: those of all
    samples, or of all their patches."""
    validate_every: Whole = 0
    """Number of updates between two validations; a validation also follows the last update. 0: one per epoch."""
    accumulate: Count = 1
    """Number of parts in which every batch is computed, one after another. Their gradients are added up: this is the
    step of the whole batch with the memory of a part, divided by the weights of the whole batch. The statistics of
    batch norm and Dice of a batch are over a part (the run lists them)."""
    average: Below1 = 0.0
    """Weight of the old values in moving averages of all parameters, for example 0.999; 0: no averages. Validations,
    `halograd evaluate`, `apply` and `export` use the averages instead of the parameters."""
    freeze: list[Text] = Field(default_factory=list)
    """Names of layers, or patterns of them (``"block1/*"``), whose parameters do not change."""
    init: FilePath | None = None
    """File of initial parameters and running statistics (safetensors). A resumed run does not read it."""
    init_from: FilePath | None = None
    """Run (its directory), or checkpoint, from which a new run takes parameters, running statistics and the state of
    the optimizer; its steps are counted on. Epochs, schedule and statistics of the data begin anew. A resumed run does
    not read it."""
    init_fresh: list[Text] = Field(default_factory=list)
    """Layers that do not use the weights of `init`."""

    @property
    def at_once(self) -> int:
        """Number of samples that are computed at once: the batch, or a part of it."""
        return self.batch // self.accumulate

    @model_validator(mode="after")
    def _together(self) -> TrainingConfig:
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate: expected a divisor of batch, {self.batch}, got {self.accumulate}")
        if self.init is not None and self.init_from is not None:
            raise ValueError("init_from: expected one source of initial parameters, got init too; remove one")
        if self.init_fresh and self.init is None:
            raise ValueError("init_fresh: expected a file of weights (init) with it, got none; remove it")
        return self


class BackendConfig(Table):
    """``[backend]``: kernels, threads per rank, and transports of messages."""

    kernels: str = "auto"
    """``"numpy"``, ``"onednn"``, ``"cudnn"``; ``"auto"``: oneDNN, or NumPy where there is none; or a class of your own,
    ``"FILE.py:CLASS"``.
    """
    threads: Threads = 1
    """Number of threads of each rank."""
    autotune: bool = False
    """Whether to measure the algorithms of every convolution when the network is built, and use the fastest."""
    transport: str = "auto"
    """Transport of host arrays: ``"shared"`` (memory of one node), ``"mpi"``, ``"emulated:..."`` (a slow network, for
    experiments); ``"auto"``: shared memory within a node, else MPI."""
    precision: Literal["strict", "tf32"] = "strict"
    """Arithmetic of float32; ``"tf32"`` only on a GPU."""
    deterministic: bool = False
    """Whether two runs agree in every bit."""
    emulate: bool = False
    """Whether a CPU may compute a ``training.dtype`` of 16 bits in float32, with conversions before and after each
    kernel, if it does not compute in 16 bits itself: slower than float32, for tests."""
    graph: bool | Literal["auto"] = "auto"
    """Whether to replay the forward and backward pass as CUDA graphs, between messages; ``"auto"``: if the host is slow
    to enqueue them, by a measurement of the second step, and there is no timeline."""
    device: Literal["auto"] | Whole | Annotated[list[Whole], Field(min_length=1)] = "auto"
    """Number of a GPU, or numbers that the ranks of a node use in turn; ``"auto"``: all GPUs of the node in turn."""
    device_transport: Text = "auto"
    """Transport of GPU arrays: ``"nccl"``, ``"mpi-cuda"``, ``"mpi-staged"``; ``"auto"`` follows the rule in
    docs/gpu.md."""

    @model_validator(mode="after")
    def _known_transport(self) -> BackendConfig:
        named_route(self.device_transport)
        return self


class OutputConfig(Table):
    """``[output]``: the files that a run writes, and their periods.

    Checkpoints are written whenever one of their three periods is over (0: no such period), and at the end.
    """

    directory: FilePath
    """Folder of the run; only one run at a time writes there."""
    log_steps: Count = 1
    """Steps between two lines of ``log.jsonl``."""
    checkpoint_epochs: Whole = 1
    """Epochs between two checkpoints."""
    checkpoint_steps: Whole = 0
    """Steps between two checkpoints."""
    checkpoint_minutes: Minutes = 0.0
    """Age of the last checkpoint at which the next one is written [min]."""
    keep: Count = 3
    """Number of most recent checkpoints to keep."""
    best: Text | None = None
    """Score by which the checkpoint with the best validation is kept too: ``"loss"``, ``"iou"``, ...; ``"none"``: no
    such checkpoint. The default is the loss, if every epoch has a checkpoint and the held-out targets have several
    classes. A validation without the score is ignored."""
    metrics: list[Text] = Field(default_factory=list)
    """Metrics of the first prediction, in addition to those of the loss: ``"dice"`` and ``"iou"`` (means over the
    foreground and over all classes; ``"dice:each=true"`` also each class), ``"errors"`` (``mae`` and ``rmse``),
    ``"weighted"`` (the same errors with weights, and the correlation of anomalies; ``"weighted:each=true"`` also of
    each channel), or one of your own, ``"FILE.py:CLASS"``, with settings ``"FILE.py:CLASS:key=value"``. `best` may be
    one of their scores."""
    timeline: bool = False
    """Whether to measure every step of every rank: ``timeline.json``, and the hidden share of the communication."""
    rank_logs: bool = False
    """Whether to write a log of every rank, ``logs/rank-NNNN.log``."""
    tensorboard: bool = False
    """Whether to write event files in ``tensorboard/``; needs ``pip install 'halograd[tensorboard]'``."""
    progress: bool = True
    """Whether to show a progress bar on a terminal."""


class RunConfig(Table):
    """``[run]``: supervision of the ranks of a run."""

    stall_minutes: Minutes = 15.0
    """Time without progress after which a job is reported and ended [min]; 0: never. It must be longer than the longest
    time of a batch, a layer or a checkpoint."""


class Config(Table):
    """A whole configuration."""

    model: ModelConfig
    data: DataConfig
    strategy: StrategyConfig = StrategyConfig()
    reduction: ReductionConfig = ReductionConfig()
    optimizer: Annotated[OptimizerSettings, Chosen(OPTIMIZERS)]
    schedule: Annotated[ScheduleSettings, Chosen(SCHEDULES, "constant")]
    training: TrainingConfig
    backend: BackendConfig = BackendConfig()
    output: OutputConfig
    run: RunConfig = RunConfig()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the keys that were set; each rank loads the classes in the user's files itself."""
        tables = self.model_dump(mode="json", exclude_unset=True)
        return _received, (tables, checksums(tables))


def _received(tables: dict[str, Any], files: dict[str, int | None]) -> Config:
    """Return the configuration in the tables of another rank; raise an error if the user's files differ here."""
    check_files(tables, files)
    return check_config(tables)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read and check a TOML file; `overrides` are ``section.key=value`` strings with priority over it. Local.

    Raises
    ------
    UserError
        If the file is invalid. The message is one line with the key, the expected and the actual value.
    """
    return check_config(read_toml(path, "configuration"), overrides, f"configuration {shown_path(path)}")


def parse_config(text: str, overrides: Sequence[str] = (), source: str = "configuration") -> Config:
    """Check the text of a configuration, as :func:`load_config`; errors name `source`."""
    return check_config(parse_toml(text, source), overrides, source)


def check_config(tables: dict[str, Any], overrides: Sequence[str] = (), source: str = "configuration") -> Config:
    """Check the tables of a configuration, as :func:`parse_config`; the tables are modified."""
    if tables.get("strategy") == "auto":
        # A pydantic validator cannot do this: its result is checked as Python objects, for which a list is not a tuple.
        tables["strategy"] = {"auto": True}
    for override in overrides:
        _set(tables, override)
    return build(Config, tables, source)


def _set(tables: dict[str, Any], override: str) -> None:
    """Apply one ``section.key=value``, or ``section={...}`` for a whole table."""
    key, equals, text = (part.strip() for part in override.partition("="))
    path = key.split(".")
    if not equals or not all(path) or not is_one_line(key):
        raise UserError(f"--set: expected section.key=value, got {shown(override)}")
    value = parse_option("--set", key, text)
    if path == ["strategy"] and value == "auto":
        value = {"auto": True}
    # A key without a dot is a whole table.
    if len(path) < 2 and not isinstance(value, Mapping):
        raise UserError(f"--set: expected section.key=value, got {shown(override)}")
    where: Any = tables
    for name in path[:-1]:
        where = where.setdefault(name, {})
        if not isinstance(where, Mapping):
            raise UserError(f"--set {key}: expected a table at {name!r}, got {shown(where)}")
    by_hand = path[-1] in {"sample", "depth", "height", "width", "halo", "file"}
    if path[0] == "strategy" and by_hand and where.get("auto") is True:  # parts replace a plan
        for name in ("auto", *_PLANNED):
            where.pop(name, None)
    where[path[-1]] = value
