"""Training from scripts and notebooks: a function from network and data to a run, as by the command line."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from .auto import plan_run, rank_schemes_of
from .comm import boot
from .comm.errors import agree
from .data import ArrayDataset, ChannelStatistics, Dataset
from .errors import UserError
from .layers import Network
from .models.own import give
from .registry import Registry
from .schema import nearest
from .signatures import check_methods
from .training.build import make_network
from .training.checkpoint import read_header
from .training.config import Config, DataConfig, TrainingConfig, check_config
from .training.directory import checkpoint_of
from .training.log import read_log
from .training.metrics import METRICS
from .training.monitors import Callback
from .training.optimizers import OPTIMIZERS, OptimizerSettings
from .training.root import on_root
from .training.run import train
from .training.schedules import SCHEDULES, schedule_of
from .training.trained import apply, evaluate, find_trained

__all__ = ["TrainedRun", "fit"]

Data = str | Path | Sequence[str | Path] | Mapping[str, Any] | Dataset
_ADAM = {"kind": "adam"}
_OTHER_DATA = "apply(): data: expected the array of rank 0, got something else; send it to all ranks, or write a file"
_EXPECTED = {
    "fit()": "files, a table [data] or a data set, got {}; make a data set of arrays: "
    'halograd.data.ArrayDataset({{"x": x, "target": t}})',
    "apply()": "files, an array of samples, arrays by the names of inputs or a data set, got {}",
}

Result = TypeVar("Result")


def fit(
    network: Network | str,
    data: Data,
    out: str | Path,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    comm: Any = None,
    **options: Any,
) -> TrainedRun:
    """Train a network. Collective over all ranks of the job: the same script runs on one process and under ``mpirun``.

    ::

        run = hg.fit(network, "runs/*.h5", "runs/first", epochs=20, batch=4,
                     optimizer={"kind": "adamw", "weight_decay": 1e-4},
                     schedule={"kind": "cosine", "learning_rate": 1e-3},
                     strategy={"height": 2}, output={"best": "iou"})
        run.history["iou"], run.best, run.apply("new/*.h5", "predicted.h5", what="classes")

    Parameters
    ----------
    network
        A network with an output ``"loss"``, or a value of ``[model]``: the name of a model, ``"net.py:build"``.
    data
        Files, patterns or folders; the table ``[data]``; or a data set, such as
        ``halograd.data.ArrayDataset({"x": x, "target": t})``.
    out
        Directory of the run.
    resume
        Continue from the newest checkpoint in `out`.
    callbacks
        Callbacks, whose methods are called after every step, epoch and checkpoint, and with predictions.
    comm
        An MPI communicator, or a :class:`~halograd.comm.Communicator`; by default all ranks of the job.
    options
        Keys of the tables ``[training]`` (``epochs`` and ``batch`` are required; ``seed``, ``patience``, ...) and
        ``[data]`` (``validation``, ``augment``, ...); and whole tables of a configuration: ``model`` (options),
        ``optimizer``, ``schedule``, ``strategy``, ``output``, ``backend``, ``reduction``, ``run``. The default is Adam
        with a constant learning rate of 0.001. Three of them may be objects:

        - ``schedule``: a :class:`halograd.training.Schedule`, or a function from the number of the update (0, 1, ...)
          to its learning rate;
        - ``optimizer``: a class, or its settings (``AdamW.Settings(...)``); ``kind`` of a table may be a class too;
        - ``metrics``: a list of metrics of the first prediction, in addition to those of the loss: names as in
          ``output.metrics``, objects or classes.

        Objects that a script makes are known only there: to evaluate such a run by the command line, name other ones by
        ``--set``.

    Returns
    -------
    TrainedRun
        The finished run, on all ranks.

    Raises
    ------
    UserError, DataError
        If the user can correct the fault; the message is one line.
    """
    world = boot() if comm is None else getattr(comm, "mpi", comm)
    config = check_config(_tables(network, data, out, options), source="fit()")
    _check_callbacks(callbacks)
    result = train(config, (), resume, world, plan_run, rank_schemes_of, callbacks)
    # Only a network of the script must be registered again before each use (`given`).
    return TrainedRun(Path(config.output.directory), network if isinstance(network, Network) else None, world, result)


def _schedule(schedule: Any) -> Any:
    """Return the table ``[schedule]`` for an object, a function or a table."""
    if isinstance(schedule, Mapping):
        return _with_kind(schedule, SCHEDULES)
    if not callable(schedule) or isinstance(schedule, type):
        raise UserError(
            "fit(): schedule: expected a table, a halograd.training.Schedule, or a function of the step, got "
            f"{schedule!r}"
        )
    return {"kind": SCHEDULES.give(schedule_of(schedule))}


def _optimizer(optimizer: Any) -> Any:
    """Return the table ``[optimizer]`` for a class, settings or a table."""
    if isinstance(optimizer, OptimizerSettings):
        return optimizer.model_dump(exclude_unset=True)
    return _with_kind(optimizer if isinstance(optimizer, Mapping) else {"kind": optimizer}, OPTIMIZERS)


def _with_kind(table: Mapping[str, Any], registry: Registry[Any]) -> dict[str, Any]:
    """Return `table`, in which a class as `kind` is replaced by its registered name."""
    kind = table.get("kind", "")
    if isinstance(kind, str):
        return dict(table)
    named = getattr(kind, "name", "")
    return {**table, "kind": named if named in registry.names and registry[named] is kind else registry.give(kind)}


def _check_callbacks(callbacks: Any) -> None:
    """Check the callbacks before the run begins. Raises UserError."""
    several = isinstance(callbacks, Sequence)
    # Raises for the first object that is no callback, or for a single callback without a list.
    for callback in (
        [callback for callback in callbacks if not isinstance(callback, Callback)] if several else [callbacks]
    ):
        described = (
            f"the class {callback.__name__}"
            if isinstance(callback, type)
            else f"an object of {type(callback).__name__}"
        )
        raise UserError(
            f"fit(): callbacks: expected a list of objects of halograd.Callback, got {described}{' in it' * several}"
        )
    for callback in callbacks:
        check_methods(callback)


def _tables(network: Network | str, data: Data, out: str | Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a configuration."""
    training, own_keys = (
        {key: value for key, value in settings.items() if key in table.model_fields}
        for table in (TrainingConfig, DataConfig)
    )
    others = {key: value for key, value in settings.items() if key not in {**training, **own_keys}}
    known = [*TrainingConfig.model_fields, *DataConfig.model_fields, *Config.model_fields, "metrics"]
    for key in others:
        if key not in known:
            raise UserError(f"fit(): {key}: unknown key; expected one of {', '.join(known)}{nearest(key, known)}")
    # `metrics` is no table of a configuration: the list is added to output.metrics below.
    listed = others.pop("metrics", [])
    if not isinstance(listed, list | tuple):
        raise UserError(f"fit(): metrics: expected a list of names, objects or classes, got {listed!r}")
    metrics = [setting if isinstance(setting, str) else METRICS.give(setting) for setting in listed]
    for key, make in (("schedule", _schedule), ("optimizer", _optimizer)):
        if key in others:
            others[key] = make(others[key])
    tables: dict[str, Any] = {
        key: dict(setting) if isinstance(setting, Mapping) else setting for key, setting in others.items()
    }
    # A configuration holds only text, so the network is registered in this process, and named by its location.
    source = give(network, network.name) if isinstance(network, Network) else network
    # A colon marks a location, in a file or in this script; other texts are names of models.
    tables["model"] = {**tables.get("model", {}), "file" if ":" in source else "name": source}
    tables["data"] = {**own_keys, **_data(data, "fit()")}
    tables["training"] = {**training, **tables.get("training", {})}
    tables["output"] = {**tables.get("output", {}), "directory": str(out)}
    if metrics:
        tables["output"]["metrics"] = [*tables["output"].get("metrics", []), *metrics]
    # A table of the caller replaces a default table as a whole.
    return {"optimizer": dict(_ADAM), "schedule": {"kind": "constant", "learning_rate": 1e-3}, **tables}


def _data(data: Any, call: str) -> dict[str, Any]:
    """Return the table ``[data]`` for data; errors name the function `call`."""
    if isinstance(data, Mapping) and not any(map(_is_array, data.values())):
        return dict(data)
    if isinstance(data, str | Path):
        return {"path": str(data)}
    if isinstance(data, Sequence) and all(isinstance(path, str | Path) for path in data):
        return {"path": [str(path) for path in data]}
    # By its attributes: a data set of the user need not derive from a class of the library.
    if all(hasattr(data, name) for name in ("path", "fields", "read")):
        return {"path": str(data.path), "file": give(data, "data")}
    raise UserError(f"{call}: data: expected {_EXPECTED[call]}".format(_kind(data)))


def _is_array(data: object) -> bool:
    """Return whether an object is an array of any library and not a data set."""
    return hasattr(data, "__array__") and not hasattr(data, "fields")


def _kind(data: object) -> str:
    shape = getattr(data, "shape", None)
    return type(data).__name__ + (f" of shape {tuple(shape)}" if isinstance(shape, Sequence) else "")


def _dataset_of(arrays: Any, network: Network) -> ArrayDataset:
    """Return a data set of one or several samples, from an array or from arrays by the name of the input.

    Raises UserError if they do not match the network's inputs. Local.
    """
    inputs = {name: node for name, node in network.inputs.items() if name not in network.targets}
    several = ", ".join(f"{name!r}: ..." for name in inputs)
    if not isinstance(arrays, Mapping):
        if len(inputs) > 1:
            raise UserError(f"apply(): data: expected arrays {{{several}}}, got one, {_kind(arrays)}")
        arrays = dict.fromkeys(inputs, arrays)
    if arrays.keys() != inputs.keys():
        raise UserError(f"apply(): data: expected arrays {{{several}}}, got {', '.join(map(repr, arrays)) or 'none'}")
    return ArrayDataset(
        {name: _samples_of(name, arrays[name], node.shape) for name, node in inputs.items()}, (), path="array"
    )


def _samples_of(name: str, samples: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array ``(N, *spatial, C)``, or ``(N,)``, for an input with this sample shape."""
    # `asarray` would drop the mask, and the network would read the numbers under it.
    if np.ma.is_masked(samples):
        raise UserError(
            f"apply(): data: {name!r}: expected an array without masked elements, got some; fill them first"
        )
    array = np.asarray(samples)
    # Booleans, integers and floating-point numbers; neither complex numbers nor strings or objects.
    if array.dtype.kind not in "biuf":
        raise UserError(f"apply(): data: {name!r}: expected an array of real numbers, got one of {array.dtype}")
    # One sample. An array of one axis for inputs of shape (1,) has a number for each of N samples.
    if array.ndim == len(shape) and shape != (1,):
        array = array[None]
    fits = array.ndim == len(shape) + 1 and array.shape[-1] == shape[-1]
    if not (fits or (shape == (1,) and array.ndim == 1)) or not array.size:
        grid = ", ".join(map(str, shape))
        raise UserError(
            f"apply(): data: {name!r}: expected samples of shape (N, {grid}), or one of ({grid}), channels last (the "
            f"network may take other extents), got {np.shape(samples)}"
        )
    return array


def _checksum(dataset: ArrayDataset) -> int:
    """Return the CRC-32 of names, shapes, types and bytes of all arrays."""
    checksum = 0
    for name, array in dataset.arrays.items():
        checksum = zlib.crc32(f"{name} {array.shape} {array.dtype}".encode(), checksum)
        # crc32 reads contiguous memory only.
        checksum = zlib.crc32(np.ascontiguousarray(array).data, checksum)
    return checksum


class TrainedRun:
    """Finished training run: its scores, and methods that use its network. Attributes are the same on all ranks.

    Attributes
    ----------
    directory
        Directory of log and checkpoints.
    result
        Result of :func:`halograd.training.train`.
    history
        Scores of every validation by name, and its ``epoch`` and ``step``.
    losses
        Loss of every logged step, by the number of the step.
    """

    def __init__(self, directory: Path, network: Network | None, comm: Any, result: Mapping[str, Any]) -> None:
        self.directory, self.result = directory, dict(result)
        self._network, self._comm = network, comm
        validations, steps = on_root(
            comm, lambda: [read_log(directory / "log.jsonl", e) for e in ("validation", "step")]
        )
        # Those of the last validation: earlier jobs of a resumed run may have had other metrics.
        names = [key for key in (validations[-1] if validations else {}) if key not in ("event", "time")]
        self.history = {name: [entry.get(name) for entry in validations] for name in names}
        self.losses = {entry["step"]: entry["loss"] for entry in steps}

    @property
    def best(self) -> dict[str, Any]:
        """Name and value of the score of the best validation, and its step. Local."""
        return dict(self.result["best"])

    def checkpoint(self, which: str = "latest") -> Path:
        """Return the file of the newest checkpoint (``"latest"``), or of the best one (``"best"``). Local.

        Raises
        ------
        ValueError
            If `which` is unknown, or there is no such checkpoint.
        """
        path = self.directory / "checkpoints" / f"{which}.h5"
        if which not in ("latest", "best") or not path.exists():
            raise ValueError(f"checkpoint: expected an existing 'latest' or 'best', got {which!r} in {path.parent}")
        return checkpoint_of(path)

    def evaluate(self, samples: str = "validation", which: str = "latest", **options: Any) -> dict[str, Any]:
        """Compute loss and metrics; return them by name. Collective; see :func:`halograd.training.evaluate`."""
        return evaluate(self.given(which), samples=samples, comm=self._comm, **options)

    def apply(
        self,
        data: str | Path | Sequence[str | Path] | Dataset | ArrayLike | Mapping[str, ArrayLike],
        out: str | Path,
        what: str = "logits",
        which: str = "latest",
        overrides: Sequence[str] = (),
        format: str = "hdf5",
        **options: Any,
    ) -> dict[str, Any]:
        """Write predictions of data without labels to `out`. Collective; see :func:`halograd.training.apply`.

        Parameters
        ----------
        data
            Files, patterns or folders; a data set; or samples in an array ``(N, *spatial, C)``, or one sample
            ``(*spatial, C)``, the same on all ranks. They are normalized as in training. For a network with several
            inputs: a mapping of arrays by the name of the input.
        out, what, overrides, format, options
            As in :func:`halograd.training.apply`; `flips`, `window`, `overlap`, `rollout`.
        which
            Checkpoint: ``"latest"`` or ``"best"``.

        Raises
        ------
        UserError, DataError
            An error that the user can fix, such as arrays of other shapes or arrays that differ between ranks; on all
            ranks.
        """
        checkpoint = self.given(which)
        table = self._agreed_table(data, checkpoint, overrides)
        paths = [table["path"]] if isinstance(table["path"], str) else table["path"]
        # The run's configuration may have a data set of its own, which that of this script replaces.
        sets = [*overrides, *([f'data.file="{table["file"]}"'] if "file" in table else [])]
        return apply(checkpoint, paths, out, sets, what, self._comm, format=format, **options)

    def _agreed_table(self, data: Any, checkpoint: Path, overrides: Sequence[str]) -> dict[str, Any]:
        """Return the table ``[data]`` for `apply`; arrays must be the same on all ranks. Collective."""
        arrays = _is_array(data) or (isinstance(data, Mapping) and any(map(_is_array, data.values())))
        # First whether all ranks have arrays or all have files, because the collective calls below differ.
        table = self._agreed(lambda: {} if arrays else _data(data, "apply()"), lambda _: int(arrays))
        if not arrays:
            return table
        config = on_root(self._comm, lambda: find_trained(checkpoint, overrides)[0])
        return _data(self._agreed(lambda: _dataset_of(data, make_network(config)), _checksum), "apply()")

    def _agreed(self, make: Callable[[], Result], mark_of: Callable[[Result], int]) -> Result:
        """Return the result of `make`. Collective.

        All ranks raise an error if it fails on a rank, or if `mark_of` the result differs from that of rank 0.
        """
        fault: Exception | None = None
        try:
            result = make()
            mark = mark_of(result)
        except Exception as error:
            # Not raised yet: the other ranks wait in the agreement below.
            fault, mark = error, 0
        # The first agreement shares faults and checksums; the second raises the error of a rank that differs
        # from rank 0 on all ranks, because the others see no difference.
        marks = agree(self._comm, range(self._comm.size), fault, mark)
        agree(self._comm, range(self._comm.size), None if mark == marks[0] else UserError(_OTHER_DATA))
        return result

    def export(self, out: str | Path, to: str = "onnx", which: str = "latest", normalize: bool = False) -> None:
        """Write the network for other programs, on rank 0. Collective; see :func:`halograd.exporting.export_run`."""
        from .exporting import export_run  # it imports the libraries of ONNX

        checkpoint = self.given(which)
        on_root(self._comm, lambda: export_run(checkpoint, to, Path(out), (), normalize))

    def normalization(self, which: str = "latest") -> dict[str, ChannelStatistics]:
        """Return the statistics that normalize channels, means and divisors, by input and normalized target. Local."""
        known = read_header(self.given(which).resolve())[0].normalization or {}
        return {name: ChannelStatistics.from_state_dict(state) for name, state in known.items()}

    def given(self, which: str = "latest") -> Path:
        """Return the file of a checkpoint; register the network of the script, if any, again by its name. Local."""
        if self._network is not None:
            give(self._network, self._network.name)  # another run of this name may have been trained meanwhile
        return self.checkpoint(which)
