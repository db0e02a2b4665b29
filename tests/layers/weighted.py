"""Losses with weights: what torch says of them in float64, and how they are run."""

import numpy as np

from halograd.kernels import get_backend
from halograd.layers import (
    AbsoluteError,
    BinaryCrossEntropyWithLogits,
    Dice,
    Focal,
    Huber,
    Input,
    MeanSquaredError,
    Network,
    SoftmaxCrossEntropy,
    Tversky,
)
from halograd.layers.strategy import Strategy
from halograd.training.executor import Executor
from tests.layers.norms import close
from tests.layers.oracle import torch

SHAPE, BATCH = (5, 3, 4), 3
AXES = ("sample", "height", "width")
CLASS_WEIGHTS = (0.5, 2.0, 0.0, 1.5)
FORMS = {
    "position": (5, 3, 1),
    "element": SHAPE,
    "column": (1, 3, 1),
    "sample, with axes": (1, 1, 1),
    "sample": (1,),
}


# -- what torch says ---------------------------------------------------------------------------------


def mean(values, w, normalization):
    """Of the losses of all elements ``(N, *spatial, C)``."""
    w = w.expand(values.shape)
    return (values * w).sum() / (w.sum() if normalization == "weights" else values.numel())


def cross_entropy(x, t, w, smoothing=0.0, class_weights=None, normalization="count"):
    """`functional.cross_entropy` per position, times the weight."""
    lib = torch()
    given = None if class_weights is None else lib.tensor(class_weights, dtype=lib.float64)
    functional = lib.nn.functional
    found = functional.cross_entropy(x.movedim(-1, 1), t[..., 0], given, reduction="none", label_smoothing=smoothing)
    w = w.expand((*x.shape[:-1], 1))[..., 0]
    own = w if given is None else w * given[t[..., 0]]
    return (found * w).sum() / (own.sum() if normalization == "weights" else found.numel())


def elementwise(name, normalization="count", **options):
    def found(x, t, w):
        values = getattr(torch().nn.functional, name)(x, t, reduction="none", **options)
        return mean(values, w, normalization)

    return found


def focal(normalization):
    def found(x, t, w):
        p = torch().sigmoid(x)
        ce = torch().nn.functional.binary_cross_entropy_with_logits(x, t, reduction="none")
        values = (0.25 * t + 0.75 * (1 - t)) * (t * (1 - p) + (1 - t) * p) ** 2 * ce
        return mean(values, w, normalization)

    return found


def overlap(activation, reduction, ratio, smooth=1.0):
    """Dice for ``ratio = (2, 1, 1)``; the sums have weights."""

    def found(x, t, w):
        lib = torch()
        p = lib.sigmoid(x) if activation == "sigmoid" else lib.softmax(x, -1)
        if t.shape != x.shape:
            t = lib.nn.functional.one_hot(t[..., 0], x.shape[-1]).double()
        axes = tuple(range(1 if reduction == "sample" else 0, x.ndim - 1))
        terms = [w * a for a in (p * t, p, t)]
        both, predicted, true = (a.sum(axes) for a in terms) if axes else terms
        n, a, b = ratio
        if n == 2:
            return (1 - (2 * both + smooth) / (predicted + true + smooth)).mean()
        return (1 - (both + smooth) / (both + a * (predicted - both) + b * (true - both) + smooth)).mean()

    return found


#: Name -> layer, what torch says, kind of target.
LOSSES = {
    "ce": (SoftmaxCrossEntropy, cross_entropy, "class"),
    "ce, weights": (
        lambda: SoftmaxCrossEntropy(CLASS_WEIGHTS, label_smoothing=0.2),
        lambda x, t, w: cross_entropy(x, t, w, 0.2, CLASS_WEIGHTS, "weights"),
        "class",
    ),
    "ce, alone": (
        lambda: SoftmaxCrossEntropy(normalization="weights"),
        lambda x, t, w: cross_entropy(x, t, w, normalization="weights"),
        "class",
    ),
    "bce": (BinaryCrossEntropyWithLogits, elementwise("binary_cross_entropy_with_logits"), "mask"),
    "bce, weights": (
        lambda: BinaryCrossEntropyWithLogits(normalization="weights"),
        elementwise("binary_cross_entropy_with_logits", "weights"),
        "mask",
    ),
    "mse": (MeanSquaredError, elementwise("mse_loss"), "real"),
    "mse, weights": (lambda: MeanSquaredError(normalization="weights"), elementwise("mse_loss", "weights"), "real"),
    "l1": (AbsoluteError, elementwise("l1_loss"), "real"),
    "huber, weights": (
        lambda: Huber(0.7, normalization="weights"),
        elementwise("huber_loss", "weights", delta=0.7),
        "real",
    ),
    "focal": (Focal, focal("count"), "mask"),
    "focal, weights": (lambda: Focal(normalization="weights"), focal("weights"), "mask"),
    "dice": (Dice, overlap("sigmoid", "batch", (2, 1, 1)), "mask"),
    "dice per sample": (
        lambda: Dice("softmax", "sample", 0.5),
        overlap("softmax", "sample", (2, 1, 1), 0.5),
        "class",
    ),
    "tversky": (lambda: Tversky(0.3, 0.7), overlap("sigmoid", "batch", (1, 0.3, 0.7)), "mask"),
}
#: Those of which a weight is of the whole position.
OF_POSITIONS = [name for name in LOSSES if name.startswith("ce") or name == "dice per sample"]
SOME = ("ce, weights", "bce, weights", "mse", "focal, weights", "dice per sample")
CASES = [
    (name, form)
    for name in LOSSES
    for form in (FORMS if name in SOME else ("position", "element", "sample"))
    if not (form == "element" and name in OF_POSITIONS)
]


def weights_of(form, batch=BATCH):
    """Numbers in [0, 3), some of them 0."""
    found = 3 * np.random.default_rng(5).random((batch, *FORMS[form]))
    found[found < 0.6] = 0
    return found


def reference(function, x, t, w):
    """Loss and its gradient by torch."""
    lib = torch()
    given = lib.tensor(x.copy(), requires_grad=True)
    w = w.reshape((*w.shape[:1], *(1,) * (x.ndim - w.ndim), *w.shape[1:]))
    loss = function(given, lib.tensor(t.copy()), lib.tensor(w.copy()))
    loss.backward()
    return float(loss.detach()), given.grad.numpy()


def run(make, x, t, w, comm, parts, dtype="float64", backend="numpy", valid=None):
    """Loss, the same on all ranks, and on rank 0 its gradient. Collective."""
    kind = "int32" if t.dtype.kind == "i" else "compute"
    nodes = [Input(x.shape[1:], "x"), Input(t.shape[1:], "t", kind), Input(w.shape[1:], "w")]
    network, strategy = Network({"loss": make()(*nodes)}), Strategy(parts)
    made = Executor(network, comm, get_backend(backend), len(x), strategy, dtype, probed=["x"])
    with made as executor:
        for name, array in (("x", x), ("t", t), ("w", w)):
            executor.set_input(name, array)
        for count in (len(x), len(x) if valid is None else valid):
            executor.mode.valid = count
            executor.forward()
            loss = executor.loss_value()
            executor.backward()
        assert len(set(comm.allgather_objects(loss))) == 1
        return loss, executor.gather("x", gradient=True)


def check(found, want, factor=20):
    loss, dx = found
    assert abs(loss - want[0]) <= 1e-13 * max(1, abs(want[0]))
    if dx is not None:
        close(dx, want[1], factor=factor)
