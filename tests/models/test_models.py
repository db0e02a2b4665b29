"""Models: published parameter counts, shapes, and what is refused."""

import pytest

from halograd.errors import UserError
from halograd.models import MODELS, build, lenet5, mesh, mesh_1k, mesh_2k, resnet50, unet2d, unet3d


def test_parameter_counts_are_the_published_ones():
    assert resnet50().parameter_count == 25_557_032
    assert lenet5(resolution=28).parameter_count == 61_706


def test_mesh_models_are_those_of_the_paper():
    """Six blocks of 3 (1K) or 5 (2K) units; the layers the paper measures; one prediction per 64 x 64 patch."""
    small, large = mesh_1k(), mesh_2k()
    assert sum(name.startswith("bn") for name in small.layers) == 18
    assert sum(name.startswith("bn") for name in large.layers) == 30
    first, last = large.layers["conv1_1"], large.layers["conv6_1"]
    assert first.inputs[0].shape == (2048, 2048, 18) and first.shape == (1024, 1024, 128)
    (window, _) = first.layer.windows(first.inputs[0].shape)
    assert (window.kernel, window.stride, window.pad_lo) == (5, 2, 2)
    assert last.inputs[0].shape == (64, 64, 384) and last.shape == (32, 32, 128)
    assert large.outputs["prediction"].shape == large.inputs["target"].shape == (32, 32, 1)


def test_mesh_with_decoder_predicts_every_cell():
    network = mesh(resolution=(64, 128), widths=(4, 6, 8), convs=1, decoder=True)
    assert network.outputs["prediction"].shape == (64, 128, 1)
    with pytest.raises(ValueError, match="expected multiples of 8, got 60 x 64"):
        mesh(resolution=(60, 64), widths=(4, 6, 8), decoder=True)


def test_unets_predict_every_element():
    assert unet2d(32, width=4, classes=5).outputs["prediction"].shape == (32, 32, 5)
    assert unet3d(16, width=4, channels=2).outputs["prediction"].shape == (16, 16, 16, 2)
    with pytest.raises(ValueError, match="expected multiples of 16"):
        unet2d(40)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_built_by_name_and_printed(name):
    text = build(name).summary(batch=2)
    assert text.startswith(f"{build(name).name}, batch 2") and text.splitlines()[-1].startswith("total")


def test_what_build_refuses():
    with pytest.raises(UserError, match=r"expected one of lenet5, mesh, .*, got 'resnet'"):
        build("resnet")
    with pytest.raises(UserError, match=r"lenet5 was not made: .*colour.*; its options are classes, channels"):
        build("lenet5", colour=True)
    with pytest.raises(UserError, match="mesh was not made: resolution"):
        build("mesh", resolution=100, decoder=True)
