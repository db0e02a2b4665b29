"""Checks of built-in and user layers: results on every grid against one process, and gradients against
finite differences.

>>> from halograd.layers import Conv
>>> check_layer(Conv(4, 3, padding=1), (8, 6, 3))
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from .comm import Communicator
from .dtensor import axis_names
from .errors import UserError
from .kernels import Backend, get_backend
from .kernels.memory import total
from .layers import Input, Layer, Loss, Network
from .layers.strategy import Strategy
from .training.executor import Executor, Gather

__all__ = ["LayerResult", "check_layer", "grids", "random_array", "run_layer"]


def random_array(shape: Sequence[int], name: str, seed: int = 0) -> np.ndarray:
    """Return a float64 array that depends on shape, name and seed only, so that every rank can compute it."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(tuple(shape))


def grids(size: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield all ways to cut `size` ranks into parts along `axes`.

    >>> list(grids(2, ("sample", "height")))
    [{'sample': 1, 'height': 2}, {'sample': 2, 'height': 1}]
    """
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    for parts in itertools.product(divisors, repeat=len(axes)):
        if math.prod(parts) == size:
            yield dict(zip(axes, parts))


class _Probe(Loss):
    """Loss sum(y * g), a linear functional whose gradient is g."""

    def local(self, prediction, target, dx, scale, work, weights=None):
        if dx is not None:
            np.copyto(dx, target)
        return total(np.multiply(prediction, target, dtype=np.float64))


LayerResult = dict[str, np.ndarray]


def _probed(make: Callable[[], Layer], shapes: Sequence[Sequence[int]]) -> tuple[Network, str]:
    """Return a network of one layer and a probe loss on its output, and the name of the layer; for a loss itself, "".
    """
    nodes = [Input(s, name=f"x{i}") for i, s in enumerate(shapes)]
    layer = make()
    y = layer(*nodes)
    if isinstance(layer, Loss):
        return Network({"loss": y}), ""
    g = Input(y.shape, name="g")
    network = Network({"y": y, "loss": _Probe("probe")(y, g)})
    return network, network.names[y]


def _strategy(parts: Mapping[str, int], size: int, options: dict | None = None) -> Strategy:
    """Return a strategy with these parts for all layers but the probe, which may need whole channels or all ranks."""
    channels = parts.get("channel", 1) * parts.get("input_channel", 1)
    restricted = channels > 1 or math.prod(parts.values()) < size
    return Strategy(parts, {"probe": {"sample": size}} if restricted else {}, options=options or {})


def run_layer(
    make: Callable[[], Layer],
    shapes: Sequence[Sequence[int]],
    comm: Communicator,
    parts: dict[str, int],
    *,
    batch: int = 2,
    dtype: str = "float64",
    backend: str | Backend = "numpy",
    options: dict | None = None,
    seed: int = 0,
    shift: Mapping[str, np.ndarray] | None = None,
    steps: int = 1,
    debug: bool = False,
) -> LayerResult | None:
    """Return outputs and gradients of one layer under one cut: ``y, dx0, ..., loss`` and gradients by name. Collective.

    The result has whole arrays, on rank 0; it is None on other ranks. Inputs, parameters and the output's gradient are
    random, and equal under all cuts. A layer may have fewer `parts` than there are ranks. `shift` is added to inputs
    and parameters: ``x0``, ..., parameters by their short names, or as ``layer/parameter`` if `make` chains layers that
    share a short name. `steps` repeats the step, which reuses buffers. `debug` is passed to :class:`Executor`.
    """
    network, name = _probed(make, shapes)
    settings = (batch, dtype, backend, options, seed, shift, steps, debug)
    with _stepped(network, shapes, comm, parts, *settings) as (executor, loss):
        outputs, inputs = [name] if name else [], _differentiated(network)
        with closing(Gather(executor, outputs, inputs)) as way:
            result: dict[str, Any] = dict(zip((*("y" for _ in outputs), *(f"d{x}" for x in inputs)), way.run()))
        result |= _gradients(executor)
    result["loss"] = np.array([loss])
    return result if comm.rank == 0 else None


def _differentiated(network: Network) -> list[str]:
    """Return the inputs whose gradients are compared: all of a layer, the prediction of a loss."""
    return ["x0"] if "g" not in network.inputs else [name for name in network.inputs if name != "g"]


@contextmanager
def _stepped(
    network: Network,
    shapes: Sequence[Sequence[int]],
    comm: Communicator,
    parts: Mapping[str, int],
    batch: int,
    dtype: str,
    backend: str | Backend,
    options: dict | None = None,
    seed: int = 0,
    shift: Mapping[str, np.ndarray] | None = None,
    steps: int = 1,
    debug: bool = False,
) -> Iterator[tuple[Executor, float]]:
    """Yield an executor of a probed layer after some steps, and its loss; arguments as in `run_layer`."""
    backend_, moved = get_backend(backend) if isinstance(backend, str) else backend, dict(shift or {})
    strategy = _strategy(parts, comm.size, options)
    probed = _differentiated(network)
    with Executor(network, comm, backend_, batch, strategy, dtype, seed=seed, probed=probed, debug=debug) as executor:
        labels = _labels(executor.store.params)
        for key, array in executor.store.params.items():
            whole = random_array(executor.store.shapes[key], key, seed) + moved.get(labels[key], 0.0)
            executor.device.assign(array, whole[executor.store.box(key).slices()])
        # Kernels in 16 bits read rounded copies of the parameters.
        executor.store.refresh()
        for i, s in enumerate(shapes):
            array = random_array((batch, *s), f"x{i}", seed) + moved.get(f"x{i}", 0.0)
            # The third input of a loss has weights, which are never negative.
            executor.set_input(f"x{i}", np.abs(array) if i == 2 and "g" not in network.inputs else array)
        if "g" in network.inputs:
            executor.set_input("g", random_array((batch, *network.outputs["y"].shape), "g", seed))
        for _ in range(steps):
            executor.forward()
            loss = executor.loss_value()
            executor.backward()
            assert executor.reducer is not None
            # Gradients are complete only when the sums over ranks, which start during backward, have finished.
            executor.reducer.finish()
        yield executor, loss


def _gradients(executor: Executor) -> LayerResult:
    """Return whole gradients of parameters by name on rank 0, and an empty result elsewhere. Collective."""
    labels = _labels(executor.store.params)
    grads = executor.store.gather(executor.comm, executor.store.grads) or {}
    return {f"d{labels[k]}": executor.device.to_host(v).copy() for k, v in grads.items()}


def _blocks(executor: Executor, name: str) -> dict[str, tuple[np.ndarray, tuple[slice, ...]]]:
    """Return this rank's blocks of output and gradients by name, with their positions. Collective.

    Gradients of parameters are whole, and on rank 0 only.
    """
    blocks: dict[str, tuple[np.ndarray, tuple[slice, ...]]] = {}
    values = {"y": executor.program.values[name]} if name else {}
    values |= {f"d{x}": executor.program.values[x] for x in _differentiated(executor.network)}
    for key, value in values.items():
        # `dy` of an input's value is the gradient of the loss with respect to the input.
        view = value.view if key == "y" else value.dy
        slices = value.layout.boxes[executor.comm.rank].slices()
        blocks[key] = executor.device.to_host(executor.runner.view(view)).copy(), slices
    return blocks | {key: (array, ()) for key, array in _gradients(executor).items()}


def _labels(keys: Iterable[str]) -> dict[str, str]:
    """Return short names of ``layer/parameter`` keys; the whole key if two layers share the short name."""
    short = {key: key.rpartition("/")[2] for key in keys}
    names = list(short.values())
    return {key: name if names.count(name) == 1 else key for key, name in short.items()}


def check_layer(
    layer: Layer | Callable[[], Layer],
    input_shape: Sequence[int] | Sequence[Sequence[int]],
    *,
    batch: int = 2,
    comm: MPI.Intracomm | None = None,
    backend: str | Backend = "numpy",
    dtype: str = "float64",
    tolerance: float = 64.0,
    gradient: bool = True,
    options: dict | None = None,
    transport: str = "auto",
    axes: Sequence[str] | None = None,
) -> None:
    """Check a layer on every grid of ranks against one process, and its gradients against finite differences.

    On a CPU it runs with ``debug=True`` (:class:`Executor`), which finds kernels that write outside of their memory and
    arrays that are read or written without a declaration.

    Parameters
    ----------
    layer
        The layer, or a function that makes it. A loss is checked itself: its value, and the gradient of its prediction.
    input_shape
        Shape of one sample ``(*spatial, C)``, or several shapes for a layer with several inputs; of a loss those of
        prediction, target and perhaps weights.
    batch
        Number of samples.
    comm
        Ranks to use, by default all.
    tolerance
        Allowed difference in units of ``eps * sqrt(size) * max(1, max|reference|)``, with the size of the whole array.
    gradient
        Compare gradients with central differences too (float64 only).
    options
        Options of the :class:`~halograd.layers.Strategy` on the grids.
    transport
        Transport of messages between ranks.
    axes
        Axes that are cut, by default samples and spatial axes. With ``"channel"`` (and ``"input_channel"``), the
        channels of a layer that supports this are cut too; unsupported cuts are left out.

    Raises
    ------
    AssertionError
        An array differs by more than the tolerance; the message names grid and array. On all ranks.
    AccessError, GuardError
        A kernel used memory without permission; the message names layer, operation and array. On all ranks.
    """
    make = (lambda: layer) if isinstance(layer, Layer) else layer
    several = bool(input_shape) and isinstance(input_shape[0], Sequence)
    shapes: list[Any] = [tuple(cast(Any, s)) for s in input_shape] if several else [tuple(input_shape)]
    world = comm if comm is not None else MPI.COMM_WORLD
    common: dict[str, Any] = {"batch": batch, "dtype": dtype}
    axes = axes or [a for a in axis_names(len(shapes[0]) + 1) if a != "channel"]
    network, name = _probed(make, shapes)
    opened = get_backend(backend) if isinstance(backend, str) else nullcontext(backend)
    with opened as kernels, Communicator(MPI.COMM_SELF) as alone, Communicator(world, transport) as ranks:
        reference, debug = None, kernels.device.is_host
        with ranks.agreement():
            if ranks.rank == 0:
                # On rank 0 only: the other ranks would compute the same arrays.
                reference = run_layer(make, shapes, alone, {}, backend=kernels, debug=debug, **common)
        reference = cast(LayerResult, ranks.bcast(reference))
        if gradient and dtype == "float64":
            # Each array needs two more steps, so the ranks share the arrays among them.
            own = [k for k in reference if k.startswith("d")][ranks.rank :: ranks.size]
            with ranks.agreement():
                _check_gradients(make, shapes, alone, {k: reference[k] for k in own}, batch, kernels)
        for parts in grids(world.size, axes):
            if not _possible(network, parts, world.size):
                continue
            once = (network, shapes, ranks, parts, batch, dtype, kernels, options)
            # The second step starts with buffers that hold data of the first one.
            with _stepped(*once, steps=2, debug=debug) as (executor, loss):
                blocks = {**_blocks(executor, name), "loss": (np.array([loss]), ())}
            ranks.agree(_difference(blocks, reference, tolerance, dtype, str(parts)))


def _possible(network: Network, parts: Mapping[str, int], size: int) -> bool:
    """Return whether the layer supports this cut and has enough channels for it."""
    try:
        _strategy(parts, size).validate(network, size)
    except UserError:
        return False
    return True


def compare(result: LayerResult, reference: LayerResult, tolerance: float, dtype: str, where: str) -> Exception | None:
    """Return an error that names the first array that differs by more than the tolerance; None if all agree."""
    return _difference({key: (result[key], ()) for key in reference}, reference, tolerance, dtype, where)


def _difference(
    blocks: Mapping[str, tuple[np.ndarray, tuple[slice, ...]]],
    reference: LayerResult,
    tolerance: float,
    dtype: str,
    where: str,
) -> Exception | None:
    """Return an error on the first block whose shape or, beyond the tolerance, values differ from the reference; else
    None. Each block has its position in the whole array.
    """
    for key, (have, slices) in blocks.items():
        whole = reference[key]
        want = whole[slices]
        if have.shape != want.shape:
            return AssertionError(f"{where}: {key} has shape {have.shape}, one process {want.shape}")
        # Of the whole array, so that all ranks have the same bound, also for blocks of small values.
        scale = max(1.0, float(np.max(np.abs(whole), initial=0.0)))
        bound = tolerance * float(np.finfo(dtype).eps) * math.sqrt(max(whole.size, 1)) * scale
        error = float(np.max(np.abs(have.astype(np.float64) - want), initial=0.0))
        # Not `error > bound`, which is false for NaN.
        if not error <= bound:
            return AssertionError(f"{where}: {key} differs from one process by {error:.3g}, allowed are {bound:.3g}")
    return None


def _check_gradients(make, shapes, comm, gradients, batch, backend) -> None:
    """Compare gradients with central differences of the loss along a random direction per input and parameter."""
    for key, gradient in gradients.items():
        direction = random_array(gradient.shape, f"direction of {key}")
        # Near the cube root of float64's epsilon (6e-6), at which rounding and truncation errors of a central
        # difference balance.
        eps, values = 1e-6, []
        for sign in (1, -1):
            shift = {key[1:]: sign * eps * direction}
            result = run_layer(make, shapes, comm, {}, batch=batch, backend=backend, shift=shift)
            assert result is not None
            values.append(float(result["loss"][0]))
        numeric = (values[0] - values[1]) / (2 * eps)
        # Directional derivative: d loss(x + eps * v) / d eps = <gradient, v>.
        exact = float(np.sum(gradient * direction))
        scale = max(1.0, abs(exact), float(np.linalg.norm(gradient)))
        if not abs(numeric - exact) <= 1e-5 * scale:
            raise AssertionError(f"gradient {key}: {exact:.9g} from backward(), {numeric:.9g} numerically")
