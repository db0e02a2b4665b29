"""Checkpoint: all data that a run needs to continue, in one HDF5 file, under any decomposition.

::

    /                    attribute: dtype; texts: network, config, progress
    /params/LAYER/NAME   parameters; float32 if activations have 16 bits
    /state/LAYER/NAME    running statistics
    /optimizer           attribute: settings (kind, step); one group like /params per state array; the group "average"
                         has moving averages of the parameters
    /errors/LAYER/NAME   residuals of the rounding of gradients, if they are rounded; they are added to the next ones

HDF5 is for other programs. A run finds its arrays by an index after the HDF5 file
(:mod:`halograd.training.chunk_file`), verifies each byte before its use, and reads each byte once per node. A file
appears under its name only when it is complete and on the disk.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import h5py
import numpy as np

from halograd.errors import UserError

from ..comm import Communicator
from ..data.disk import atomic_path
from ..device import device_of
from ..layers import Network
from ..layers.settings import difference, fingerprint
from .chunk_file import HEADER, ChunkWriter, DamagedFile, NodeReaders, OtherFile, VerifiedFile
from .directory import checkpoint_of
from .optimizers import AVERAGE, Optimizer
from .snapshot import Snapshot, TrainingProgress
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

Result = TypeVar("Result")


class UnusableCheckpoint(UserError):
    """An existing file from which no run can continue.

    Attributes
    ----------
    reason
        The message without the remedy.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.reason = text.partition(";")[0]


class DamagedCheckpoint(UnusableCheckpoint):
    """A checkpoint whose bytes differ from those that were written, or that cannot be read."""


class OtherCheckpoint(UnusableCheckpoint):
    """A file of another format or kind, which may be undamaged."""


def write_checkpoint(
    path: str | Path, snapshot: Snapshot, progress: TrainingProgress | None = None, config: str = ""
) -> None:
    """Write a checkpoint atomically; an older file at `path` stays until the new one is complete. Local.

    Raises
    ------
    DataError
        If the file cannot be written (disk full, no folder, no permission). No partial file is left.
    """
    needed = snapshot.nbytes
    progress = progress or TrainingProgress()
    with atomic_path(path, needed=needed) as partial, ChunkWriter(partial) as raw:
        with h5py.File(raw, "w", userblock_size=HEADER) as file:
            file.attrs["dtype"] = snapshot.dtype
            file.create_dataset("network", data=json.dumps(snapshot.network))
            file.create_dataset("config", data=config)
            file.create_dataset("progress", data=json.dumps(asdict(progress)))
            if snapshot.settings is not None:
                file.create_group("optimizer").attrs["settings"] = json.dumps(dict(snapshot.settings))
            places = _write_arrays(file, "params", snapshot.params) | _write_arrays(file, "state", snapshot.state)
            if snapshot.errors:
                places |= _write_arrays(file, "errors", snapshot.errors)
            for key, arrays in snapshot.optimizer.items():
                places |= _write_arrays(file, f"optimizer/{key}", arrays)
        index = {
            "network": snapshot.network,
            "dtype": snapshot.dtype,
            "config": config,
            "progress": asdict(progress),
            "settings": snapshot.settings,
            "states": sorted(snapshot.optimizer),
            "arrays": places,
        }
        raw.finish(json.dumps(index).encode())


def _write_arrays(file: h5py.File, name: str, arrays: Mapping[str, Any]) -> dict[str, tuple[int, tuple[int, ...], str]]:
    """Write a group of arrays; return offset in the file [B], shape and dtype by path."""
    group, places = file.create_group(name), {}
    for key, array in arrays.items():
        dataset = group.create_dataset(key, data=array)
        offset = dataset.id.get_offset() if dataset.size else HEADER
        places[f"{name}/{key}"] = offset, dataset.shape, dataset.dtype.str
    return places


def read_header(path: str | Path) -> tuple[TrainingProgress, str]:
    """Read progress and configuration text of a checkpoint, and only the chunks that hold them. Local."""
    with CheckpointReader(path) as reader:
        return reader.header()


def read_checkpoint(
    path: str | Path, store: ParameterStore, optimizer: Optimizer | None = None, comm: Communicator | None = None
) -> TrainingProgress:
    """Fill this rank's parameters, states and, if given, the optimizer from a checkpoint.

    Collective over `comm`, local without one. Errors are those of :class:`CheckpointReader`.
    """
    with CheckpointReader(path, comm) as reader:
        return reader.restore(store, optimizer)


class CheckpointReader:
    """An open checkpoint for reading. To create and to use it is collective over `comm`, local without one.

    The first rank of every node reads each byte at most once, and broadcasts arrays to the ranks of its node. It keeps
    the bytes in memory until `close`: at most the size of the file.

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

    Raises
    ------
    DamagedCheckpoint
        If a byte differs from the one that was written. All errors are raised on all ranks.
    OtherCheckpoint
        If it is a file of another format or kind.
    UserError
        If there is no file, or it cannot be opened.
    """

    def __init__(self, path: str | Path, comm: Communicator | None = None, whole: bool = False) -> None:
        self.path = Path(path)
        self._readers = NodeReaders(comm)
        self._raw: VerifiedFile | None = None
        self._index: dict[str, Any] = {}
        try:
            identity = self._read(self._open)
            self.identity = self._readers.from_first(identity)
            self._read(lambda: self._begin(self.identity, whole))
        except BaseException:
            self.close()
            raise

    @property
    def bytes_read(self) -> int:
        """Bytes that this rank has read from the file system so far [B]. Local."""
        return 0 if self._raw is None else self._raw.bytes_read

    def header(self) -> tuple[TrainingProgress, str]:
        """Return progress and configuration text, on all ranks."""
        found = self._read(lambda: (self._progress(), self._index["config"]))
        return self._readers.from_first(found)

    def restore(
        self, store: ParameterStore, optimizer: Optimizer | None = None, extents: bool = True, averaged: bool = False
    ) -> TrainingProgress:
        """Fill this rank's parameters, states and, if given, the optimizer.

        Without `extents`, the network may be for larger or smaller samples. With `averaged`, parameters become their
        moving averages if the checkpoint has them. Arrays change only after all arrays were read and fit.

        Raises
        ------
        UserError
            If the checkpoint is of another network, optimizer or dtype.
        """
        wanted = _wanted(store, optimizer)
        if averaged:
            averages = {f"optimizer/{AVERAGE}/{name}": path for path, name in _named(wanted, "params")}
            there = self._readers.from_first(self._read(lambda: sorted(self._index["arrays"].keys() & averages.keys())))
            wanted |= {path: wanted.pop(averages[path]) for path in there}
        found = self._read(lambda: self._fitting(wanted, store, optimizer, extents))
        progress, settings, paths = self._readers.from_first(None if found is None else found[:3])
        shapes = [(path, store.shapes[wanted[path].name]) for path in paths]
        arrays = {} if found is None else found[3]
        for path, whole in zip(paths, self._readers.pass_on(shapes, arrays, store.dtype), strict=True):
            wanted[path].fill(whole, store)
        # This run may round gradients, train a layer or average parameters although the run of the checkpoint did not.
        for path in wanted.keys() - set(paths):
            wanted[path].begin(store)
        store.refresh()
        if store.loss_scale is not None and progress.loss_scale is not None:
            store.loss_scale.load_state_dict(progress.loss_scale)
        if optimizer is not None:
            optimizer.step = int(settings["step"])
        return progress

    def arrays(self, network: Network, averaged: bool = False) -> dict[str, np.ndarray]:
        """Return whole parameters and states of a network, by name. Local, for a reader without ranks.

        With `averaged`, parameters are their moving averages if the checkpoint has them. The network may be for larger
        or smaller samples. The arrays are views that are valid until the reader is closed.
        """
        assert self._raw is not None
        raw = self._raw

        def read() -> dict[str, np.ndarray]:
            _check_network(self.path, self._index["network"], fingerprint(network), extents=False)
            dtype = np.dtype(self._index["dtype"])
            paths = {f"params/{name}": spec for name, spec in network.parameters().items()}
            paths |= {f"state/{name}": spec for name, spec in network.state().items()}
            averages = {path: f"optimizer/{AVERAGE}/{name}" for path, name in _named(paths, "params")}
            there = self._index["arrays"].keys() if averaged else ()
            sources = {path: path if averages.get(path) not in there else averages[path] for path in paths}
            raw.load()
            names = {path: path.partition("/")[2] for path in paths}
            return {names[p]: self._array(sources[p], spec.shape, dtype) for p, spec in paths.items()}

        return self._checked(read)

    # -- on reading ranks -----------------------------------------------------------------------

    def _open(self) -> int:
        self._raw = VerifiedFile(checkpoint_of(self.path))
        return self._raw.identity

    def _begin(self, identity: int, whole: bool) -> None:
        assert self._raw is not None
        if self._raw.identity != identity:
            raise UserError(
                f"checkpoint {self.path}: expected the same file on all nodes, got another one than rank 0 has; wait "
                "until no run writes to it, or name a file on a file system that the nodes share"
            )
        if whole:
            self._raw.load()
        self._index = json.loads(self._raw.index())

    def _progress(self) -> TrainingProgress:
        return TrainingProgress(**self._index["progress"])

    def _fitting(
        self, wanted: dict[str, _Wanted], store: ParameterStore, optimizer: Optimizer | None, extents: bool
    ) -> tuple[TrainingProgress, dict[str, Any], list[str], dict[str, np.ndarray]]:
        """Return progress, optimizer settings, paths and whole arrays of the wanted arrays, if all of them fit."""
        index = self._index
        _check_network(self.path, index["network"], store.fingerprint, extents)
        if index["dtype"] != store.dtype.name:
            raise UserError(
                f"checkpoint {self.path}: expected {store.dtype.name} parameters, got {index['dtype']}; "
                f'set training.dtype = "{index["dtype"]}"'
            )
        settings = {} if optimizer is None else self._settings(optimizer)
        rounded = any(path.startswith("errors/") for path in index["arrays"])
        missing = {path for path in wanted if path.startswith("optimizer/")} - set(index["arrays"])  # it was frozen
        paths = sorted(path for path in wanted if path not in missing and (rounded or not path.startswith("errors/")))
        arrays = {path: self._array(path, store.shapes[wanted[path].name], store.dtype) for path in paths}
        return self._progress(), settings, paths, arrays

    def _settings(self, optimizer: Optimizer) -> dict[str, Any]:
        settings, states = self._index["settings"], self._index["states"]
        if settings is None:
            raise UserError(f"checkpoint {self.path}: expected the state of an optimizer, got parameters only")
        names = sorted({*optimizer.state_names} - {AVERAGE})
        there, here = (settings["kind"], sorted({*states} - {AVERAGE})), (type(optimizer).__name__, names)
        if there != here:
            raise UserError(
                f"checkpoint {self.path}: expected the optimizer {here[0]} with {here[1]}, got {there[0]} with "
                f"{there[1]}; resume with the optimizer of the run"
            )
        return settings

    def _array(self, path: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return a whole array, a view of the verified bytes."""
        assert self._raw is not None
        offset, found, kind = self._index["arrays"][path]
        if tuple(found) != shape or np.dtype(kind) != dtype:
            raise KeyError(f"{path} of shape {found} and type {kind}")
        return self._raw.view(offset, math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    # -- faults --------------------------------------------------------------------------------

    def _read(self, call: Callable[[], Result]) -> Result | None:
        """Return the result of `call` on reading ranks. A fault becomes one UserError on all ranks. Collective."""
        return self._readers.run(lambda: self._checked(call))

    def _checked(self, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except UserError:
            raise
        except DamagedFile as error:
            raise self._damaged(error) from error
        except OtherFile as error:
            raise OtherCheckpoint(f"checkpoint {self.path}: expected a checkpoint of format 2, got {error}") from error
        except FileNotFoundError as error:
            raise UserError(f"checkpoint {self.path}: expected a file, there is none{self._remedy()}") from error
        except (OSError, KeyError, ValueError, TypeError, RecursionError, MemoryError) as error:
            reason = getattr(error, "strerror", None) or str(error).strip("'\"") or type(error).__name__
            raise UserError(f"checkpoint {self.path}: expected one that can be read, got {reason}") from error

    def _damaged(self, error: DamagedFile) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"checkpoint {self.path}: it is truncated or damaged ({error}){self._remedy()}")

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
class _Wanted:
    """Part of an array of the file that this rank needs.

    Attributes
    ----------
    name
        Name of the parameter or state that has its shape.
    target
        Array to fill: this rank's block, or, flattened, `part` of it.
        taken
        Whether this rank uses the values; otherwise another rank does, and this one starts with zeros.
        average
        Whether it is an average of parameters; its initial values are the parameters.
    """

    name: str
    target: Any
    part: slice | None = None
    taken: bool = True
    average: bool = False

    def begin(self, store: ParameterStore) -> None:
        """Set the initial values, if the file does not have the array. Local."""
        if self.average:
            np.copyto(self.target, store.params[self.name].reshape(-1)[self.part])
        else:
            self.target.fill(0)

    def fill(self, whole: np.ndarray, store: ParameterStore) -> None:
        """Copy this rank's part of the array. Local."""
        block = whole[store.box(self.name).slices()]
        values = block if self.part is None else block.reshape(-1)[self.part]
        device_of(self.target).assign(self.target, values if self.taken else np.zeros_like(values))


def _wanted(store: ParameterStore, optimizer: Optimizer | None) -> dict[str, _Wanted]:
    """List the arrays that this rank needs by path in the file; the paths are the same on all ranks."""
    assert store.blocks is not None
    found = {f"params/{name}": _Wanted(name, array) for name, array in store.params.items()}
    found |= {f"state/{name}": _Wanted(name, array) for name, array in store.state.items()}
    for name, array in store.errors.items():
        first = store.blocks[name].holders.leads(store.rank)  # one rank only, so that the residual is added once
        found[f"errors/{name}"] = _Wanted(name, array, taken=first)
    for key, kept in ({} if optimizer is None else optimizer.kept_state()).items():
        found |= {
            f"optimizer/{key}/{name}": _Wanted(name, array, part, average=key == AVERAGE)
            for name, (part, array) in kept.items()
        }
    return found


def _named(paths: Iterable[str], group: str) -> Iterator[tuple[str, str]]:
    """Yield the paths of a group in the file, each with its name in the group."""
    for path in list(paths):
        first, _, name = path.partition("/")
        if first == group:
            yield path, name


def _check_network(path: str | Path, there: list[str], here: list[str], extents: bool) -> None:
    found = difference(there, here, extents)
    if found is not None:
        raise UserError(
            f"checkpoint {path} is of another network: expected {found[0]!r}, got {found[1]!r}; restore the network, "
            "or train the new one in another output.directory"
        )
