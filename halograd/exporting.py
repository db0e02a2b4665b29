"""Export of a trained network for other programs, as ONNX or as weights alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .data import ChannelStatistics
from .errors import UserError
from .interchange.onnx_export import check_onnx_path, save
from .interchange.weights import check_weights_path, save_weights
from .layers import Network
from .training.build import datasets_of, make_network
from .training.checkpoint import CheckpointReader, TrainingProgress
from .training.config import Config
from .training.trained import find_trained

__all__ = ["KINDS", "export_run", "trained_arrays"]


@dataclass(frozen=True)
class ExportKind:
    """Kind of exported files.

    Attributes
    ----------
    check
        Function that checks the path before anything is read.
    save
        ``save(network, arrays, path, statistics)`` writes whole arrays by ``layer/name``; `statistics` are those of
        inputs and normalized targets by name, or None.
    normalizes
        Whether the file can compute the normalization, with statistics. Other files have them for information, always.
    """

    check: Callable[[Path], None]
    save: Callable[..., None]
    normalizes: bool = False


#: Kinds by name.
KINDS = {
    "onnx": ExportKind(check_onnx_path, save, normalizes=True),
    "safetensors": ExportKind(check_weights_path, save_weights),
}


def export_run(target: Path, kind: str, out: Path, overrides: Sequence[str] = (), normalize: bool = False) -> int:
    """Write the network of a checkpoint: the last one of a run, unless `target` is a checkpoint itself. Local.

    Parameters
    ----------
    target
        The directory of a run, one of its checkpoints, or its configuration.
    kind
        ``"onnx"``, or ``"safetensors"``: weights alone.
    out
        File to write; an existing file is replaced only if halograd wrote it.
    overrides
        ``section.key=value``, such as another resolution.
    normalize
        Whether to include the normalization of the data in the network.

    Returns
    -------
    int
        Number of updates until the checkpoint.

    Raises
    ------
    UserError, DataError
        If the user can correct the fault, such as an unknown kind, a directory without checkpoint, or a file of another
        program at `out`.
    """
    if kind not in KINDS:
        raise UserError(f"--to: expected one of {', '.join(KINDS)}, got {kind!r}")
    chosen = KINDS[kind]
    if normalize and not chosen.normalizes:
        others = " or ".join(name for name, other in KINDS.items() if other.normalizes)
        raise UserError(f"--normalize: expected --to {others} with it, got {kind}, which holds weights alone")
    # Before the checkpoint is read, which may take long.
    chosen.check(out)
    network, arrays, config, progress = trained_arrays(target, overrides)
    known = normalize or not chosen.normalizes
    chosen.save(network, arrays, out, _statistics(progress.normalization, config, network) if known else None)
    return progress.step


def trained_arrays(
    target: Path, overrides: Sequence[str] = ()
) -> tuple[Network, dict[str, np.ndarray], Config, TrainingProgress]:
    """Return the network of a run, whole arrays by ``layer/name``, its configuration and its progress. Local.

    Parameters and errors are those of :func:`export_run`.
    """
    config, checkpoint, progress, _ = find_trained(target, overrides)
    network = make_network(config)
    with CheckpointReader(checkpoint) as reader:
        # With training.average, the moving averages replace the parameters, as in evaluation.
        return network, reader.arrays(network, averaged=config.training.average > 0), config, progress


def _statistics(known: Mapping[str, Any] | None, config: Config, network: Network) -> dict[str, ChannelStatistics]:
    """Return statistics by name of an input or a normalized target; empty without normalization.

    A checkpoint of an earlier version has statistics of its single input only.
    """
    if known and "mean" in known:  # a key of the statistics themselves, so there is no level of input names
        inputs, _ = datasets_of(config.data, network)
        known = {next(iter(inputs)): known}
    return {name: ChannelStatistics.from_state_dict(state) for name, state in (known or {}).items()}
