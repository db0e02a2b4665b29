"""Small random networks with random strategies, and the results of one of their steps."""

import math
from contextlib import closing
from dataclasses import replace

import numpy as np

import halograd as hg
from halograd.dtensor import Box
from halograd.kernels import get_backend
from halograd.layers.strategy import Strategy
from halograd.program.runner import Runner
from halograd.testing import random_array
from halograd.training.executor import Executor, Gather
from tests.layers.cuts import primes, random_parts

CLASSES = 3
#: Most elements of one sample's array.
LARGEST = 800


class Gate(hg.Layer):
    """Custom layer ``y[o] = x0[o] * sum of x1 over the window of o``, with two inputs of different halos."""

    def __init__(self, reach):
        super().__init__()
        self.reach = reach

    def input_boxes(self, box, *shapes):
        grown = [(a - self.reach, b + self.reach) for a, b in box.ranges[1:-1]]
        return (box, Box.of_ranges([box.ranges[0], *grown, box.ranges[-1]]))

    def _windows(self, array, shape):
        for offset in np.ndindex(*[2 * self.reach + 1] * (len(shape) - 2)):
            yield array[(slice(None), *(slice(o, o + n) for o, n in zip(offset, shape[1:-1])))]

    def forward(self, inputs, params, box):
        return inputs[0] * sum(self._windows(inputs[1], box.shape))

    def backward(self, dy, inputs, params, box):
        around = np.zeros_like(inputs[1])
        for view in self._windows(around, box.shape):
            view += dy * inputs[0]
        return [dy * sum(self._windows(inputs[1], box.shape)), around], {}


class Centre(hg.Layer):
    """Layer ``y = amount * (x - mean of x over its sample and channel)``, which always reads whole samples."""

    def parameters(self, shape):
        return {"amount": hg.Parameter((shape[-1],), "ones", decay=False)}

    def input_boxes(self, box, shape):
        return (Box.of_ranges([box.ranges[0], *((0, n) for n in shape)]),)

    def _axes(self, x):
        return tuple(range(1, x.ndim - 1))

    def _here(self, box):
        return (slice(None), *(slice(a, b) for a, b in box.ranges[1:]))

    def forward(self, inputs, params, box):
        (x,) = inputs
        return params["amount"] * (x[self._here(box)] - x.mean(self._axes(x), keepdims=True))

    def backward(self, dy, inputs, params, box):
        (x,) = inputs
        weighted = params["amount"] * dy
        dx = np.zeros_like(x)
        dx[self._here(box)] = weighted
        dx -= weighted.sum(self._axes(x), keepdims=True) / math.prod(x.shape[1:-1])
        centred = x[self._here(box)] - x.mean(self._axes(x), keepdims=True)
        return [dx], {"amount": np.sum(dy * centred, axis=(0, *self._axes(x)))}


class Graphs:
    """Generator of networks that depend only on the seed."""

    def __init__(self, seed, attentions=1):
        self.attentions = attentions
        self.rng = np.random.default_rng([1909, seed])
        self.axes = int(self.rng.choice([1, 2, 2, 2, 3]))
        self.batch = int(self.rng.integers(1, 4))
        largest = {1: 14, 2: 10, 3: 6}[self.axes]
        self.spatial = tuple(int(n) for n in self.rng.integers(3, largest, self.axes))

    def pick(self, *choices):
        return choices[int(self.rng.integers(len(choices)))]

    def per_axis(self, *choices):
        return tuple(self.pick(*choices) for _ in range(self.axes))

    def network(self):
        """Return a network of a trunk of a few layers and a head; unused values become outputs."""
        first = hg.Input((*self.spatial, self.pick(2, 4)), name="x")
        values = [first]
        if self.rng.random() < 0.3:
            values.append(hg.Input((*self.spatial, self.pick(2, 4)), name="x2"))
        for _ in range(int(self.rng.integers(3, 9))):
            node = self._layer(values)
            if node is not None and math.prod(node.shape) <= LARGEST:
                values.append(node)
        outputs = self._head([v for v in values if not isinstance(v, hg.Input)] or values)
        read = {n for v in [*values, *outputs.values()] for n in v.inputs}
        for i, v in enumerate(values):
            if v not in read and not isinstance(v, hg.Input):
                outputs[f"extra{i}"] = v
        names = list(outputs)
        self.rng.shuffle(names)
        return hg.Network({n: outputs[n] for n in names})

    def _layer(self, values):
        x = values[max(0, len(values) - 1 - int(self.rng.integers(0, 3)))]
        same = [v for v in values if v.shape == x.shape]
        alike = [v for v in values if v.shape[:-1] == x.shape[:-1]]
        make = self.pick(
            self._conv, self._conv, self._conv, self._norm, self._pool, self._pool, self._transposed, self._resize,
            self._add, self._add, self._concat, self._dropout, self._pointwise, self._gate, self._centre, self._group,
            self._adaptive, self._pixels, *[self._attention] * self.attentions,
        )  # fmt: skip
        try:
            return make(x, same, alike)
        except ValueError:
            return None  # a window that does not fit

    def _conv(self, x, same, alike):
        return hg.Conv(
            self.pick(2, 4),
            self.per_axis(1, 2, 3, 3, 4),
            self.per_axis(1, 1, 2, 3),
            self.pick("same", 0, [(self.pick(0, 1, 2), self.pick(0, 1, 3)) for _ in range(self.axes)]),
            self.per_axis(1, 1, 2),
            bias=self.pick(True, False),
            groups=self.pick(1, 1, 2),
            activation=self.pick(None, "relu"),
        )(x)

    def _norm(self, x, same, alike):
        # A generous eps: without it a variance near zero enlarges the roundings of everything before.
        return hg.BatchNorm(eps=0.1, activation=self.pick(None, "relu", "elu"), affine=self.pick(True, False))(x)

    def _pool(self, x, same, alike):
        layer = self.pick(hg.MaxPool, hg.AveragePool)
        kernel = self.per_axis(2, 3)
        return layer(kernel, self.per_axis(1, 2, 3), self.pick(0, 1), ceil_mode=self.pick(True, False))(x)

    def _adaptive(self, x, same, alike):
        layer = self.pick(hg.AdaptiveAveragePool, hg.AdaptiveMaxPool)
        return layer(1 if self.rng.random() < 0.1 else self.per_axis(2, 3, 4))(x)

    def _pixels(self, x, same, alike):
        return hg.PixelShuffle(2)(x) if x.shape[-1] % 2**self.axes == 0 else hg.PixelUnshuffle(2)(x)

    def _transposed(self, x, same, alike):
        return hg.ConvTranspose(
            2, self.per_axis(1, 2, 3), self.per_axis(1, 2), self.pick(0, 1), groups=self.pick(1, 2)
        )(x)

    def _resize(self, x, same, alike):
        size = tuple(max(2, int(n * self.pick(0.6, 1.4, 2))) for n in x.shape[:-1])
        mode = self.pick("nearest", "linear", "cubic", "area")
        return hg.Resize(size=size, mode=mode, align_corners=mode in ("linear", "cubic") and self.pick(True, False))(x)

    def _add(self, x, same, alike):
        others = [self.pick(*same) for _ in range(self.pick(1, 1, 2))]
        return hg.Add(self.pick(None, "relu"))(x, *others)

    def _concat(self, x, same, alike):
        return hg.Concat()(x, self.pick(*alike))

    def _dropout(self, x, same, alike):
        return self.pick(hg.Dropout, hg.ChannelDropout, hg.StochasticDepth)(0.3)(x)

    def _pointwise(self, x, same, alike):
        return self.pick(
            hg.ReLU, hg.LeakyReLU, hg.ELU, hg.Clamp, hg.GELU, hg.SiLU, hg.Tanh, hg.Softmax, hg.PReLU, hg.Scale,
            hg.Embedding,
        )()(x)  # fmt: skip

    def _group(self, x, same, alike):
        return hg.GroupNorm(2, eps=0.1)(x)

    def _attention(self, x, same, alike):
        rule = self.pick(
            {},
            {},
            {"window": self.per_axis(2, 3), "shift": self.per_axis(0, 1)},
            {"neighborhood": self.per_axis(2, 3), "dilation": self.per_axis(1, 2), "periodic": self.pick(False, True)},
        )
        heads, bias = self.pick(1, 2), self.pick(None, "relative")
        layer = hg.Attention(heads, bias=bias, dropout=self.pick(0.0, 0.0, 0.3), **rule)
        return layer(x, self.pick(*same), self.pick(*same))

    def _gate(self, x, same, alike):
        return Gate(self.pick(0, 1, 2))(x, self.pick(*same))

    def _centre(self, x, same, alike):
        return Centre()(x)

    def _head(self, values):
        """Return the outputs by name: the loss, and sometimes a second output whose parameters have no gradient."""
        last = values[-1]
        kind = self.pick("field", "field", "classes of positions", "vector", "vector")
        if kind == "field":
            return {"loss": hg.MeanSquaredError(name="mse")(last, hg.Input(last.shape, name="target"))}
        if kind == "classes of positions":
            target = hg.Input((*last.shape[:-1], 1), name="target", dtype=self.pick("int32", "int64"))
            scores = hg.Conv(CLASSES, 1)(last)
            normalization = self.pick("count", "weights")
            loss = hg.SoftmaxCrossEntropy(self.rng.random(CLASSES) + 0.5, normalization, name="ce")(scores, target)
            return {"loss": loss, "aside": hg.Conv(2, 1)(hg.ReLU()(last))}
        other = values[int(self.rng.integers(len(values)))]
        vectors = [self.pick(hg.GlobalAveragePool, hg.GlobalMaxPool, hg.Flatten)()(v) for v in (last, other)]
        vector = hg.Dense(CLASSES)(hg.Dropout(0.2)(hg.Concat()(*vectors)))
        vector = hg.Add()(vector, hg.Dense(CLASSES)(hg.ReLU()(vector)))
        target = hg.Input((1,), name="target", dtype="int64")
        return {"loss": hg.SoftmaxCrossEntropy(name="ce")(vector, target), "vector": vector}

    def strategy(self, network, size):
        """Draw parts and halo algorithms; some layers get others, with cuts of channels and possibly on fewer ranks."""
        axes = ("sample", *("depth", "height", "width")[3 - self.axes :])
        everyone = self._parts(axes, size)
        layers = {}
        apart = self.pick(0.0, 0.3, 0.7)
        for name in network.layers:
            own = {"halo": self.pick("pad", "overlap"), "attention": self.pick("auto", "gather", "ring")}
            if self.rng.random() < apart:
                ranks = size if self.rng.random() < 0.6 else int(self.rng.integers(1, size + 1))
                own |= random_parts(network.layers[name], ranks, self.rng)
            layers[name] = own
        return Strategy(everyone, layers, bucket_bytes=self.pick(1, 500, 4 << 20))

    def recomputed(self, strategy):
        """Draw layers whose outputs are computed again."""
        rules, halos = ("none", "pointwise", "block"), ("keep", "exchange")
        layers = {
            name: {**own, "recompute": self.pick(*rules), "recompute_halo": self.pick(*halos)}
            for name, own in strategy.layers.items()
        }
        return replace(strategy, layers=layers)

    def _parts(self, axes, size):
        parts = dict.fromkeys(axes, 1)
        for prime in primes(size):
            parts[axes[int(self.rng.integers(len(axes)))]] *= prime
        return parts


def poison(monkeypatch):
    """Fill transient arrays with NaN, so that a read before the first write changes the results."""
    made = Runner._array

    def poisoned(self, buffer):
        fresh = buffer not in self._arrays and buffer.location is None and not buffer.kept
        array = made(self, buffer)
        if fresh and array.dtype.kind == "f":
            array.fill(np.nan)
        return array

    monkeypatch.setattr(Runner, "_array", poisoned)


def batch_of(network, batch, step):
    """Return random inputs by name, which depend on the step."""
    arrays = {}
    for name, node in network.inputs.items():
        array = random_array((batch, *node.shape), name, step)
        arrays[name] = array if node.dtype == "compute" else (np.abs(array) * 10).astype(node.dtype) % CLASSES
    return arrays


def run(network, comm, batch, strategy, steps, backend="numpy", dtype="float64", keeps=True, debug=False):
    """Return whole values, gradients and loss of the last of `steps` on rank 0 (else None). Collective.

    Earlier steps must not affect the result. With `keeps` all values are kept, otherwise only the network's outputs.
    """
    probed = [n for n, node in network.inputs.items() if node.dtype == "compute" and n != "target"]
    kernels = get_backend(backend)
    kept = network.layers if keeps else ()
    options = {"probed": probed, "kept": kept, "debug": debug}
    with Executor(network, comm, kernels, batch, strategy, dtype, **options) as executor:
        for key, array in executor.store.params.items():
            array[...] = random_array(executor.store.shapes[key], key)[executor.store.box(key).slices()]
        for step in steps:
            executor.mode.step = step
            for name, array in batch_of(network, batch, step).items():
                executor.set_input(name, array)
            executor.forward()
            loss = executor.loss_value()
            executor.backward()
            executor.reducer.finish()
        losses = {n for n, node in network.layers.items() if hasattr(node.layer, "local")}
        known = network.layers if keeps else [network.names[node] for node in network.outputs.values()]
        outputs = [name for name in known if name not in losses]
        gradients = [name for name in probed if executor.program.values[name].gradient is not None]
        with closing(Gather(executor, outputs, gradients)) as way:
            result = dict(zip([*outputs, *(f"d{name}" for name in gradients)], way.run()))
        grads = executor.store.gather(comm, executor.store.grads)
        result |= {f"d{key}": array.copy() for key, array in (grads or {}).items()}
        result["loss"] = np.array([loss])
    return result if comm.rank == 0 else None
