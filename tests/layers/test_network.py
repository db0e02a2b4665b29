"""Networks: which losses they may have, and what depends on the loss."""

import pytest

from halograd.layers import (
    Conv,
    Dense,
    GlobalAveragePool,
    Input,
    MeanSquaredError,
    Network,
    ReLU,
    SoftmaxCrossEntropy,
    training_only,
)
from halograd.models import googlenet


def nodes():
    x, target = Input((6, 6, 2), name="x"), Input((6, 6, 2), name="target")
    return Conv(2, 3, padding=1, name="conv")(x), target


def mse(*inputs, name="mse"):
    return MeanSquaredError(name=name)(*inputs)


def test_a_second_loss_is_refused():
    y, target = nodes()
    for other in ("aside", "prediction"):
        with pytest.raises(ValueError, match=r"no loss but the output named 'loss', got 'second' \(MeanSquared"):
            Network({"loss": mse(y, target), other: mse(ReLU()(y), target, name="second")})
    with pytest.raises(ValueError, match=r"got 'mse' \(MeanSquaredError\) too; .* make it the output 'loss'"):
        Network({"error": mse(y, target)})


def test_a_loss_of_losses_is_refused():
    y, target = nodes()
    with pytest.raises(ValueError, match="expected no loss but the output named 'loss', got 'mse'"):
        Network({"loss": ReLU()(mse(y, target))})


def test_a_target_with_parameters_is_refused():
    """Its gradient would be missing."""
    y, target = nodes()
    Network({"loss": mse(y, ReLU()(target))})
    message = "expected a target of 'mse' without parameters, got one that depends on 'teacher'.*make it an Input"
    with pytest.raises(ValueError, match=message):
        Network({"loss": mse(y, ReLU()(Conv(2, 1, name="teacher")(target)))})


def test_what_the_loss_depends_on():
    y, target = nodes()
    aside = Dense(3, name="dense")(GlobalAveragePool(name="pool")(y))
    assert Network({"loss": mse(y, target), "aside": aside}).trained == {"conv", "mse"}
    assert Network({"aside": aside}).trained == {"conv", "pool", "dense"}, "without a loss, every layer may be"


def test_auxiliary_predictions_are_trained():
    x, target = Input((4,), name="x"), Input((1,), name="target", dtype="int32")
    first, second = Dense(3, name="first")(x), Dense(3, name="second")(x)
    loss = SoftmaxCrossEntropy(name="ce")(first, target)
    loss = loss + training_only(0.3 * SoftmaxCrossEntropy()(second, target))
    assert Network({"prediction": first, "loss": loss}).trained == {"first", "second", "ce"}
    network = googlenet()
    assert network.trained == set(network.layers)


def test_an_input_that_no_layer_reads_is_refused():
    x, other = Input((4, 3), "x"), Input((4, 3), "other")
    message = r"network 'n': expected inputs that layers read, got 'other', which is an output alone; leave it out"
    with pytest.raises(ValueError, match=message):
        Network({"y": Conv(3, 1)(x), "x": x, "other": other}, "n")
