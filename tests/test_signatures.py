"""Classes of the user: methods that do not take the library's arguments are rejected before they are called."""

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd import signatures
from halograd.data import ArrayDataset
from halograd.errors import UserError
from halograd.layers import Loss
from halograd.models.own import build_own
from halograd.signatures import check_methods
from tests.support.refusals import refusals
from tests.training.runs import OPTIONS, unet

X, T, W = hg.Input((4, 4, 1), "x"), hg.Input((4, 4, 1), "t"), hg.Input((4, 4, 1), "w")


def method(name, function, base=hg.Layer, **attributes):
    """Return an object of a class with one method of this name."""
    return type("Own", (base,), {name: function, **attributes})()


class Positional(Loss):
    """Loss whose method has other parameter names than documented, and a default for one."""

    takes_weights = True

    def local(self, y, t, gradient, factor, buffers=None, weights=None):
        return 0.0


class Anything(Loss):
    takes_weights = True

    def local(self, *arguments, **more):
        return 0.0

    def check(self, prediction, target):
        pass


class OneInput(hg.Layer):
    def parameters(self, shape):
        return {}

    def forward(self, inputs, params, box, extra=0):
        return inputs[0]

    backward = hg.Layer.backward
    flops = staticmethod(lambda shape: 0)


class Narrow(hg.Conv):
    """Convolution that overrides one method with other parameters than the library's."""

    def parameters(self, shape):
        return super().parameters(shape)


def test_what_takes_the_arguments_is_fine():
    """Methods may use any names, defaults, gathered arguments, or one input as the documented layers do."""
    for loss in (Positional(), Anything()):
        assert loss(X, T).shape == (1,) and loss(X, T, W).shape == (1,)
    assert OneInput()(X).shape == X.shape and Narrow(2, 3)(X).shape == (2, 2, 2)
    check_methods(object())


def test_classes_of_the_library_are_not_looked_at(monkeypatch):
    """Classes of the library are not checked, because a network may have thousands of layers."""
    monkeypatch.setattr(signatures.inspect, "getmembers", lambda *_: pytest.fail("looked at"))
    assert hg.Conv(2, 3)(X).shape == (2, 2, 2)


test_methods_that_kernels_replace = refusals(
    (
        lambda: method("forward", lambda self, inputs, params, box: inputs[0], hg.ReLU)(X),
        r"Own: expected no forward\(\) in a class derived from ReLU, whose kernels compute instead, got one",
    ),
    (
        lambda: method("local", lambda self, prediction, target, dx, scale, work: 0.0, hg.MeanSquaredError)(X, T),
        r"Own: expected no local\(\) in a class derived from a loss that has kernels, got one; derive it from Loss",
    ),
)
test_losses = refusals(
    (
        lambda: method("local", lambda self, x, t: 0.0, Loss)(X, T),
        "Own.local: expected a method that takes (self, prediction, target, dx, scale, work), got (self, x, t): "
        "too many positional arguments",
    ),
    (
        lambda: method("local", lambda self, x, t, dx, scale: 0.0, hg.MeanSquaredError)(X, T),
        "takes (self, prediction, target, dx, scale, work), got (self, x, t, dx, scale): too many",
    ),
    (
        lambda: method("local", lambda self, x, t, dx, scale, work: 0.0, Loss, takes_weights=True)(X, T, W),
        "Own.local: expected a method that takes (self, prediction, target, dx, scale, work, weights=None), got ",
    ),
    (
        lambda: method("local", lambda self, x, t, dx, scale, work, *, smooth: 0.0, Loss)(X, T),
        "got (self, x, t, dx, scale, work, *, smooth): missing a required argument: 'smooth'",
    ),
    (lambda: method("local", 3, Loss)(X, T), "Own.local: expected a method that takes (self, prediction, "),
    (
        lambda: method("check", lambda self, x: None, Loss)(X, T),
        "Own.check: expected a method that takes (self, shape0, shape1), got (self, x)",
    ),
    (
        lambda: method("metric_specs", lambda self: (), Loss)(X, T),
        "Own.metric_specs: expected a method that takes (self, prediction, target), got (self)",
    ),
    error=UserError,
    literal=True,
)

test_layers = refusals(
    (
        lambda: method("forward", lambda self, x: x)(X),
        "Own.forward: expected a method that takes (self, inputs, params, box), got (self, x)",
    ),
    (
        lambda: method("backward", lambda self, dy, inputs: dy)(X),
        "Own.backward: expected a method that takes (self, dy, inputs, params, box), got (self, dy, inputs)",
    ),
    (
        lambda: method("parameters", lambda self, shape: {})(X, T),
        "Own.parameters: expected a method that takes (self, shape0, shape1), got (self, shape)",
    ),
    (
        lambda: method("output_shape", lambda self: (4, 4, 1))(X),
        "Own.output_shape: expected a method that takes (self, shape), got (self)",
    ),
    error=UserError,
    literal=True,
)


class Late(hg.Callback):
    def on_epoch(self, epoch):
        pass


def test_callbacks(tmp_path):
    """Callbacks are checked before the run begins; the error would otherwise appear an epoch later."""
    with pytest.raises(UserError, match=r"Late\.on_epoch: .* \(self, epoch, scores\), got \(self, epoch\)"):
        hg.fit(unet(), "none.h5", tmp_path / "out", comm=MPI.COMM_SELF, callbacks=[Late()], **OPTIONS)
    assert not (tmp_path / "out").exists()


class Whole(ArrayDataset):
    def read(self, name, indices):
        return self.arrays[name][indices]


def test_data_sets(tmp_path):
    data = Whole({"x": np.zeros((8, 16, 16, 3)), "target": np.zeros((8, 16, 16, 1))})
    with pytest.raises(UserError, match=r"Whole\.read: .* \(self, name, indices, box, out\), got \(self, name, ind"):
        hg.fit(unet(), data, tmp_path / "out", comm=MPI.COMM_SELF, **OPTIONS)


NET = """
import halograd as hg

class Mean(hg.layers.Loss):
    def local(self, prediction, target):
        return abs(prediction - target).mean()

def build():
    y = hg.Conv(1, 3, padding=1)(hg.Input((8, 8, 1), "x"))
    return hg.Network({"prediction": y, "loss": Mean()(y, hg.Input((8, 8, 1), "target"))})
"""


def test_one_line_with_the_place(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    with pytest.raises(UserError, match=r"Mean\.local: .*, got \(self, prediction, target\).*, line 10\)$") as error:
        build_own(f"{tmp_path / 'net.py'}:build", {})
    assert "\n" not in str(error.value)
