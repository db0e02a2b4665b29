"""The graph of a module of torch in the folder of its run, so that later jobs need neither torch nor its source."""

from __future__ import annotations

from pathlib import Path

from ..models.foreign import write_graph
from .config import Config

__all__ = ["keep_model", "kept_model"]

#: Name of the file in the folder of the run.
NAME = "model.onnx"


def keep_model(config: Config, folder: Path) -> Config:
    """Write the module of ``model.torch`` to the folder of a new run. Local.

    Returns
    -------
    Config
        The configuration with that file; as it is for other models.
    """
    if config.model.torch is None:
        return config
    options = config.model.model_copy(update={"onnx": None}).options
    write_graph(config.model.torch, options, folder / NAME)
    return kept_model(config, folder)


def kept_model(config: Config, folder: Path) -> Config:
    """Return the configuration of a run with the graph in its folder, if ``model.torch`` was kept there. Local."""
    if config.model.torch is None or not (folder / NAME).is_file():
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"onnx": str(folder / NAME)})})
