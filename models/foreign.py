"""Networks of other frameworks as models: a module of torch, or an ONNX file, and the loss to train it with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from halograd.errors import UserError
from halograd.user_code import describe, is_location, load

from .. import layers
from ..layers import Input, Loss, Network

__all__ = ["FOREIGN", "build_foreign", "write_graph"]


def build_foreign(kind: str, where: str, settings: Mapping[str, Any]) -> Network:
    """Return the network of ``[model]`` with the key `kind`, ``torch`` or ``onnx``, and its loss. Local.

    Parameters
    ----------
    where
        Value of the key: location of a function, or a file.
    settings
        Options of the function, and ``loss``: the name of a loss, or the location of a function that takes the
        network and returns one with a loss.

    Raises
    ------
    UserError
        The module, file or loss is missing, or cannot be expressed.
    """
    options = dict(settings)
    loss = options.pop("loss", None)
    return _with_loss(FOREIGN[kind](where, options), loss)


def _exported(where: str, options: Mapping[str, Any]) -> tuple[Any, Network]:
    """Return the module of a user's function as ONNX files, and its network."""
    from ..interchange.torch_module import export  # its libraries are needed for such models only

    try:
        module = load(where, "model.torch")(**options)
    # It names the file or option, and the remedy.
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"model.torch: {where} failed: {describe(error)}") from error
    if not isinstance(module, tuple) or len(module) != 2:
        raise UserError(
            f"model.torch: {where}: expected a function that returns a torch.nn.Module and an example, got "
            f"{type(module).__name__}; return (module, torch.zeros(1, channels, height, width))"
        )
    return export(*module)


def write_graph(where: str, options: Mapping[str, Any], path: Path) -> None:
    """Write the module of a user's function as an ONNX file, with its weights. Local. Raises UserError."""
    exported, _ = _exported(where, {key: value for key, value in options.items() if key != "loss"})
    exported.write(path)


def _of_torch(where: str, options: Mapping[str, Any]) -> Network:
    return _exported(where, options)[1]


def _of_onnx(where: str, options: Mapping[str, Any]) -> Network:
    from ..interchange.onnx_import import load as load_onnx

    if options:
        raise UserError(f"model.{min(options)}: expected no option with model.onnx but loss, got one")
    return load_onnx(where)


#: Functions of value and options that return a network, by the key of ``[model]``.
FOREIGN: dict[str, Callable[[str, Mapping[str, Any]], Network]] = {"torch": _of_torch, "onnx": _of_onnx}

#: Losses of a prediction and a target of its shape, and of a prediction and a class index per element.
_OF_NUMBERS = ("MeanSquaredError", "AbsoluteError", "Huber", "BinaryCrossEntropyWithLogits")
_OF_CLASSES = ("SoftmaxCrossEntropy",)


def _with_loss(network: Network, loss: Any) -> Network:
    """Return `network` with the loss of this name, or the result of the user's function at this location."""
    if isinstance(loss, str) and is_location(loss):
        try:
            loss_node = load(loss, "model.loss")(network)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"model.loss: {loss} failed: {describe(error)}") from error
        if not isinstance(loss_node, Network) or "loss" not in loss_node.outputs:
            raise UserError(f"model.loss: {loss}: expected a function that returns a network with an output 'loss'")
        return loss_node
    known = ", ".join((*_OF_CLASSES, *_OF_NUMBERS))
    if loss not in (*_OF_CLASSES, *_OF_NUMBERS):
        remedy = "set it (in a command: --option loss=NAME)" if loss is None else "choose one of these"
        raise UserError(f'model.loss: expected one of {known}, or "FILE.py:FUNCTION", got {loss!r}; {remedy}')
    # A name does not define which of several outputs is the prediction.
    if len(network.outputs) > 1:
        raise UserError(
            f'model.loss: expected "FILE.py:FUNCTION" for a network with several outputs '
            f"({', '.join(network.outputs)}), got {loss!r}"
        )
    (prediction,) = network.outputs.values()
    target = Input(prediction.shape, "target")
    # One class index per element, instead of one number per channel.
    if loss in _OF_CLASSES:
        target = Input((*prediction.shape[:-1], 1), "target", "int32")
    layer: Loss = getattr(layers, loss)()
    return Network({"prediction": prediction, "loss": layer(prediction, target)}, network.name)
