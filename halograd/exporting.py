"""Export of a trained run for other programs, as ONNX or as weights alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .data import ChannelStatistics
from .errors import UserError
from .interchange.onnx_export import check_onnx_place, save
from .interchange.weights import check_weights_place, save_weights
from .training.build import datasets_of, make_network
from .training.checkpoint import CheckpointReader
from .training.trained import find_trained

__all__ = ["KINDS", "export_run"]

#: Kinds of files, and the function that checks their path.
KINDS = {"onnx": check_onnx_place, "safetensors": check_weights_place}


def export_run(target: Path, kind: str, out: Path, overrides: Sequence[str] = (), normalize: bool = False) -> int:
    """Write the network of the last checkpoint of a run. Local.

    Parameters
    ----------
    target
        The directory of a run, one of its checkpoints, or its configuration.
    kind
        ``"onnx"``, or ``"safetensors"``: weights alone.
    out
        File to write; an existing file is replaced only if this function wrote it.
    overrides
        ``section.key=value``, such as another resolution.
    normalize
        Whether to include the normalization of the data in the network.

    Returns
    -------
    int
        The step of the checkpoint.
    """
    if kind not in KINDS:
        raise UserError(f"--to: expected one of {', '.join(KINDS)}, got {kind!r}")
    if normalize and kind != "onnx":
        raise UserError("--normalize: expected --to onnx with it, got safetensors, which holds weights alone")
    config, checkpoint, progress, _ = find_trained(target, overrides)
    KINDS[kind](out)
    network = make_network(config)
    with CheckpointReader(checkpoint) as reader:
        arrays = reader.arrays(network, averaged=config.training.average > 0)
        if kind == "onnx":
            inputs, _ = datasets_of(config.data, network)
            save(network, arrays, out, _statistics(progress.normalization, list(inputs)) if normalize else None)
        else:
            save_weights(network, arrays, out)
    return progress.step


def _statistics(known: Mapping[str, Any] | None, inputs: Sequence[str]) -> dict[str, ChannelStatistics]:
    """Return statistics by input. A checkpoint of an earlier version has statistics of its single input only."""
    if not known:
        return {}
    known = {inputs[0]: known} if "mean" in known else known
    return {name: ChannelStatistics.from_state_dict(state) for name, state in known.items()}
