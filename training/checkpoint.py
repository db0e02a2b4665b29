"""Checkpoint: all data that a run needs to continue, in one HDF5 file, under any decomposition.

::

    /                    attribute: dtype; strings: network, config, progress
    /params/LAYER/NAME   parameters; float32 if activations have 16 bits
    /state/LAYER/NAME    running statistics
    /optimizer           attribute: settings (kind, step); one group like /params per state array; the group "average"
                         has moving averages of the parameters
    /errors/LAYER/NAME   residuals of the rounding of gradients, if they are kept, to be added to the next gradients

HDF5 is the format for other programs. A run finds its arrays by an index after the HDF5 file
(:mod:`halograd.training.chunk_file`), verifies each byte before its use, and reads each byte once per node. A file
appears under its name only when it is complete and on the disk.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np

from halograd.errors import UserError

from ..comm import Communicator
from ..comm.errors import mark_agreed
from ..data.disk import atomic_path
from ..device import device_of
from ..layers import Network
from ..layers.settings import difference, fingerprint
from .chunk_file import HEADER, ChunkWriter, DamagedFile, OtherFile, VerifiedFile
from .directory import checkpoint_of
from .optimizers import AVERAGE, Optimizer
from .store import ParameterStore

__all__ = [
    "CheckpointReader",
    "DamagedCheckpoint",
    "OtherCheckpoint",
    "Snapshot",
    "TrainingProgress",
    "UnusableCheckpoint",
    "read_checkpoint",
    "read_header",
    "write_checkpoint",
]

#: Size of the parts of a broadcast [B]: MPI libraries count in 32 bits.
PART = 1 << 30


class UnusableCheckpoint(UserError):
    """Error: no run can continue from an existing file."""


class DamagedCheckpoint(UnusableCheckpoint):
    """Error: a checkpoint cannot be read, or its bytes differ from those that were written."""


class OtherCheckpoint(UnusableCheckpoint):
    """Error: a file has another format or kind, and may be undamaged."""


@dataclass
class TrainingProgress:
    """Progress of a run.

    Attributes
    ----------
    step
        Number of updates. With `seed`, `sampler` and `schedule`, it determines learning rate and random numbers.
    seed
        Seed of the run.
    sampler
        Position in the data, from :meth:`Sampler.state_dict`.
    normalization
        Statistics by input or target, from :meth:`ChannelStatistics.state_dict`; None if they were never computed.
    unvalidated
        Whether the run stopped after a step that ends an epoch, or that a validation follows, but before the validation
        and the callbacks that follow this step.
    reduction
        Tried schemes of gradient reduction, from :meth:`AutoReduction.state_dict`; None without such a search.
    loss_scale
        State of the loss scale, from :meth:`LossScale.state_dict`; None without float16.
    drawn
        String that identifies the training samples (`Samples.drawn`); None in checkpoints of earlier versions.
    source
        Function of the user that builds the network, and a checksum of its file; else None.
    best
        The best validation so far, from :meth:`BestScore.state_dict`; None if it is not known.
    class_counts
        Count of each class, by target, if these counts balance a loss; None if classes were never counted.
    described
        Attributes of the targets in their files (units, ...), by target.
    schedule
        State of the schedule, from :meth:`Schedule.state_dict`; empty if the rate depends on the step alone.
    """

    step: int = 0
    seed: int = 0
    sampler: dict[str, Any] = field(default_factory=dict)
    normalization: dict[str, Any] | None = None
    unvalidated: bool = False
    reduction: dict[str, Any] | None = None
    loss_scale: dict[str, float] | None = None
    drawn: str | None = None
    source: str | None = None
    best: dict[str, Any] | None = None
    class_counts: dict[str, list[int]] | None = None
    described: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """Whole parameters and their state on the host, for a checkpoint. Arrays that are already whole and on the host are
    views, not copies.

    Attributes
    ----------
    network, dtype
        Fingerprint of the network, and dtype of the parameters.
    params, state, optimizer
        Arrays by ``layer/parameter``; for the optimizer, such arrays by the name of the state.
    settings
        Scalars of the optimizer; None without one.
    errors
        Residuals of the rounding of gradients, by ``layer/parameter``; empty if none are kept.
    """

    network: list[str]
    dtype: str
    params: Mapping[str, Any]
    state: Mapping[str, Any]
    optimizer: Mapping[str, Mapping[str, Any]]
    settings: Mapping[str, Any] | None
    errors: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, store: ParameterStore, optimizer: Optimizer | None = None, comm: Communicator | None = None
    ) -> Snapshot | None:
        """Return the current state on rank 0, None elsewhere. Collective over `comm` if parameters or states of the
        optimizer are not whole on every rank.
        """
        states = optimizer.named_state(comm) if optimizer is not None else {}
        parts: list[Any] = [store.params, store.state, store.errors, *states.values()]
        if comm is not None:
            parts = [store.gather(comm, arrays) for arrays in parts]
            if comm.rank:
                return None
        elif not store.whole:
            raise ValueError("Snapshot.of(): expected the communicator of the ranks that share the parameters")
        on_host = [{name: device_of(array).to_host(array) for name, array in arrays.items()} for arrays in parts]
        params, state, errors, *rest = on_host
        settings = None if optimizer is None else optimizer.state_dict()
        named = dict(zip(states, rest))
        return cls(store.fingerprint, store.dtype.name, params, state, named, settings, errors)

    @property
    def groups(self) -> dict[str, Mapping[str, Any]]:
        """Groups of the file by name; each holds arrays by ``layer/parameter``."""
        errors = {"errors": self.errors} if self.errors else {}
        states = {f"optimizer/{key}": arrays for key, arrays in self.optimizer.items()}
        return {"params": self.params, "state": self.state, **errors, **states}


def write_checkpoint(
    path: str | Path, snapshot: Snapshot, progress: TrainingProgress | None = None, config: str = ""
) -> None:
    """Write a checkpoint atomically; an older file at `path` stays until the new one is complete. Local.

    Raises
    ------
    DataError
        If the file cannot be written (disk full, no folder, no permission). No partial file is left.
    """
    # A disk without this space is reported before anything is written.
    needed = sum(array.nbytes for arrays in snapshot.groups.values() for array in arrays.values())
    progress = progress or TrainingProgress()
    with atomic_path(path, needed=needed) as partial, ChunkWriter(partial) as raw:
        # HDF5 leaves the first bytes of the file free: the header of the `ChunkWriter` lies there.
        with h5py.File(raw, "w", userblock_size=HEADER) as file:
            file.attrs["dtype"] = snapshot.dtype
            file.create_dataset("network", data=json.dumps(snapshot.network))
            file.create_dataset("config", data=config)
            file.create_dataset("progress", data=json.dumps(asdict(progress)))
            if snapshot.settings is not None:
                file.create_group("optimizer").attrs["settings"] = json.dumps(dict(snapshot.settings))
            locations: dict[str, tuple[int, tuple[int, ...], str]] = {}
            for name, arrays in snapshot.groups.items():
                locations |= _write_arrays(file, name, arrays)
        index = {
            "network": snapshot.network,
            "dtype": snapshot.dtype,
            "config": config,
            "progress": asdict(progress),
            "settings": snapshot.settings,
            "states": sorted(snapshot.optimizer),
            "arrays": locations,
        }
        # After HDF5 has closed its file: until then it writes metadata.
        raw.finish(json.dumps(index).encode())


def _write_arrays(file: h5py.File, name: str, arrays: Mapping[str, Any]) -> dict[str, tuple[int, tuple[int, ...], str]]:
    """Write a group of arrays; return offset in the file [B], shape and dtype by path."""
    group, locations = file.create_group(name), {}
    for key, array in arrays.items():
        # Without chunks and filters an array is one range of bytes, so readers find it without HDF5.
        dataset = group.create_dataset(key, data=array)
        # HDF5 allocates nothing for an array without elements.
        offset = dataset.id.get_offset() if dataset.size else HEADER
        locations[f"{name}/{key}"] = offset, dataset.shape, dataset.dtype.str
    return locations


def read_header(path: str | Path) -> tuple[TrainingProgress, str]:
    """Read the progress and the configuration text of a checkpoint, without other chunks of the file. Local."""
    with CheckpointReader(path) as reader:
        return reader.progress, reader.config


def read_checkpoint(
    path: str | Path, store: ParameterStore, optimizer: Optimizer | None = None, comm: Communicator | None = None
) -> TrainingProgress:
    """Fill this rank's parameters, states and, if given, the optimizer from a checkpoint.

    Collective over `comm`, local without one. Errors are those of :class:`CheckpointReader`.
    """
    with CheckpointReader(path, comm) as reader:
        return reader.restore(store, optimizer)


class CheckpointReader:
    """Reader of an open checkpoint. Its creation and `restore` are collective over `comm`, local without one.

    The first rank of every node reads each byte at most once, and broadcasts arrays to the ranks of its node. It keeps
    the bytes in memory until `close`.

    Parameters
    ----------
    path
        The file, or ``latest.h5`` or ``best.h5``, which contain the name of a file.
    comm
        Ranks that read the checkpoint together.
    whole
        Whether to read and verify the whole file now; otherwise each part is read when it is needed.

    Attributes
    ----------
    identity
        Checksum of the header, and so of all bytes; the same on all ranks.
    progress, config
        Progress of the run, and text of its configuration.

    Raises
    ------
    DamagedCheckpoint
        If a byte differs from the one that was written. All errors are raised on all ranks.
    OtherCheckpoint
        If the file has another format or kind.
    UserError
        If the file does not exist, or cannot be opened.
    """

    def __init__(self, path: str | Path, comm: Communicator | None = None, whole: bool = False) -> None:
        self.path = Path(path)
        self._comm = None if comm is None or comm.size == 1 else comm
        # The first rank of each node reads: a parallel file system serves a node once, not each of its ranks.
        self._reads = self._comm is None or self._comm.nodes.index(self._comm.nodes[self._comm.rank]) == self._comm.rank
        self._raw: VerifiedFile | None = None
        header: tuple[int, dict[str, Any]] = 0, {}
        try:
            with self._reading():
                if self._reads:
                    self._raw = VerifiedFile(checkpoint_of(self.path))
                    header = self._raw.identity, json.loads(self._raw.index())
            # All ranks need the index; only those that read have the bytes.
            header = header if self._comm is None else self._comm.bcast(header)
            self.identity: int = header[0]
            self._index: dict[str, Any] = header[1]
            with self._reading():
                if self._raw is not None and self._raw.identity != self.identity:
                    raise UserError(
                        f"checkpoint {self.path}: expected the same file on all nodes, got another one than rank 0 "
                        "has; wait until no run writes to it, or name a file on a file system that the nodes share"
                    )
                if self._raw is not None and whole:
                    self._raw.load()
                self.progress = TrainingProgress(**self._index["progress"])
                self.config: str = self._index["config"]
        except BaseException:
            self.close()
            raise

    @property
    def bytes_read(self) -> int:
        """Bytes that this rank has read from the file system so far [B]. Local."""
        return 0 if self._raw is None else self._raw.bytes_read

    def restore(
        self, store: ParameterStore, optimizer: Optimizer | None = None, extents: bool = True, averaged: bool = False
    ) -> TrainingProgress:
        """Fill this rank's parameters, states and, if given, the optimizer; return the progress.

        Without `extents`, the network may be for larger or smaller samples. With `averaged`, parameters become their
        moving averages if the checkpoint has them. Arrays change only after all arrays were read and fit.

        Raises
        ------
        UserError
            If the checkpoint is of another network, optimizer or dtype.
        """
        arrays, settings = self._index["arrays"], self._index["settings"]
        with self._reading():
            self._check_network(store.fingerprint, extents)
            if self._index["dtype"] != store.dtype.name:
                raise UserError(
                    f"checkpoint {self.path}: expected {store.dtype.name} parameters, got {self._index['dtype']}; "
                    f'set training.dtype = "{self._index["dtype"]}"'
                )
            if optimizer is not None:
                self._check_optimizer(optimizer)
            parts = {self._source(path, averaged): part for path, part in _needed_arrays(store, optimizer).items()}
            rounded = any(path.startswith("errors/") for path in arrays)
            optional = [] if rounded else ["errors/"]
            optional.append("optimizer/")  # the optimizer has no state of a layer that was frozen
            # Sorted, because all ranks of a node broadcast the arrays in this order.
            paths = sorted(path for path in parts if path in arrays or not path.startswith(tuple(optional)))
            shapes = {path: store.shapes[parts[path].name] for path in paths}
            read = {path: self._array(path, shapes[path], store.dtype) for path in paths} if self._reads else {}
        # Nothing has changed so far: after a fault above, the store can still be used. `strict` runs the generator to
        # its end, where it closes the communicator of the node.
        for path, whole in zip(paths, self._pass_on(shapes, read, store.dtype), strict=True):
            parts[path].fill(whole, store)
        # This run may round gradients, train a layer or average parameters although the run of the checkpoint did not.
        for path in parts.keys() - set(paths):
            parts[path].begin(store)
        store.refresh()
        if store.loss_scale is not None and self.progress.loss_scale is not None:
            store.loss_scale.load_state_dict(self.progress.loss_scale)
        if optimizer is not None:
            optimizer.step = int(settings["step"])
        return self.progress

    def arrays(self, network: Network, averaged: bool = False) -> dict[str, np.ndarray]:
        """Return whole parameters and states of a network, by name. Local, for a reader without `comm`.

        With `averaged`, parameters are their moving averages if the checkpoint has them. The network may be for larger
        or smaller samples. The arrays are views that are valid until the reader is closed.
        """
        assert self._raw is not None
        specs = {"params": network.parameters(), "state": network.state()}
        with self._reading():
            self._check_network(fingerprint(network), extents=False)
            dtype = np.dtype(self._index["dtype"])
            self._raw.load()
            return {
                name: self._array(self._source(f"{group}/{name}", averaged), spec.shape, dtype)
                for group, named in specs.items()
                for name, spec in named.items()
            }

    def _source(self, path: str, averaged: bool) -> str:
        """Return the path of the array with the values for `path`: with `averaged`, that of its moving average, if
        there is one.
        """
        average = f"optimizer/{AVERAGE}/{path.removeprefix('params/')}"
        return average if averaged and path.startswith("params/") and average in self._index["arrays"] else path

    def _check_network(self, here: list[str], extents: bool) -> None:
        differing = difference(self._index["network"], here, extents)
        if differing is not None:
            raise UserError(
                f"checkpoint {self.path} is of another network: expected {differing[0]!r}, got {differing[1]!r}; "
                "restore the network, or train the new one in another output.directory"
            )

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        settings, states = self._index["settings"], self._index["states"]
        if settings is None:
            raise UserError(f"checkpoint {self.path}: expected the state of an optimizer, got parameters only")
        # A resumed run may begin or end to average parameters: `restore` sets the averages if the file has none.
        names = sorted({*optimizer.state_names} - {AVERAGE})
        there, here = (settings["kind"], sorted({*states} - {AVERAGE})), (type(optimizer).__name__, names)
        if there != here:
            raise UserError(
                f"checkpoint {self.path}: expected the optimizer {here[0]} with {here[1]}, got {there[0]} with "
                f"{there[1]}; resume with the optimizer of the run"
            )

    def _array(self, path: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return the whole array at `path`, a view of the verified bytes; KeyError if shape or dtype differ."""
        assert self._raw is not None
        offset, stored_shape, kind = self._index["arrays"][path]
        if tuple(stored_shape) != shape or np.dtype(kind) != dtype:
            # `_explained` makes a UserError of it.
            raise KeyError(f"{path} of shape {stored_shape} and type {kind}")
        return self._raw.view(offset, math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    def _pass_on(
        self, shapes: Mapping[str, tuple[int, ...]], arrays: Mapping[str, np.ndarray], dtype: np.dtype
    ) -> Iterator[np.ndarray]:
        """Yield each array on all ranks of a node, valid until the next one. Collective; iterate to the end."""
        if self._comm is None:
            yield from arrays.values()
            return
        node = self._comm.split(self._comm.nodes[self._comm.rank])
        assert node is not None
        with closing(node):
            # The reader broadcasts views of the file; the other ranks receive each array in the same memory.
            scratch = np.empty(0 if self._reads else max(map(math.prod, shapes.values()), default=0), dtype)
            for path, shape in shapes.items():
                flat = arrays[path].reshape(-1) if self._reads else scratch[: math.prod(shape)]
                # Rank 0 of the node's communicator is the reader: the first rank of the node.
                for start in range(0, flat.nbytes, PART):
                    node.mpi.Bcast(flat.view(np.uint8)[start : start + PART])
                yield flat.reshape(shape)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise faults of the ``with`` block as user errors on all ranks; it must not communicate. Collective."""
        with nullcontext() if self._comm is None else self._comm.agreement():
            try:
                yield
            except Exception as raised:
                error = self._explained(raised)
                # A fault of rank 0 is that of the file, not of one rank: its message names no rank.
                if self._comm is None or self._comm.rank == 0:
                    mark_agreed(error, True, 0, needs_no_rank=True)
                if error is raised:
                    raise
                raise error from raised

    def _explained(self, error: Exception) -> Exception:
        at = f"checkpoint {self.path}"
        if isinstance(error, UserError):
            return error
        if isinstance(error, DamagedFile):
            return DamagedCheckpoint(f"{at}: it is truncated or damaged ({error}){self._remedy()}")
        if isinstance(error, OtherFile):
            return OtherCheckpoint(f"{at}: expected a checkpoint of format 2, got {error}")
        if isinstance(error, FileNotFoundError):
            return UserError(f"{at}: expected a file, there is none{self._remedy()}")
        if isinstance(error, OSError | KeyError | ValueError | TypeError | RecursionError | MemoryError):
            # A KeyError has its text in quotes.
            reason = getattr(error, "strerror", None) or str(error).strip("'\"") or type(error).__name__
            return UserError(f"{at}: expected one that can be read, got {reason}")
        return error

    def _remedy(self) -> str:
        others = sorted(p.name for p in self.path.parent.glob("step-*.h5") if p.name != checkpoint_of(self.path).name)
        return f"; use another one: {others[-1]}" if others else ""

    def close(self) -> None:
        """Close the file and free the memory. Idempotent. Local."""
        if self._raw is not None:
            self._raw.close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class _NeededArray:
    """Part of an array of the file that this rank needs.

    Attributes
    ----------
    name
        Name of the parameter or state whose shape the array has.
    target
        Array to fill: this rank's block, or `part` of the flattened block.
    taken
        Whether this rank uses the values; otherwise another rank does, and this rank starts with zeros.
    average
        Whether the array is an average of parameters; its initial values are the parameters.
    """

    name: str
    target: Any
    part: slice | None = None
    taken: bool = True
    average: bool = False

    def begin(self, store: ParameterStore) -> None:
        """Set the initial values of an array that the file does not have. Local."""
        if self.average:
            np.copyto(self.target, store.params[self.name].reshape(-1)[self.part])
        else:
            self.target.fill(0)

    def fill(self, whole: np.ndarray, store: ParameterStore) -> None:
        """Copy this rank's part of the array. Local."""
        block = whole[store.box(self.name).slices()]
        values = block if self.part is None else block.reshape(-1)[self.part]
        device_of(self.target).assign(self.target, values if self.taken else np.zeros_like(values))


def _needed_arrays(store: ParameterStore, optimizer: Optimizer | None) -> dict[str, _NeededArray]:
    """List the arrays that this rank needs by path in the file; the paths are the same on all ranks."""
    assert store.blocks is not None
    parts = {f"params/{name}": _NeededArray(name, array) for name, array in store.params.items()}
    parts |= {f"state/{name}": _NeededArray(name, array) for name, array in store.state.items()}
    for name, array in store.errors.items():
        first = store.blocks[name].holders.leads(store.rank)  # one rank only, so that the residual is added once
        parts[f"errors/{name}"] = _NeededArray(name, array, taken=first)
    for key, kept in ({} if optimizer is None else optimizer.kept_state()).items():
        parts |= {
            f"optimizer/{key}/{name}": _NeededArray(name, array, part, average=key == AVERAGE)
            for name, (part, array) in kept.items()
        }
    return parts
