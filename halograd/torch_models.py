"""From torch and back in one line: ``hg.from_torch`` and ``hg.to_torch``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import UserError
from .exporting import trained_arrays
from .fitting import TrainedRun
from .interchange.torch_module import export, fill_module, state_for
from .layers import Network
from .training.executor import Executor
from .training.root import on_root

__all__ = ["from_torch", "to_torch"]


def from_torch(
    model: Any, example_inputs: Any, shapes: Mapping[str, Sequence[int]] | None = None, comm: Any = None
) -> Network:
    """Build a network from a torch module; the parameters of the module become its initial values.

    ::

        network = hg.from_torch(model, torch.randn(1, 3, 64, 64))
        run = hg.fit(hg.Network({"prediction": ..., "loss": ...}), data, "runs/first", epochs=20, batch=4)
        hg.to_torch(run, model)

    Local without `comm`: every rank calls it with an equal module, and a run stops with an error if the modules of
    ranks differ. With `comm` collective over it: rank 0 exports its module, and the others receive the result.

    Parameters
    ----------
    model
        A ``torch.nn.Module`` on any device. It is not modified. With `comm` only rank 0 needs it; others may give None.
    example_inputs
        Arguments of its ``forward``: a tensor ``(N, C, *spatial)``, a tuple of tensors, or a dict of them by name.
    shapes
        Shapes of samples, ``(*spatial, C)``, by the name of the argument, if they differ from those of the example.
    comm
        An MPI communicator, for example that of ``hg.boot()``, or a :class:`~halograd.comm.Communicator`.

    Returns
    -------
    Network
        As :func:`halograd.onnx.load`, without loss. Inputs have the names of the arguments. A single output is named
        ``output``; outputs of a tuple or list ``output_0``, ``output_1``, ...; others as the keys of their dict, or the
        fields of their class.

    Raises
    ------
    UserError
        torch or onnxscript is missing, or a node of the module has no equivalent. The message names node and module,
        for both exporters of torch. With `comm`, the error of rank 0 is raised on all ranks.
    """
    comm = getattr(comm, "mpi", comm)
    if comm is None or comm.size == 1:
        return export(model, example_inputs, shapes)[1]
    exported = on_root(comm, lambda: _sendable(export(model, example_inputs, shapes)[0]))
    return exported.network(shapes)


def _sendable(exported: Any) -> Any:
    """Return an exported module whose files can be pickled."""
    return type(exported)(exported.name, {name: bytes(content) for name, content in exported.contents.items()})


def to_torch(run: TrainedRun | Executor | str | Path, model: Any, which: str = "latest", strict: bool = True) -> Any:
    """Put trained parameters and running statistics into a module of torch.

    Local; collective for an executor, which fills the module of rank 0 only: other ranks may pass None. Moving averages
    of a run replace its parameters, as in evaluation.

    Parameters
    ----------
    run
        Result of :func:`halograd.fit`, directory of a run, one of its checkpoints, or an executor.
    model
        The module from which the network was made, or an equal one; on any device, of any dtype. Counters such as
        ``num_batches_tracked`` and other buffers stay as they are.
    which
        Checkpoint of a run: ``"latest"`` or ``"best"``.
    strict
        Whether the run must have every parameter and running statistic of the module.

    Returns
    -------
    `model`.

    Raises
    ------
    UserError
        Names or shapes do not match. The message has the names; the module is not changed.
    """
    if isinstance(run, Executor):
        if run.reducer is not None:
            # The updates of the last step, which otherwise wait for the next forward pass.
            run.reducer.finish()
        # Whole arrays, on rank 0 only.
        gathered = run.store.gather(run.comm, {**run.store.params, **run.store.state})
        if model is None or gathered is None:
            return model
        network, arrays = run.network, gathered
    else:
        network, arrays = _trained(run, which)
    fill_module(model, state_for(network, arrays), strict)
    return model


def _trained(run: TrainedRun | str | Path, which: str) -> tuple[Network, dict[str, Any]]:
    """Return network and arrays of a checkpoint. Local."""
    if isinstance(run, TrainedRun):
        return trained_arrays(run.given(which))[:2]
    path = Path(run)
    if which not in ("latest", "best"):
        raise UserError(f"to_torch(): which: expected 'latest' or 'best', got {which!r}")
    # A directory alone means its latest checkpoint.
    best = path / "checkpoints" / f"{which}.h5"
    return trained_arrays(best if path.is_dir() and which == "best" else path)[:2]
