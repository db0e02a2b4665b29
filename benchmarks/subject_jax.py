"""JAX as a contestant: the same graph in one jitted step, on one device or with the image sharded over several."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import mpi4py

mpi4py.rc.initialize = False  # only descriptions of layers are used; no communication

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from benchmarks.problems import PROBLEMS, has_relu  # noqa: E402
from halograd import layers as hl  # noqa: E402

__all__ = ["JaxSubject"]

Arrays = Mapping[str, jax.Array]
#: ``f(parameters, state, *inputs) -> (output, new state)``
Function = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
_IMAGES, _SAME = ("NHWC", "HWIO", "NHWC"), ((0, 0), (0, 0))


class JaxSubject:
    """Graph of a network as one jitted function: loss, gradients, SGD, running statistics; buffers are donated.

    With several devices the arrays ``(N, H, W, C)`` of the data are sharded along H (`NamedSharding`), parameters are
    replicated, and XLA partitions the step.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        devices = jax.devices()[: spec["devices"]]
        if len(devices) != spec["devices"]:
            raise ValueError(f"expected {spec['devices']} JAX devices, got {len(devices)}; set XLA_FLAGS")
        mesh = Mesh(np.array(devices), ("height",))
        problem = PROBLEMS[spec["problem"]]
        network = problem.make()
        everywhere = NamedSharding(mesh, PartitionSpec())
        functions, params = _bind(network, problem.weights(network))
        self.params = jax.device_put(params, everywhere)
        state = {k: jnp.asarray(s.initial(k, 0), jnp.float32) for k, s in network.state().items()}
        self.state = jax.device_put(state, everywhere)
        self.data = {k: jax.device_put(v, _sharding(mesh, v)) for k, v in problem.data(network).items()}
        step = _step(functions, network.names[network.outputs["loss"]], problem.rate)
        self.run = jax.jit(step, donate_argnums=(0, 1), out_shardings=everywhere)
        limit = re.search(r"--xla_cpu_max_isa=(\S+)", os.environ.get("XLA_FLAGS", ""))
        on = f" on {limit[1]} at most" if limit else ""
        self.about = f"jax {jax.__version__}{on}, jit, NHWC, {len(devices)} device(s)"

    def step(self) -> float:
        self.params, self.state, loss = self.run(self.params, self.state, self.data)
        jax.block_until_ready(self.params)
        return float(loss)

    def clock(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        """Do nothing, because every step is complete when it returns."""

    def close(self) -> None:
        """Do nothing."""


def _sharding(mesh: Mesh, array: np.ndarray) -> NamedSharding:
    cut = array.ndim == 4 and array.shape[1] % mesh.size == 0
    return NamedSharding(mesh, PartitionSpec(None, "height") if cut else PartitionSpec())


def _bind(network: hl.Network, weights: Mapping[str, np.ndarray]) -> tuple[list, dict[str, np.ndarray]]:
    """Return each layer's name, inputs and function, and the weights in JAX's layout."""
    functions, params = [], dict(weights)
    for name, node in network.layers.items():
        kind = type(node.layer)
        if kind in WEIGHTS:
            params[f"{name}/w"] = np.ascontiguousarray(WEIGHTS[kind](weights[f"{name}/w"]))
        function = FUNCTIONS[kind](node.layer, node.inputs[0].shape)
        functions.append((name, [network.names[n] for n in node.inputs], function))
    return functions, params


def _step(functions: list, loss_name: str, rate: float) -> Callable:
    def forward(params: Arrays, state: Arrays, data: Arrays) -> tuple[jax.Array, dict[str, jax.Array]]:
        values = dict(data)
        after: dict[str, jax.Array] = {}
        for name, inputs, function in functions:
            own, kept = _of(name, params), _of(name, state)
            values[name], new = function(own, kept, *(values[i] for i in inputs))
            after |= {f"{name}/{k}": v for k, v in new.items()}
        return values[loss_name], after

    def step(params: Arrays, state: Arrays, data: Arrays) -> tuple[dict[str, jax.Array], Any, jax.Array]:
        (loss, after), grads = jax.value_and_grad(forward, has_aux=True)(params, state, data)
        return {k: p - rate * grads[k] for k, p in params.items()}, after, loss

    return step


def _of(name: str, arrays: Arrays) -> dict[str, jax.Array]:
    return {k.rpartition("/")[2]: v for k, v in arrays.items() if k.rpartition("/")[0] == name}


def _plain(function: Callable) -> Function:
    return lambda p, s, *xs: (function(*xs), {})


def _conv(layer: hl.Conv, shape: tuple[int, ...]) -> Function:
    windows = layer.windows(shape)
    options: dict[str, Any] = {
        "window_strides": [w.stride for w in windows],
        "padding": [(w.pad_lo, w.pad_hi) for w in windows],
        "rhs_dilation": [w.dilation for w in windows],
        "dimension_numbers": _IMAGES,
        "feature_group_count": layer.groups,
    }

    relu = has_relu(layer)

    def run(p: Arrays, s: Arrays, x: jax.Array) -> tuple[jax.Array, dict]:
        y = lax.conv_general_dilated(x, p["w"], **options)
        y = y + p["b"] if "b" in p else y
        return (jax.nn.relu(y) if relu else y), {}

    return run


def _transposed(layer: hl.ConvTranspose, shape: tuple[int, ...]) -> Function:
    """Return a transposed convolution as one matrix product; on CPUs `lax.conv_transpose` is up to 100 times slower."""
    if any((w.kernel, w.pad_lo, w.pad_hi) != (w.stride, 0, 0) for w in layer.windows(shape)) or layer.groups > 1:
        raise ValueError(f"{layer.name}: expected a transposed convolution whose windows do not overlap, for JAX")

    def run(p: Arrays, s: Arrays, x: jax.Array) -> tuple[jax.Array, dict]:
        y = jnp.einsum("nhwc,cijk->nhiwjk", x, p["w"])
        n, h, i, w, j, k = y.shape
        y = y.reshape(n, h * i, w * j, k)
        return (y + p["b"] if "b" in p else y), {}

    return run


def _batch_norm(layer: hl.BatchNorm, shape: tuple[int, ...]) -> Function:
    relu = has_relu(layer)

    def run(p: Arrays, s: Arrays, x: jax.Array, *residual: jax.Array) -> tuple[jax.Array, dict]:
        axes = tuple(range(x.ndim - 1))
        # Both moments in one pass over x, as flax does by default.
        mean = jnp.mean(x, axes)
        var = jnp.maximum(jnp.mean(x * x, axes) - mean * mean, 0)
        y = (x - mean) * (lax.rsqrt(var + layer.eps) * p["gamma"]) + p["beta"]
        y = y + residual[0] if residual else y
        m, n = layer.momentum, x.size // x.shape[-1]
        new = {"mean": (1 - m) * s["mean"] + m * mean, "var": (1 - m) * s["var"] + m * var * (n / max(1, n - 1))}
        return (jax.nn.relu(y) if relu else y), new

    return run


def _max_pool(layer: hl.MaxPool, shape: tuple[int, ...]) -> Function:
    windows = layer.windows(shape)
    if all((w.kernel, w.pad_lo, w.pad_hi) == (w.stride, 0, 0) and n % w.kernel == 0 for w, n in zip(windows, shape)):
        (h, w), (i, j) = shape[:2], (v.kernel for v in windows)
        # On CPUs the gradient of `lax.reduce_window` is several times slower.
        return _plain(lambda x: x.reshape(x.shape[0], h // i, i, w // j, j, x.shape[-1]).max((2, 4)))
    window, strides = (1, *(w.kernel for w in windows), 1), (1, *(w.stride for w in windows), 1)
    padding = ((0, 0), *((w.pad_lo, w.pad_hi) for w in windows), (0, 0))
    return _plain(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding))


def _add(layer: hl.Add, shape: tuple[int, ...]) -> Function:
    relu = has_relu(layer)
    return _plain(lambda *xs: jax.nn.relu(sum(xs)) if relu else sum(xs))


def _cross_entropy(x: jax.Array, target: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), target, axis=-1))


def _binary_cross_entropy(x: jax.Array, t: jax.Array) -> jax.Array:
    return jnp.mean(jnp.maximum(x, 0) - x * t + jnp.log1p(jnp.exp(-jnp.abs(x))))


#: Builders of a layer's function, from its description and the sample shape of its first input.
FUNCTIONS: dict[type, Callable[[Any, tuple[int, ...]], Function]] = {
    hl.Conv: _conv,
    hl.ConvTranspose: _transposed,
    hl.BatchNorm: _batch_norm,
    hl.MaxPool: _max_pool,
    hl.Add: _add,
    hl.ReLU: lambda layer, shape: _plain(jax.nn.relu),
    hl.Concat: lambda layer, shape: _plain(lambda *xs: jnp.concatenate(xs, axis=-1)),
    hl.GlobalAveragePool: lambda layer, shape: _plain(lambda x: jnp.mean(x, axis=(1, 2))),
    hl.Dense: lambda layer, shape: lambda p, s, x: (x @ p["w"].T + p["b"], {}),
    hl.SoftmaxCrossEntropy: lambda layer, shape: _plain(_cross_entropy),
    hl.BinaryCrossEntropyWithLogits: lambda layer, shape: _plain(_binary_cross_entropy),
}

#: Axis order from halograd's ``(K, *kernel, C)`` to ``(*kernel, C, K)``.
WEIGHTS: dict[type, Callable[[np.ndarray], np.ndarray]] = {hl.Conv: lambda w: w.transpose(1, 2, 3, 0)}
