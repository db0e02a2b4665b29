"""Helpers for tests of one loss of random predictions: targets, an executor, value and gradient, weights by torch."""

import numpy as np

import halograd as hg
from halograd.kernels import get_backend
from halograd.layers import Input, Network
from halograd.layers.strategy import Strategy
from halograd.training.evaluation import Evaluation
from halograd.training.executor import Executor
from tests.layers.norms import close
from tests.layers.oracle import torch

SHAPE, BATCH = (5, 3, 4), 3
AXES = ("sample", "height", "width")
CLASS_WEIGHTS = (0.5, 2.0, 0.0, 1.5)


def target(kind, shape, batch=BATCH):
    """Return a random target of this kind for predictions of this sample shape."""
    rng = np.random.default_rng(7)
    if kind == "class":
        return rng.integers(0, shape[-1], (batch, *shape[:-1], 1))
    if kind == "mask":
        return rng.integers(0, 2, (batch, *shape)).astype(float)
    return rng.random((batch, *shape)) if kind == "share" else rng.standard_normal((batch, *shape))


def make_executor(make, shape, given, comm, parts, dtype="float64", backend="numpy", trainable=True):
    """Create an executor of one loss of an input ``x`` of this sample shape.

    `given` are the other inputs, whose values are set: the target ``t``, and the weights ``w`` if there are any.
    """
    inputs = dict(zip("tw", given))
    nodes = [Input(a.shape[1:], name, "int32" if a.dtype.kind == "i" else "compute") for name, a in inputs.items()]
    network, probed = Network({"loss": make()(Input(shape, "x"), *nodes)}), ["x"] if trainable else []
    kernels, strategy = get_backend(backend), Strategy(parts)
    executor = Executor(network, comm, kernels, len(given[0]), strategy, dtype, trainable=trainable, probed=probed)
    for name, array in inputs.items():
        executor.set_input(name, array)
    return executor


def run_loss(make, inputs, comm, parts, dtype="float64", backend="numpy", valid=None):
    """Return the loss and its gradient, the same on all ranks. Collective over `comm`.

    `inputs` are arrays of the whole batch: prediction, target, perhaps weights. Only the first `valid` samples count;
    by default all do.
    """
    x, *given = inputs
    with make_executor(make, x.shape[1:], given, comm, parts, dtype, backend) as executor:
        executor.set_input("x", x)
        # Twice: what the first step leaves in the buffers must not matter.
        for count in (len(x), len(x) if valid is None else valid):
            executor.mode.valid = count
            executor.forward()
            loss = executor.loss_value()
            executor.backward()
        found = executor.program.values["x"]
        place, block = found.layout.boxes[comm.rank].slices(), executor.runner.view(found.dy)
        # As one message: a `Gather` has channels, which take longer to make than all that is computed here.
        losses, places, blocks = zip(*comm.allgather_objects((loss, place, block)))
        assert len(set(losses)) == 1
        dx = np.full(x.shape, np.nan, block.dtype)
        for place, block in zip(places, blocks):
            dx[place] = block
        return loss, dx


def check(found, want, factor=20):
    """Assert that loss and gradient equal `want` in float64, within `factor` roundings (`close`)."""
    loss, dx = found
    assert abs(loss - want[0]) <= 1e-13 * max(1, abs(want[0])), f"expected a loss of {want[0]}, got {loss}"
    close(dx, want[1], factor=factor)


def scores_of(executor, metrics=()):
    """Return the scores of the current batch from an evaluation. Collective."""
    evaluation = Evaluation(executor, metrics=metrics)
    evaluation.begin()
    executor.forward(training=False)
    evaluation.add()
    found = evaluation.finish()
    evaluation.close()
    return found


# -- losses with weights, and their value and gradient by torch in float64 ------------------------------

FORMS = {"position": (5, 3, 1), "element": SHAPE, "column": (1, 3, 1), "sample, with axes": (1, 1, 1), "sample": (1,)}


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
WEIGHTED = {
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
OF_POSITIONS = [name for name in WEIGHTED if name.startswith("ce") or name == "dice per sample"]
SOME_WEIGHTED = ("ce, weights", "bce, weights", "mse", "focal, weights", "dice per sample")
FORMED = [
    (name, form)
    for name in WEIGHTED
    for form in (FORMS if name in SOME_WEIGHTED else ("position", "element", "sample"))
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
