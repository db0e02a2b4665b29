"""Checkpoints: everything a run needs to go on, in one HDF5 file, whatever the decomposition was.

::

    /                    attributes: format, dtype; texts: network, config, progress
    /params/LAYER/NAME   parameters; float32 where activations have 16 bits
    /state/LAYER/NAME    running statistics
    /optimizer           attributes: kind, step; one group like /params per state array
    /errors/LAYER/NAME   what rounding of gradients took away and is still to be added, if they are rounded

Every array carries its CRC-32. A file appears under its name only when it is complete and on the disk.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from halograd.comm import Communicator
from halograd.data.atomic import atomic_path
from halograd.data.reading import BeingWritten, NotRegular, open_to_read
from halograd.device import device_of
from halograd.errors import UserError
from halograd.layers import Network
from halograd.training.hdf5 import FaultHolder
from halograd.training.optimizers import Optimizer
from halograd.training.store import ParameterStore

__all__ = [
    "DamagedCheckpoint",
    "Progress",
    "Snapshot",
    "fingerprint",
    "read_checkpoint",
    "read_header",
    "verify_checkpoint",
    "write_checkpoint",
]

FORMAT = 1
# Not their subclasses: UserError is one too.
_UNREADABLE = (ValueError, TypeError, json.JSONDecodeError, UnicodeDecodeError)


class DamagedCheckpoint(UserError):
    """A checkpoint cannot be read to its end, or its checksums are wrong.

    Attributes
    ----------
    reason
        The same without a remedy.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.reason = text.partition(";")[0]


@dataclass
class Progress:
    """Where a run stands.

    Attributes
    ----------
    step
        Updates done; the schedule and all random numbers are functions of it and of `seed`.
    seed
        Of the run.
    sampler
        Position in the data, as :meth:`Sampler.state_dict` gives it.
    normalization
        Statistics of the inputs, as :meth:`ChannelStatistics.state_dict` gives them; None without.
    unvalidated
        The run was stopped when an epoch was over and its validation was not.
    reduction
        Which schemes of gradient reduction were tried, as :meth:`AutoReduction.state_dict` gives it; None where none
        are.
    loss_scale
        With float16, as :meth:`LossScale.state_dict` gives it; None otherwise.
    """

    step: int = 0
    seed: int = 0
    sampler: dict[str, Any] = field(default_factory=dict)
    normalization: dict[str, Any] | None = None
    unvalidated: bool = False
    reduction: dict[str, Any] | None = None
    loss_scale: dict[str, float] | None = None


def fingerprint(network: Network) -> list[str]:
    """What makes two networks the same: layers in order with kind and shape, and their arrays."""
    lines = [f"{name}: {kind} {_by(shape)}" for name, kind, shape, *_ in network.rows()]
    lines += [f"{name}: parameter {_by(p.shape)}" for name, p in network.parameters().items()]
    return lines + [f"{name}: state {_by(p.shape)}" for name, p in network.state().items()]


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds of the parameters, whole, on the host: views of arrays that are so on this rank.

    Attributes
    ----------
    network, dtype
        Fingerprint and dtype.
    params, state, optimizer
        Arrays by ``layer/parameter``; those of the optimizer by the name of its state before.
    settings
        Scalars of the optimizer; None without one.
    errors
        What rounding of gradients took away, by ``layer/parameter``; empty if they are not rounded.
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
        """The present state, on rank 0; None elsewhere. Collective over `comm` where parameters are cut, else local."""
        states = optimizer.named_state(comm) if optimizer is not None else {}
        parts: list[Any] = [store.params, store.state, store.errors, *states.values()]
        if comm is not None:
            parts = [store.gather(comm, arrays) for arrays in parts]
            if comm.rank:
                return None
        elif not store.whole:
            raise ValueError("Snapshot.of(): expected the communicator of the ranks that share the parameters")
        params, state, errors, *rest = [_on_host(arrays) for arrays in parts]
        settings = None if optimizer is None else optimizer.settings()
        named = dict(zip(states, rest))
        return cls(fingerprint(store.network), store.dtype.name, params, state, named, settings, errors)

    @property
    def nbytes(self) -> int:
        """Size of the parameters, of the optimizer's state, and of what was rounded away [B]."""
        groups = (self.params, self.errors, *self.optimizer.values())
        return sum(array.nbytes for arrays in groups for array in arrays.values())


def write_checkpoint(path: str | Path, snapshot: Snapshot, progress: Progress | None = None, config: str = "") -> None:
    """Write a checkpoint atomically; what was under `path` stays until the new file is complete. Local.

    Raises
    ------
    DataError
        If the file cannot be written (disk full, no folder, no permission). Nothing is left behind.
    """
    needed = snapshot.nbytes
    with atomic_path(path, needed=needed) as partial, FaultHolder(partial) as raw, h5py.File(raw, "w") as file:
        file.attrs["format"] = FORMAT
        file.attrs["dtype"] = snapshot.dtype
        file.create_dataset("network", data=json.dumps(snapshot.network))
        file.create_dataset("config", data=config)
        file.create_dataset("progress", data=json.dumps(asdict(progress or Progress())))
        _write_arrays(file.create_group("params"), snapshot.params)
        _write_arrays(file.create_group("state"), snapshot.state)
        if snapshot.errors:
            _write_arrays(file.create_group("errors"), snapshot.errors)
        if snapshot.settings is not None:
            group = file.create_group("optimizer")
            group.attrs["settings"] = json.dumps(dict(snapshot.settings))
            for key, arrays in snapshot.optimizer.items():
                _write_arrays(group.create_group(key), arrays)


def _on_host(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays, those of a device copied."""
    return {name: device_of(array).to_host(array) for name, array in arrays.items()}


def _write_arrays(group: h5py.Group, arrays: Mapping[str, Any]) -> None:
    for name, array in arrays.items():
        dataset = group.create_dataset(name, data=array)
        dataset.attrs["crc32"] = _crc(array)


def _crc(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def read_header(path: str | Path) -> tuple[Progress, str]:
    """Progress and configuration text of a checkpoint. Local."""
    with _Opened(path) as file:
        return _progress(file), _text(file, "config")


def verify_checkpoint(path: str | Path) -> None:
    """Read a whole checkpoint and compare all checksums. Local.

    Raises
    ------
    DamagedCheckpoint
        If it is truncated or damaged.
    UserError
        If it is missing, or not a checkpoint of this format.
    """
    with _Opened(path) as file:
        _progress(file)
        _text(file, "network"), _text(file, "config")
        file.visititems(_verify)


def _verify(path: str, item: Any) -> None:
    if isinstance(item, h5py.Dataset) and "crc32" in item.attrs:
        _verified(path, item)


def read_checkpoint(path: str | Path, store: ParameterStore, optimizer: Optimizer | None = None) -> Progress:
    """Fill this rank's parameters, states and, if given, the optimizer from a checkpoint. Local.

    Nothing is changed unless the whole file was read and fits.

    Raises
    ------
    UserError
        If the file is missing, truncated or damaged, of another network, optimizer or dtype.
    """
    with _Opened(path) as file:
        _check_network(path, json.loads(_text(file, "network")), fingerprint(store.network))
        if file.attrs["dtype"] != store.dtype.name:
            raise UserError(
                f"checkpoint {path}: expected {store.dtype.name} parameters, got {file.attrs['dtype']}; "
                f'set training.dtype = "{file.attrs["dtype"]}"'
            )
        found: list[tuple[Any, Any]] = [(a, _read(file, f"params/{n}", store, n)) for n, a in store.params.items()]
        found += [(a, _read(file, f"state/{n}", store, n)) for n, a in store.state.items()]
        found += [(a, _error(file, store, n)) for n, a in store.errors.items()]
        settings = None
        if optimizer is not None:
            settings = _optimizer_settings(path, file, optimizer)
            for key, kept in optimizer.kept_state().items():
                found += [(a, _part(file, f"optimizer/{key}/{n}", store, n, part)) for n, (part, a) in kept.items()]
        progress = _progress(file)
    for array, values in found:
        device_of(array).assign(array, values)
    store.refresh()
    if store.loss_scale is not None and progress.loss_scale is not None:
        store.loss_scale.load_state_dict(progress.loss_scale)
    if optimizer is not None and settings is not None:
        optimizer.step = int(settings["step"])
    return progress


def _error(file: h5py.File, store: ParameterStore, name: str) -> np.ndarray | float:
    """What the first rank that holds a block is to add to its gradient; zero for the others, and in a run before
    which nothing was rounded."""
    assert store.blocks is not None
    colors = store.blocks[name].colors
    first = colors.index(colors[store.rank]) == store.rank
    return _read(file, f"errors/{name}", store, name) if "errors" in file and first else 0.0


class _Opened:
    """The file, open for reading; everything that can go wrong in reading it becomes one UserError."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def __enter__(self) -> h5py.File:
        if not self._path.exists():
            raise UserError(f"checkpoint {self._path}: expected a file, there is none")
        try:
            self._file = open_to_read(self._path)
        except BeingWritten as error:
            raise UserError(f"checkpoint {self._path}: expected a file that nobody writes to; {error}") from error
        except NotRegular as error:
            raise UserError(f"checkpoint {self._path}: {error.strerror}; name another one") from error
        except OSError as error:
            raise self._damaged(error) from error
        if "format" not in self._file.attrs:
            self._file.close()
            raise UserError(f"checkpoint {self._path}: expected a checkpoint of halograd, got another HDF5 file")
        if self._file.attrs["format"] != FORMAT:
            found = self._file.attrs["format"]
            self._file.close()
            raise UserError(f"checkpoint {self._path}: expected format {FORMAT}, got {found}; use that halograd")
        return self._file

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._file.close()
        # A flipped bit may also hit a text (ValueError: not JSON, not UTF-8) or a link within the file.
        if error is not None and (isinstance(error, (OSError, KeyError, RuntimeError)) or type(error) in _UNREADABLE):
            raise self._damaged(error) from error

    def _damaged(self, error: BaseException) -> DamagedCheckpoint:
        reason = (str(error) or type(error).__name__).strip("'\"").splitlines()[0]
        others = sorted(p.name for p in self._path.parent.glob("step-*.h5") if p.name != self._path.resolve().name)
        remedy = f"; use an older one: {others[-1]}" if others else ""
        return DamagedCheckpoint(f"checkpoint {self._path}: it is truncated or damaged ({reason}){remedy}")


def _read(file: h5py.File, path: str, store: ParameterStore, name: str) -> np.ndarray:
    """This rank's block of an array of the file, whose checksum is that of the whole."""
    dataset = file[path]
    if dataset.shape != store.shapes[name] or dataset.dtype != store.dtype:
        raise KeyError(f"{path} is {dataset.shape} {dataset.dtype}")
    array = _verified(path, dataset)
    block = array[store.box(name).slices()]
    return block if block.size == array.size else block.copy()


def _part(file: h5py.File, path: str, store: ParameterStore, name: str, part: slice) -> np.ndarray:
    """Some elements of this rank's block, flat."""
    block = _read(file, path, store, name).reshape(-1)
    return block if part == slice(0, block.size) else block[part].copy()


def _verified(path: str, dataset: h5py.Dataset) -> np.ndarray:
    array = dataset[...]
    if _crc(array) != int(dataset.attrs["crc32"]):
        raise OSError(f"the checksum of {path} is wrong")
    return array


def _text(file: h5py.File, name: str) -> str:
    return file[name][()].decode()


def _progress(file: h5py.File) -> Progress:
    return Progress(**json.loads(_text(file, "progress")))


def _check_network(path: str | Path, there: list[str], here: list[str]) -> None:
    for i in range(max(len(there), len(here))):
        a = there[i] if i < len(there) else "nothing"
        b = here[i] if i < len(here) else "nothing"
        if a != b:
            raise UserError(f"checkpoint {path} is of another network: expected {b!r}, got {a!r}")


def _optimizer_settings(path: str | Path, file: h5py.File, optimizer: Optimizer) -> dict[str, Any]:
    if "optimizer" not in file:
        raise UserError(f"checkpoint {path}: expected the state of an optimizer, got parameters only")
    group = file["optimizer"]
    settings = json.loads(group.attrs["settings"])
    there, here = (settings["kind"], sorted(group)), (type(optimizer).__name__, sorted(optimizer.state_names))
    if there != here:
        raise UserError(
            f"checkpoint {path}: expected the optimizer {here[0]} with {here[1]}, got {there[0]} with {there[1]}; "
            "resume with the optimizer of the run"
        )
    return settings
