"""Tests of networks: allowed losses, dependencies of the loss, given initial values."""

import numpy as np
import pytest

import halograd as hg
from halograd import layers
from halograd.layers.resized import resized
from halograd.layers.settings import fingerprint, settings_of
from halograd.models import googlenet
from tests.layers.cases import LAYERS


def nodes():
    x, target = hg.Input((6, 6, 2), name="x"), hg.Input((6, 6, 2), name="target")
    return hg.Conv(2, 3, padding=1, name="conv")(x), target


def mse(*inputs, name="mse"):
    return hg.MeanSquaredError(name=name)(*inputs)


def test_outputs_that_nothing_computes_are_refused():
    y, _ = nodes()
    with pytest.raises(TypeError, match=r"the output of a layer as 'loss', got MeanSquaredError"):
        hg.Network({"prediction": y, "loss": hg.MeanSquaredError()})
    with pytest.raises(TypeError, match=r"the output of a layer as 'shape', got tuple$"):
        hg.Network({"prediction": y, "shape": y.shape})


ONE_INPUT = [make() for make, shapes in LAYERS.values() if len(shapes) == 1 and make().kind != "BatchNorm"]
ONE_INPUT.append(hg.Log())


@pytest.mark.parametrize("layer", ONE_INPUT, ids=lambda layer: layer.kind)
def test_layers_of_one_input_refuse_more(layer):
    """A layer of one input rejects more inputs, because a norm that ignored the second one would be wrong."""
    for count in (0, 2, 3):
        with pytest.raises(ValueError, match=f"{layer.kind}: expected 1 input, got {count}; join more by Add"):
            layer(*(hg.Input((4, 4, 2), f"x{i}") for i in range(count)))


def test_batch_norm_takes_one_input_or_two():
    with pytest.raises(ValueError, match=r"BatchNorm: expected .* got none"):
        layers.BatchNorm()()


@pytest.mark.parametrize(
    "layer", [hg.Conv(3, 3), layers.ConvTranspose(3, 2), hg.MaxPool(2), layers.Pad(1), layers.Pad(1, "circular")]
)
def test_what_slides_refuses_vectors(layer):
    """Convolutions and poolings reject vectors, as a signal without a channel axis is."""
    with pytest.raises(
        ValueError, match=f"{layer.kind}: expected samples with spatial axes.*a signal of one channel has"
    ):
        layer(hg.Input((16,)))


def test_a_second_loss_is_refused():
    y, target = nodes()
    for other in ("aside", "prediction"):
        with pytest.raises(ValueError, match=r"no loss but the output named 'loss', got 'second' \(MeanSquared"):
            hg.Network({"loss": mse(y, target), other: mse(hg.ReLU()(y), target, name="second")})
    with pytest.raises(ValueError, match=r"got 'mse' \(MeanSquaredError\) too; .* make it the output 'loss'"):
        hg.Network({"error": mse(y, target)})


def test_a_loss_of_losses_is_refused():
    y, target = nodes()
    with pytest.raises(ValueError, match="expected no loss but the output named 'loss', got 'mse'"):
        hg.Network({"loss": hg.ReLU()(mse(y, target))})


def test_a_target_with_parameters_is_refused():
    """A target that depends on parameters is an error, because their gradient would be missing."""
    y, target = nodes()
    hg.Network({"loss": mse(y, hg.ReLU()(target))})
    message = "expected a target of 'mse' without parameters, got one that depends on 'teacher'.*make it an Input"
    with pytest.raises(ValueError, match=message):
        hg.Network({"loss": mse(y, hg.ReLU()(hg.Conv(2, 1, name="teacher")(target)))})


def test_what_the_loss_depends_on():
    y, target = nodes()
    aside = hg.Dense(3, name="dense")(hg.GlobalAveragePool(name="pool")(y))
    assert hg.Network({"loss": mse(y, target), "aside": aside}).trained == {"conv", "mse"}
    assert hg.Network({"aside": aside}).trained == {"conv", "pool", "dense"}, "without a loss, every layer may be"


def test_the_name_of_a_layer_is_no_pattern():
    """As a pattern, "stage[0]" would match "stage0" only; copies of a network freeze layers by their names."""
    y = hg.Input((4, 4, 2), name="x")
    for name in ("stage[0]", "stage0", "last"):
        y = hg.Conv(2, 1, name=name)(y)
    frozen = hg.Network(y).freeze("stage[0]")
    assert frozen.frozen == {"stage[0]"}
    assert frozen.freeze("las*").frozen == resized(frozen, (6, 6)).freeze("last").frozen == {"stage[0]", "last"}


def test_copies_of_another_size_that_are_frozen_have_the_fingerprint_of_their_origin():
    y, _ = nodes()
    network = hg.Network(hg.Conv(1, 1, name="last")(y))
    assert fingerprint(resized(network, (8, 9)).freeze("conv")) == fingerprint(network)


def test_the_first_target_that_does_not_scale_is_named():
    """The message is the same on all ranks, whose sets have different orders."""
    y, _ = nodes()
    terms = [mse(y, hg.Resize(2)(hg.Input((3, 3, 2), name=f"target{k}")), name=f"mse{k}") for k in range(8)]
    network = hg.Network({"y": y, "loss": sum(terms[1:], start=terms[0])})
    with pytest.raises(ValueError, match=r"target 'target0' of 3 x 3 does not scale with predictions of 7 x 6"):
        resized(network, (7, 6))


def test_auxiliary_predictions_are_trained():
    x, target = hg.Input((4,), name="x"), hg.Input((1,), name="target", dtype="int32")
    first, second = hg.Dense(3, name="first")(x), hg.Dense(3, name="second")(x)
    loss = hg.SoftmaxCrossEntropy(name="ce")(first, target)
    loss = loss + hg.training_only(0.3 * hg.SoftmaxCrossEntropy()(second, target))
    assert hg.Network({"prediction": first, "loss": loss}).trained == {"first", "second", "ce"}
    network = googlenet()
    assert network.trained == set(network.layers)


def test_an_input_that_no_layer_reads_is_refused():
    x, other = hg.Input((4, 3), "x"), hg.Input((4, 3), "other")
    message = r"network 'n': expected inputs that layers read, got 'other', which is only an output; leave it out"
    with pytest.raises(ValueError, match=message):
        hg.Network({"y": hg.Conv(3, 1)(x), "x": x, "other": other}, "n")


@pytest.mark.parametrize("layer", [hg.Flatten(name="read"), hg.Conv(2, 3, name="read"), hg.MaxPool(2, name="read")])
def test_integers_that_no_loss_reads_are_refused(layer):
    """An integer input that is not a target of a loss is an error of the network."""
    x = hg.Input((9, 8, 1), name="number", dtype="uint8")
    message = "integers only where a loss compares with them, got 'number' of dtype uint8; remove its dtype"
    with pytest.raises(ValueError, match=message):
        hg.Network(layer(x))


def test_initial_values_that_are_given_are_those_of_the_network():
    x, w, calls = hg.Input((6, 6, 2), name="x"), np.arange(4.0).reshape(2, 1, 1, 2), []

    def read():
        calls.append(1)
        return np.array([5.0, 6.0])

    network = hg.Network(hg.Conv(2, 1, name="conv").initialized(w=w, b=hg.GivenValues((2,), read))(x))
    assert not calls, "nothing is read before it is needed"
    values = network.initial_values(seed=3)
    np.testing.assert_array_equal(values["conv/w"], w)
    assert values["conv/b"].tolist() == [5, 6] and len(calls) == 1
    drawn = hg.Network(hg.Conv(2, 1, name="conv").initialized(b=[5.0, 6.0])(x)).initial_values(seed=3)
    np.testing.assert_array_equal(
        drawn["conv/w"], hg.Network(hg.Conv(2, 1, name="conv")(x)).initial_values(3)["conv/w"]
    )


def test_initial_values_do_not_make_another_network():
    """Given initial values change neither fingerprint nor settings, so checkpoints still fit."""
    x = hg.Input((6, 6, 2), name="x")
    bare, begun = hg.Conv(2, 1, name="c"), hg.Conv(2, 1, name="c").initialized(b=[1.0, 2.0])
    assert fingerprint(hg.Network(bare(x))) == fingerprint(hg.Network(begun(x)))
    assert settings_of(bare, (6, 6, 2)) == settings_of(begun, (6, 6, 2))


def test_initial_values_that_fit_nothing_are_refused():
    x = hg.Input((6, 6, 2), name="x")
    with pytest.raises(ValueError, match=r"of shape \(2, 1, 1, 2\) for conv/w, got \(3,\)"):
        hg.Network(hg.Conv(2, 1, name="conv").initialized(w=np.zeros(3))(x))
    with pytest.raises(ValueError, match="expected initial values of w, b in layer 'conv', got some of 'gamma'"):
        hg.Network(hg.Conv(2, 1, name="conv").initialized(gamma=np.zeros(2))(x))


def test_a_network_begins_with_arrays_by_name():
    x = hg.Input((6, 6, 2), name="x")
    network = hg.Network(hg.ReLU(name="r")(hg.Conv(2, 1, name="conv")(x)))
    before = network.initial_values()
    network.begin_with({"conv/b": [5.0, 6.0]})
    with pytest.raises(ValueError, match=r"expected .* got those of 'cnv/b'"):
        network.begin_with({"conv/b": [1.0, 2.0], "cnv/b": [1.0, 2.0]})
    with pytest.raises(ValueError, match=r"for conv/w, got \(3,\)"):
        network.begin_with({"conv/b": [1.0, 2.0], "conv/w": np.zeros(3)})
    found = network.initial_values()
    assert found["conv/b"].tolist() == [5, 6]
    np.testing.assert_array_equal(found["conv/w"], before["conv/w"])


def test_inputs_are_of_a_known_type():
    with pytest.raises(ValueError, match=r"input 'mask': expected an integer dtype .int8.*, got 'int33'"):
        hg.Input((4, 4, 1), "mask", "int33")


@pytest.mark.parametrize("shape", [(), (4, 4, 4, 4, 1), (4, 0, 1)])
def test_inputs_have_channels_and_at_most_three_spatial_axes(shape):
    with pytest.raises(ValueError, match=r"input 'x': expected a shape \(\*spatial, C\) of at least 1 each"):
        hg.Input(shape)
