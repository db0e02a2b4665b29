"""Losses with weights, and their value and gradient by torch in float64."""

import numpy as np

import halograd as hg
from tests.layers.losses import BATCH, CLASS_WEIGHTS, SHAPE
from tests.layers.oracle import torch

FORMS = {"position": (5, 3, 1), "element": SHAPE, "column": (1, 3, 1), "sample, with axes": (1, 1, 1), "sample": (1,)}


# -- what torch says ---------------------------------------------------------------------------------


def mean(values, w, normalization):
    """Return the mean of the losses of all elements ``(N, *spatial, C)``, with weights."""
    w = w.expand(values.shape)
    return (values * w).sum() / (w.sum() if normalization == "weights" else values.numel())


def cross_entropy(x, t, w, smoothing=0.0, class_weights=None, normalization="count"):
    """Return the cross entropy of torch with weights of positions, reduced by `normalization`."""
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
    """Return a function that computes an overlap loss with weighted sums; Dice for ``ratio = (2, 1, 1)``."""

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
    "ce": (hg.SoftmaxCrossEntropy, cross_entropy, "class"),
    "ce, weights": (
        lambda: hg.SoftmaxCrossEntropy(CLASS_WEIGHTS, label_smoothing=0.2),
        lambda x, t, w: cross_entropy(x, t, w, 0.2, CLASS_WEIGHTS, "weights"),
        "class",
    ),
    "ce, alone": (
        lambda: hg.SoftmaxCrossEntropy(normalization="weights"),
        lambda x, t, w: cross_entropy(x, t, w, normalization="weights"),
        "class",
    ),
    "bce": (hg.BinaryCrossEntropyWithLogits, elementwise("binary_cross_entropy_with_logits"), "mask"),
    "bce, weights": (
        lambda: hg.BinaryCrossEntropyWithLogits(normalization="weights"),
        elementwise("binary_cross_entropy_with_logits", "weights"),
        "mask",
    ),
    "mse": (hg.MeanSquaredError, elementwise("mse_loss"), "real"),
    "mse, weights": (lambda: hg.MeanSquaredError(normalization="weights"), elementwise("mse_loss", "weights"), "real"),
    "l1": (hg.AbsoluteError, elementwise("l1_loss"), "real"),
    "huber, weights": (
        lambda: hg.Huber(0.7, normalization="weights"),
        elementwise("huber_loss", "weights", delta=0.7),
        "real",
    ),
    "focal": (hg.Focal, focal("count"), "mask"),
    "focal, weights": (lambda: hg.Focal(normalization="weights"), focal("weights"), "mask"),
    "dice": (hg.Dice, overlap("sigmoid", "batch", (2, 1, 1)), "mask"),
    "dice per sample": (
        lambda: hg.Dice("softmax", "sample", 0.5),
        overlap("softmax", "sample", (2, 1, 1), 0.5),
        "class",
    ),
    "tversky": (lambda: hg.Tversky(0.3, 0.7), overlap("sigmoid", "batch", (1, 0.3, 0.7)), "mask"),
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
    """Return random weights in [0, 3), some of them 0."""
    found = 3 * np.random.default_rng(5).random((batch, *FORMS[form]))
    found[found < 0.6] = 0
    return found


def reference(function, x, t, w):
    """Return a loss and its gradient, computed by torch."""
    lib = torch()
    given = lib.tensor(x.copy(), requires_grad=True)
    w = w.reshape((*w.shape[:1], *(1,) * (x.ndim - w.ndim), *w.shape[1:]))
    loss = function(given, lib.tensor(t.copy()), lib.tensor(w.copy()))
    loss.backward()
    return float(loss.detach()), given.grad.numpy()
