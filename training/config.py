"""Configurations: the TOML file of a run, checked before anything is built.

Every table is a pydantic model that refuses unknown keys and wrong types (no silent conversion). What is
wrong is said in one line: the key's path, what was expected, what came.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator

from halograd.documents import is_one_line, parse_option, parse_toml, read_toml, shown, shown_path
from halograd.errors import UserError
from halograd.schema import (
    LARGEST,
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

from ..data.labels import check_numbers
from ..layers.reduction_scheme import Name, Payload, Scheme
from ..layers.strategy import CutField
from ..perfmodel.machine_file import parse_quantity

__all__ = [
    "AugmentConfig",
    "BackendConfig",
    "Config",
    "DataConfig",
    "ModelConfig",
    "OutputConfig",
    "ReductionConfig",
    "RunConfig",
    "ScheduleConfig",
    "StrategyConfig",
    "TrainingConfig",
    "check_config",
    "load_config",
    "parse_config",
]

Axis = Literal["depth", "height", "width"]
Epochs = Annotated[NotNegative, Field(le=1e6)]
Minutes = Annotated[NotNegative, Field(le=1e6)]


def _size(text: str) -> str:
    parse_quantity(text, "B")
    return text


class ModelConfig(Table):
    """``[model]``: a network, and the options of the function that makes it, which `halograd.models.build` checks.

    One of `name`, that of a shipped model, and `file`, ``"net.py:build"`` or ``"package.module:build"``: a function
    that returns a network. Paths are relative to the working folder.
    """

    model_config = ConfigDict(extra="allow")
    name: Text | None = None
    file: FilePath | None = None

    @model_validator(mode="after")
    def _one(self) -> ModelConfig:
        if self.name is None and self.file is None:
            raise ValueError('name: expected a model, or file = "net.py:build", got neither')
        if self.name is not None and self.file is not None:
            raise ValueError("file: expected no name beside it, got one; remove one of them")
        if self.file is not None and ":" not in self.file:
            raise ValueError(f'file: expected "FILE.py:FUNCTION" or "MODULE:FUNCTION", got {shown(self.file)}')
        return self

    @property
    def source(self) -> str:
        """What `halograd.models.build` is asked for."""
        return self.name or self.file or ""

    @property
    def options(self) -> dict[str, Any]:
        """All keys but these."""
        return dict(self.model_extra or {})


class AugmentConfig(Table):
    """``[data.augment]``: how samples are varied in training, drawn by seed, epoch and number of the sample.

    `flips` and `shifts` name axes (``"height"``): mirrored with the probability 1/2, shifted in a circle by any
    distance; `turns`: by quarters, in the plane of height and width. `crop`: samples may be larger than the network
    reads; a window at random, in evaluation the middle one. All fields with space are moved alike, targets too.
    `noise` (standard deviation, per number), `brightness` (at most added, per channel) and `contrast` (a channel is
    multiplied by ``1 - contrast`` to ``1 + contrast``) change inputs after normalization. `vectors`: names of channels
    of a dataset that are components of a vector along the spatial axes; they change sign when mirrored, and places when
    turned.
    """

    flips: list[Axis] = Field(default_factory=list)
    turns: bool = False
    shifts: list[Axis] = Field(default_factory=list)
    crop: bool = False
    noise: NotNegative = 0.0
    brightness: NotNegative = 0.0
    contrast: Below1 = 0.0
    vectors: list[list[Text]] = Field(default_factory=list)


class DataConfig(Table):
    """``[data]``: HDF5 files, their datasets, and how samples are drawn.

    `inputs` and `targets` name a dataset each, or, where a network has several, tables of datasets by the name of its
    input: ``[data.targets]``, ``mask = "label"``. Only `inputs` are normalized; `normalize` may name some of them.

    `path` is a file, a pattern (``"runs/*/fields.h5"``), a folder, or a list of these; samples are numbered over all
    files, of which a rank keeps at most `open_files` open. `split` says what `validation` holds out: ``"random"``
    samples, whole groups (``"group"``: of one number in the dataset ``simulation``), or whole files (``"file"``);
    ``"auto"``: groups where there are some, else samples. `layout` is that on disk where the file does not say; `rule`
    reduces targets per cell to the patches that the network predicts; `transforms` are rules by channel name, in place
    of the default ones; `prefetch` is the number of batches read ahead. `allow_external`: numbers may lie in files
    outside the folder of the file, to which its virtual datasets, external links and external datasets refer.

    `labels`: whole numbers of a target that stand for others, ``{ 255 = -1, 7 = 1 }``, or by target:
    ``[data.labels.mask]``. Numbers that are not listed stay what they are. It comes before `rule`, and before targets
    are checked.

    `file`: ``"data.py:open"`` or ``"package.module:open"``, a function that gives a data set of another format
    (:class:`halograd.data.Dataset`) for `path` and `options`; then `inputs`, `targets`, `layout` and `open_files` are
    not read.

    `invalid` says what becomes of NaN, infinity and targets out of range: ``"refuse"`` ends the run; ``"skip"`` leaves
    out samples that have some; ``"fill"`` takes NaN and infinity in inputs for the mean of their channel (0 where it is
    not normalized). The last two read all samples once before the run, each rank a share of them.
    """

    path: FilePath | Annotated[list[FilePath], Field(min_length=1)]
    file: FilePath | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    inputs: FilePath | Annotated[dict[Text, FilePath], Field(min_length=1)] = "inputs"
    targets: FilePath | Annotated[dict[Text, FilePath], Field(min_length=1)] = "mask"
    layout: Literal["NHWC", "NCHW"] | None = None
    rule: Literal["any", "all", "majority", "fraction", "max", "center"] | None = None
    validation: Below1 = 0.1
    normalize: bool | list[Text] = True
    transforms: dict[str, str] = Field(default_factory=dict)
    shuffle: bool = True
    prefetch: Annotated[Count, Field(le=64)] = 1
    allow_external: bool = False
    split: Literal["auto", "random", "group", "file"] = "auto"
    open_files: Annotated[Count, Field(le=65536)] = 64
    invalid: Literal["refuse", "skip", "fill"] = "refuse"
    augment: AugmentConfig | None = None
    labels: Annotated[dict[str, int | dict[str, int]], AfterValidator(check_numbers)] = Field(default_factory=dict)

    @property
    def where(self) -> str:
        """The path, of several the first, for messages."""
        if isinstance(self.path, str):
            return self.path
        return self.path[0] + (f" (and {len(self.path) - 1} more)" if len(self.path) > 1 else "")


class StrategyConfig(Table):
    """``[strategy]``: parts per axis (or their shares), halo algorithm, statistics; or a file; or ``auto``.

    Without `sample`, samples are cut into as many parts as ranks are left. `file` is what :meth:`Strategy.save` or
    `halograd plan` wrote.

    ``auto = true``, or ``strategy = "auto"`` in place of the table, has the run planned before it starts, with
    `planner` (or a baseline), at most `memory` per rank ("16GiB"; else what the machine has), on the `machine` of
    this name or file. Without `machine` this one is measured, layers for at most `budget` seconds, and steps of the
    plan and of baselines near it are tried.
    """

    sample: CutField | None = None
    depth: CutField = 1
    height: CutField = 1
    width: CutField = 1
    halo: Literal["auto", "pad", "overlap"] = "auto"
    statistics: Literal["global", "sample", "local"] | None = None
    bucket_bytes: Size = 4 << 20
    file: FilePath | None = None
    auto: bool = False
    planner: str = "elimination"
    memory: Annotated[str, AfterValidator(_size)] | None = None
    machine: FilePath | None = None
    budget: NotNegative | None = None

    @model_validator(mode="after")
    def _auto(self) -> StrategyConfig:
        planned = {"planner", "memory", "machine", "budget"}
        if self.auto:
            others = sorted(self.model_fields_set - planned - {"auto", "statistics", "bucket_bytes"})
            if others:
                raise ValueError(f"auto: expected no {others[0]} beside it, which the plan decides; remove one of them")
        elif self.model_fields_set & planned:
            key = sorted(self.model_fields_set & planned)[0]
            raise ValueError(f"{key}: expected auto = true with it, got none; add that, or remove {key}")
        return self

    @model_validator(mode="after")
    def _file_alone(self) -> StrategyConfig:
        others = sorted(self.model_fields_set - {"file"})
        if self.file is not None and others:
            raise ValueError(f"file: expected no other key beside it, got {others[0]}")
        return self


_TUNING = {"interval", "step", "range"}


class ReductionConfig(Table):
    """``[reduction]``: how gradients are summed over the ranks, as in :class:`Scheme`.

    The table, if there is one, wins over what a plan or a strategy's file says. With ``name = "auto"`` every scheme
    that is tried gets `interval` steps; `step` and `range` are those of the search for a chunk size (Le et al. 2018,
    Algorithm 1), `step` = 0 leaves it out.
    """

    name: Name = "bucketed"
    first_layers: Whole = 0
    chunk: Count = 1
    replicated_dense: Whole = 0
    payload: Payload = "float32"
    error_feedback: bool = True
    deterministic: bool = False
    interval: Annotated[Count, Field(ge=2)] = 10
    step: Whole = 10
    range: Count = 5

    @model_validator(mode="after")
    def _together(self) -> ReductionConfig:
        others = sorted(self.model_fields_set & _TUNING)
        if others and self.name != "auto":
            raise ValueError(f'{others[0]}: expected name = "auto" with it, got "{self.name}"; remove one of them')
        self.scheme()
        return self

    def scheme(self) -> Scheme:
        """The same as plain data of a strategy."""
        return Scheme(**self.model_dump(exclude=_TUNING))


class SGDConfig(Table):
    """``[optimizer]`` with ``kind = "sgd"``."""

    kind: Literal["sgd"]
    momentum: Below1 = 0.0
    nesterov: bool = False
    weight_decay: NotNegative = 0.0

    @model_validator(mode="after")
    def _momentum(self) -> SGDConfig:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov: expected momentum > 0 with it, got 0")
        return self


class AdamConfig(Table):
    """``[optimizer]`` with ``kind = "adam"`` or ``"adamw"``."""

    kind: Literal["adam", "adamw"]
    beta1: Below1 = 0.9
    beta2: Below1 = 0.999
    epsilon: Annotated[Positive, Field(le=1)] = 1e-8
    weight_decay: NotNegative = 0.0


class LARSConfig(Table):
    """``[optimizer]`` with ``kind = "lars"``."""

    kind: Literal["lars"]
    momentum: Below1 = 0.9
    trust: Positive = 1e-3
    weight_decay: NotNegative = 0.0


OptimizerConfig = Annotated[SGDConfig | AdamConfig | LARSConfig, Field(discriminator="kind")]


class ScheduleConfig(Table):
    """``[schedule]``: the learning rate over the epochs; epochs may be fractions.

    `factors` multiply it, by layer or pattern of layers: ``{"encoder/*" = 0.1}``; where several fit, the last one
    counts.
    """

    kind: Literal["constant", "step", "cosine"] = "constant"
    learning_rate: Positive
    warmup_epochs: Epochs = 0.0
    warmup_start: Below1 = 0.0
    milestones: Annotated[list[Annotated[Epochs, Field(gt=0)]], Field(max_length=100)] = Field(default_factory=list)
    factor: Positive = 0.1
    final: NotNegative = 0.0
    factors: dict[Text, NotNegative] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _milestones(self) -> ScheduleConfig:
        if self.kind == "step" and not self.milestones:
            raise ValueError("milestones: expected the epochs at which the rate drops, got none")
        if self.milestones != sorted(set(self.milestones)):
            raise ValueError(f"milestones: expected rising epochs, got {self.milestones}")
        if math.log10(self.learning_rate) + len(self.milestones) * math.log10(self.factor) > math.log10(LARGEST):
            raise ValueError(f"factor: expected rates of at most {LARGEST:g} at all milestones, got {self.factor:g}")
        return self


class TrainingConfig(Table):
    """``[training]``.

    `dtype` is that of activations. ``"bfloat16"`` and ``"float16"`` need a GPU; parameters stay float32 beside them,
    and the loss of float16 is scaled. `patience`: training ends when so many validations in turn were no better than
    the best one before, by the score `output.best`; 0: it goes on to the last epoch. `freeze`: names of layers,
    or patterns of them (``"block1/*"``), that keep their parameters.

    `accumulate`: every batch is computed in so many parts, one after the other, whose gradients are added up: the step
    of the whole batch with the memory of a part. What is computed of several samples together is of a part then: the
    statistics of batch norm, Dice of a batch, losses divided by weights (the run says which there are).

    `average`, say 0.999: moving averages of all parameters are kept, of which the old ones keep that weight in a step;
    validations, `halograd evaluate`, `apply` and `export` take them in place of the parameters.

    `init` is a file of weights (safetensors) that parameters and running statistics begin with, but those of the layers
    `init_fresh`. A run that is resumed does not read it.
    """

    epochs: Count
    batch: Count
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    clip_norm: Positive | None = None
    patience: Whole = 0
    accumulate: Count = 1
    average: Below1 = 0.0
    freeze: list[Text] = Field(default_factory=list)
    init: FilePath | None = None
    init_fresh: list[Text] = Field(default_factory=list)

    @model_validator(mode="after")
    def _whole_parts(self) -> TrainingConfig:
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate: expected a divisor of batch, {self.batch}, got {self.accumulate}")
        return self

    @property
    def at_once(self) -> int:
        """Samples that are computed at once: the batch, or a part of it."""
        return self.batch // self.accumulate

    @model_validator(mode="after")
    def _fresh_of_some(self) -> TrainingConfig:
        if self.init_fresh and self.init is None:
            raise ValueError("init_fresh: expected a file of weights (init) with it, got none; remove it")
        return self


class BackendConfig(Table):
    """``[backend]``: kernels, threads per rank, and how messages travel.

    `autotune`: measure the algorithms of every convolution when the network is built, and take the fastest.
    `precision`: how float32 is computed, ``"tf32"`` on a GPU only. `deterministic`: two runs agree in every bit.
    `graph`: replay the forward and backward pass as CUDA graphs, between messages. `device`: ``"auto"`` (the ranks of a
    node take its GPUs in turn), the number of a GPU, or numbers to be taken in turn. `device_transport`: how arrays of
    GPUs travel, ``"auto"`` by the rule in docs/gpu.md.
    """

    kernels: str = "auto"
    threads: Threads = 1
    autotune: bool = False
    transport: str = "auto"
    precision: Literal["strict", "tf32"] = "strict"
    deterministic: bool = False
    graph: bool = False
    device: Literal["auto"] | Whole | Annotated[list[Whole], Field(min_length=1)] = "auto"
    device_transport: Literal["auto", "nccl", "cuda-ipc", "mpi-cuda", "mpi-staged"] = "auto"


class OutputConfig(Table):
    """``[output]``: where a run writes, and how often.

    Checkpoints: at the end of every `checkpoint_epochs` epochs, after every `checkpoint_steps` steps, and when the last
    one is `checkpoint_minutes` old; 0 for never. The last `keep` are kept, and the one with the best validation by the
    score `best` (``"loss"``, ``"iou"``, ...; ``"none"``: by no score). By default that is the loss, where every epoch
    has a checkpoint anyway.

    `rank_logs`: a log of every rank, ``logs/rank-NNNN.log``. `tensorboard`: event files in ``tensorboard/``.
    """

    directory: FilePath
    log_steps: Count = 1
    checkpoint_epochs: Whole = 1
    checkpoint_steps: Whole = 0
    checkpoint_minutes: Minutes = 0.0
    keep: Count = 3
    best: Text | None = None
    timeline: bool = False
    rank_logs: bool = False
    tensorboard: bool = False
    progress: bool = True


class RunConfig(Table):
    """``[run]``: how a run looks after its ranks.

    A job whose ranks make no progress for `stall_minutes` is reported and ended; 0 for never. It must be longer than
    the longest time that a batch, a layer or a checkpoint takes.
    """

    stall_minutes: Minutes = 15.0


class Config(Table):
    """A whole configuration."""

    model: ModelConfig
    data: DataConfig
    strategy: StrategyConfig = StrategyConfig()
    reduction: ReductionConfig = ReductionConfig()
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    training: TrainingConfig
    backend: BackendConfig = BackendConfig()
    output: OutputConfig
    run: RunConfig = RunConfig()

    @field_validator("strategy", mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        return {"auto": True} if value == "auto" else value


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read and check a TOML file; `overrides` are ``section.key=value`` and win. Local.

    Raises
    ------
    UserError
        In one line: which key, what was expected, what came.
    """
    return check_config(read_toml(path, "configuration"), overrides, f"configuration {shown_path(path)}")


def parse_config(text: str, overrides: Sequence[str] = (), source: str = "configuration") -> Config:
    """Like :func:`load_config`, of the text itself; `source` is named in errors."""
    return check_config(parse_toml(text, source), overrides, source)


def check_config(tables: dict[str, Any], overrides: Sequence[str] = (), source: str = "configuration") -> Config:
    """Like :func:`parse_config`, of tables read already; modifies them."""
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
    if path[0] == "strategy":
        _settle_strategy(tables, path, value)
        if value == "auto":
            return
    if len(path) < 2 and not isinstance(value, Mapping):
        raise UserError(f"--set: expected section.key=value, got {shown(override)}")
    where: Any = tables
    for name in path[:-1]:
        where = where.setdefault(name, {})
        if not isinstance(where, Mapping):
            raise UserError(f"--set {key}: expected a table at {name!r}, got {shown(where)}")
    where[path[-1]] = value


def _settle_strategy(tables: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """``strategy=auto`` replaces the whole table; ``strategy.height=2`` replaces a plan by parts."""
    if path == ["strategy"] and value == "auto":
        tables["strategy"] = {"auto": True}
        return
    table = tables.get("strategy")
    if table == "auto":
        table = tables["strategy"] = {"auto": True}
    by_hand = {"sample", "depth", "height", "width", "halo", "file"}
    if isinstance(table, dict) and table.get("auto") is True and len(path) == 2 and path[1] in by_hand:
        for key in ("auto", "planner", "memory", "machine", "budget"):
            table.pop(key, None)
