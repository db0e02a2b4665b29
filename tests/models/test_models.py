"""Models and networks of the user: parameter counts, shapes, options, errors; small ones learn on several ranks."""

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from halograd.cli.run import run
from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.layers import Dropout, Network
from halograd.layers.total_loss import TotalLoss
from halograd.models import (
    MODELS,
    alexnet,
    build,
    googlenet,
    inception_v3,
    mesh,
    mesh_1k,
    mesh_2k,
    options_of,
    resnet50,
    unet2d,
    unet3d,
    vgg16,
)
from halograd.models.common import scaled
from halograd.models.own import load_function, source_of
from halograd.training.config import parse_config
from tests.models.small import SMALL, descend, executor_of, small
from tests.training.runs import CONFIG

#: Published counts, or (LeNet-5, VGG-128 ... VGG-512) counted by hand from the published layers.
COUNTS = {
    "lenet5": 61_706,
    "alexnet": 61_100_840,
    "vgg_a": 132_863_336,
    "vgg16": 138_357_544,
    "vgg128": 47_609_192,
    "vgg256": 76_400_360,
    "vgg512": 140_175_848,
    "googlenet": 6_998_552,
    "inception_v3": 23_834_568,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "vit_b_16": 86_567_656,
    "swin_t": 28_288_354,
}
#: Shapes after some layers, by model.
SHAPES = {
    "alexnet": {"conv1": (55, 55, 64), "pool1": (27, 27, 64), "conv2": (27, 27, 192), "pool2": (13, 13, 192)}
    | {"conv4": (13, 13, 256), "pool5": (6, 6, 256), "flatten": (9216,), "dropout7": (4096,)},
    "vgg_a": {"conv1_1": (224, 224, 64), "conv3_2": (56, 56, 256), "pool5": (7, 7, 512), "flatten": (25088,)},
    "vgg16": {"conv2_2": (112, 112, 128), "conv4_3": (28, 28, 512), "pool5": (7, 7, 512), "dense2": (4096,)},
    "vgg512": {"conv1_1": (224, 224, 512), "conv2_1": (112, 112, 512), "conv5_2": (14, 14, 512)},
    "vgg128": {"conv5_2": (14, 14, 128), "flatten": (6272,)},
    "googlenet": {"conv1": (112, 112, 64), "pool1": (56, 56, 64), "norm2": (56, 56, 192), "pool2": (28, 28, 192)}
    | {"join3a": (28, 28, 256), "join3b": (28, 28, 480), "join4a": (14, 14, 512), "join4d": (14, 14, 528)}
    | {"join4e": (14, 14, 832), "join5b": (7, 7, 1024), "pool": (1024,)},
    "inception_v3": {"conv1a": (149, 149, 32), "conv2b": (147, 147, 64), "conv4a": (71, 71, 192)}
    | {"pool4": (35, 35, 192), "join5b": (35, 35, 256), "join5d": (35, 35, 288), "join6a": (17, 17, 768)}
    | {"conv6b_7x7_2": (17, 17, 128), "join6e": (17, 17, 768), "join7a": (8, 8, 1280), "join7c": (8, 8, 2048)},
    "resnet50": {"conv1": (112, 112, 64), "pool1": (56, 56, 64), "bn2_3c": (56, 56, 256), "bn5_3c": (7, 7, 2048)},
    "vit_b_16": {"conv_proj": (14, 14, 768), "encoder.pos_embedding": (197, 768), "encoder.ln": (197, 768)},
    "swin_t": {"features.0.0": (56, 56, 96), "features.4.reduction": (14, 14, 384), "norm": (7, 7, 768)},
    "resnet152": {"bn3_8c": (28, 28, 512), "bn4_36c": (14, 14, 1024), "bn5_3c": (7, 7, 2048)},
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_are_the_published_ones(name):
    assert build(name).parameter_count == COUNTS[name]


def test_parameter_counts_of_variants_are_the_published_ones():
    assert alexnet(variant="grouped").parameter_count == 60_965_224
    assert googlenet(auxiliary=True).parameter_count == 13_378_280
    assert inception_v3(auxiliary=True).parameter_count == 27_161_264


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_those_of_the_papers(name):
    layers = build(name).layers
    assert {key: layers[key].shape for key in SHAPES[name]} == SHAPES[name]


@pytest.mark.parametrize("name", sorted(set(COUNTS) - {"lenet5"}))
def test_heads_of_21841_classes(name):
    """A head of 21841 classes changes the number of parameters by ``features + 1`` per additional class."""
    network = build(name, classes=21_841)
    (features,) = network.outputs["prediction"].inputs[0].shape
    assert network.outputs["prediction"].shape == (21_841,)
    assert network.parameter_count - COUNTS[name] == 20_841 * (features + 1)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_the_same_inputs_and_outputs(name):
    network = build(name)
    more = {"step"} if name == "diffusion_unet" else set()
    assert set(network.inputs) == {"x", "target"} | more and set(network.outputs) == {"prediction", "loss"}
    assert network.outputs["loss"].inputs[0] is network.outputs["prediction"]
    assert network.name == name


def test_grouped_alexnet_is_that_of_the_paper():
    layers = alexnet(variant="grouped").layers
    assert [layers[f"conv{i}"].layer.groups for i in range(1, 6)] == [1, 2, 1, 2, 2]
    assert layers["conv2"].shape == (27, 27, 256) and layers["pool5"].shape == (6, 6, 256)
    order = list(layers)
    assert order.index("conv1") < order.index("norm1") < order.index("pool1")
    norm = layers["norm2"].layer
    assert (norm.size, norm.alpha / norm.size, norm.beta, norm.k) == (5, 1e-4, 0.75, 2.0)


def test_inception_factorizes_its_kernels():
    layers = inception_v3().layers
    kernels = [layers[f"conv6c_double_{i}"].layer.stencil.kernel for i in range(1, 6)]
    assert kernels == [1, (7, 1), (1, 7), (7, 1), (1, 7)]
    assert {layers[f"conv7b_{k}"].layer.stencil.kernel for k in ("1x3", "3x1")} == {(1, 3), (3, 1)}
    assert len({n.shape for k, n in layers.items() if k.startswith("bn6c")}) == 2  # 160 inside, 192 at the output


def test_dropout_is_that_of_the_papers():
    def rates(network):
        return [n.layer.rate for n in network.layers.values() if isinstance(n.layer, Dropout)]

    assert rates(alexnet()) == rates(vgg16()) == [0.5, 0.5]
    assert rates(googlenet()) == [0.4] and sorted(rates(googlenet(auxiliary=True))) == [0.4, 0.7, 0.7]
    assert rates(inception_v3()) == [0.5] and rates(resnet50()) == []
    assert rates(googlenet(auxiliary=True, dropout=0.0)) == [0.0] * 3


@pytest.mark.parametrize("model, weight, heads", [(googlenet, 0.3, 2), (inception_v3, 0.4, 1)])
def test_auxiliary_classifiers_join_the_loss(model, weight, heads):
    network = model(auxiliary=True, classes=7)
    loss = network.outputs["loss"]
    assert isinstance(loss.layer, TotalLoss)
    assert [(t.weight, t.training_only) for t in loss.layer.terms] == [(1.0, False), *[(weight, True)] * heads]
    assert [n.shape for n in loss.inputs] == [(7,), (1,)] + [(7,)] * heads
    assert loss.inputs[0] is network.outputs["prediction"]


def test_label_smoothing_of_inception():
    assert inception_v3(label_smoothing=0.1).outputs["loss"].layer.label_smoothing == 0.1


def test_width_scales_every_layer():
    assert [scaled(n, 1 / 3) for n in (1, 4, 64)] == [1, 1, 21]
    assert scaled(96, 1 / 16, 4) == 8 and scaled(96, 0.001, 2) == 2
    half, whole = vgg16(width=0.5), vgg16()
    for key, node in whole.layers.items():
        if key.startswith("conv") or key in ("dense1", "dense2"):
            assert half.layers[key].shape[-1] * 2 == node.shape[-1]
    assert half.outputs["prediction"].shape == whole.outputs["prediction"].shape


def test_mesh_models_are_those_of_the_paper():
    """Mesh models have the paper's layers: six blocks of 3 (1K) or 5 (2K) units; they predict per 64 x 64 patch."""
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


@pytest.mark.parametrize(
    "wrong, near",
    [
        ("resnet", "resnet50 or resnet152"),
        ("VGG-16", "vgg16"),
        ("inception", "inception_v3"),
        ("GoogLeNet-v1", "googlenet"),
        ("mesh-2k", "mesh_2k"),
        ("unet2", "unet2d"),
    ],
)
def test_unknown_names_are_answered_with_near_and_all_names(wrong, near):
    with pytest.raises(UserError) as caught:
        build(wrong)
    message = str(caught.value)
    assert f"got {wrong!r}; did you mean {near}" in message and "\n" not in message
    assert all(name in message for name in MODELS)


def test_a_name_like_none_is_answered_with_all_names():
    with pytest.raises(
        UserError, match=r"expected one of alexnet, diffusion_unet, .*, vit_b_16, or FILE.py:FUNCTION .*, got 'qqq'$"
    ):
        build("qqq")


def test_what_build_refuses():
    with pytest.raises(
        UserError,
        match=r"^model.colour: unknown key",
    ):
        build("lenet5", colour=True)
    with pytest.raises(
        UserError, match=r"^model.colour: .* one of depths, classes, channels, .*, name, class_weights$"
    ):
        build("resnet152", colour=True)
    with pytest.raises(UserError, match="cannot build mesh: resolution"):
        build("mesh", resolution=100, decoder=True)
    with pytest.raises(UserError, match="variant: expected one of 'one_tower' or 'grouped', got 'two_tower'"):
        build("alexnet", variant="two_tower")
    with pytest.raises(UserError, match="width: expected a number > 0, got 0"):
        build("vgg16", width=0)
    with pytest.raises(UserError, match=r"resolution: expected at least 75 .*got 74"):
        build("inception_v3", resolution=74)
    with pytest.raises(UserError, match="at least 17 x 17 positions after module 6e, got 16 x 16"):
        build("inception_v3", resolution=298, auxiliary=True)
    with pytest.raises(UserError, match="at least 5 x 5 positions after module 4a, got 4 x 4"):
        build("googlenet", resolution=64, auxiliary=True)


@pytest.mark.parametrize("name", ["unet2d", "unet3d", "swin_unet"])
def test_networks_that_segment_can_ignore_a_class(name):
    options = {"resolution": (16, 16) if name == "swin_unet" else 16, "width": 12}
    loss = build(name, **options, ignore_index=-1).outputs["loss"].layer
    assert loss.ignored_target(1) == -1
    with pytest.raises(UserError, match=r"ignore_index: expected a whole number.*got 0.5"):
        build(name, **options, ignore_index=0.5)


def test_the_page_of_models_is_true():
    """docs/models.md has a row with the number of parameters for every model, and names all options."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", page, flags=re.M))
    assert set(rows) == set(MODELS)
    for name, count in rows.items():
        assert build(name).parameter_count == int(count.replace(",", "")), name
    for name in MODELS:
        assert all(f"`{option}`" in page for option in options_of(name)), name


#: One small network per family, and what is special about it: groups and response norms; lines with dropout; branches
#: with auxiliary classifiers; kernels of 1 x 7 and 7 x 1 wider than a block. With it, how much larger than eps the
#: relative differences of losses and of gradients may be: sums of thousands of terms, in another order, and, where
#: there are many batch norms of few elements, each of them amplifies what came before.
FAMILIES = {
    "alexnet grouped": (16, 200),
    "vgg_a": (16, 200),
    "googlenet auxiliary": (16, 200),
    "inception_v3": (1e4, 1e5),
    "resnet152": (1e5, 1e7),
    "vit_b_16": (16, 1e3),
    "swin_t": (16, 1e3),
    "swin_unet": (16, 1e3),
    "swin_unet 3-D": (16, 1e3),
    "diffusion_unet": (64, 1e4),
}
EPS = float(np.finfo("float64").eps)
CUTS = {
    2: ({"sample": 2}, {"height": 2}, {"width": 2}),
    3: ({"height": 3}, {"width": 3}),
    4: ({"sample": 2, "height": 2}, {"height": 2, "width": 2}),
}


def test_every_model_has_a_small_version():
    assert {given["name"] for given in SMALL.values()} == set(MODELS) - {"mesh"}


@pytest.mark.parametrize("label", SMALL)
def test_loss_falls_as_its_gradient_says(label):
    """A short step along the gradient lowers the loss by the predicted amount; three longer ones lower it further."""
    with Communicator(MPI.COMM_SELF) as alone, executor_of(small(label), alone) as executor:
        first, second = descend(executor, 1e-6, 1)
        assert (first - second) / first == pytest.approx(1e-6, rel=0.02)
        losses = descend(executor, 1e-3, 3)
    assert np.isfinite(losses).all() and (np.diff(losses) < 0).all()


def compare(label, comm):
    """Compare losses of two steps and the last gradients under all cuts with those of one process. Collective."""
    network, allowed = small(label), FAMILIES[label]
    with Communicator(MPI.COMM_SELF) as alone, executor_of(network, alone) as executor:
        want = descend(executor, 1e-3, 2)
        gradients = {k: v.copy() for k, v in executor.store.grads.items()}
    for parts in CUTS[comm.size]:
        with executor_of(network, comm, parts) as executor:
            found = descend(executor, 1e-3, 2)
            # A dead unit has a gradient of zero, also under any cut.
            ours = executor.store.grads
            # The gradient of the bias of keys is zero, too: a softmax does not depend on it. It has only the rounding
            # of its terms, which are those of the gradient of the weights.
            scales = {k: largest(gradients[k.replace(".key/b", ".key/w")]) or EPS for k in gradients}
            errors = {k: largest(ours[k] - g[executor.store.box(k).slices()]) / scales[k] for k, g in gradients.items()}
        key = max(errors, key=errors.__getitem__)
        loss = largest(found / want - 1)
        with comm.agreement():
            assert loss <= allowed[0] * EPS and errors[key] <= allowed[1] * EPS, (
                f"{label} under {parts}: losses differ by {loss / EPS:.3g} eps, the gradient of {key} by "
                f"{errors[key] / EPS:.3g} eps, allowed are {allowed}"
            )


def largest(array):
    """Return the largest magnitude of an array."""
    return float(np.max(np.abs(array), initial=0))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("label", [label for label in FAMILIES if label != "resnet152"])
def test_learns_what_one_process_learns(label):
    with Communicator(MPI.COMM_WORLD) as comm:
        compare(label, comm)


@pytest.mark.ranks(2)
def test_learns_what_one_process_learns_in_152_layers():
    with Communicator(MPI.COMM_WORLD) as comm:
        compare("resnet152", comm)


NET = """
from __future__ import annotations
from collections.abc import Sequence
from typing import TYPE_CHECKING
import halograd as hg
import parts_of_mine

if TYPE_CHECKING:
    from nowhere import Unknown

def build(resolution: int = 16, widths: Sequence[int] = (4, 6), act=None, **others) -> hg.Network:
    x = y = hg.Input((resolution, resolution, 3), name="x")
    for width in widths:
        y = parts_of_mine.block(y, width)
    logits = hg.Conv(1, 1, name="head")(y)
    target = hg.Input(logits.shape, name="target")
    loss = hg.BinaryCrossEntropyWithLogits(name="bce")(logits, target) + 0.5 * hg.Dice()(logits, target)
    return hg.Network({"prediction": logits, "loss": loss}, name=others.get("name", "mine"))

def strict(width: int = 4):
    return build(widths=[width])

def unknown_types(width: Unknown = 4):
    return build(widths=[width])

def nothing():
    pass

def broken():
    return [][1]
"""
PARTS = """
import halograd as hg

def block(x, width):
    return hg.Conv(width, 3, padding=1, activation="relu")(x)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "parts_of_mine.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [n for n in sys.modules if n in ("net", "parts_of_mine") or n.startswith("halograd_own_")]:
        del sys.modules[name]


@pytest.mark.parametrize("where", ["net.py:build", "./net.py:build", "net:build", "net.py:unknown_types"])
def test_a_function_makes_the_network(folder, where):
    network = build(where)
    assert isinstance(network, Network) and network.name == "mine"
    assert network.outputs["prediction"].shape == (16, 16, 1)


def test_options_are_those_of_the_function(folder):
    network = build("net.py:build", resolution=32, widths=[2], act="relu", name="other")
    assert network.inputs["x"].shape == (32, 32, 3) and network.name == "other"
    for options, message in (
        ({"resolution": "32"}, "model.resolution: expected a whole number, got '32'"),
        ({"widths": 3}, "model.widths: expected a list, got 3"),
    ):
        with pytest.raises(UserError, match=message):
            build("net.py:build", **options)
    with pytest.raises(UserError, match=r"model.widths: .*unknown"):
        build("net.py:strict", widths=3)


def test_a_file_is_executed_once_until_it_is_changed(folder):
    before, mark = load_function("net.py:build"), source_of("net.py:build")
    assert load_function(str(folder / "net.py") + ":build") is before
    (folder / "net.py").write_text(NET.replace('"mine"', '"changed"'))
    os.utime(folder / "net.py", ns=(1, 1))
    assert build("net.py:build").name == "changed"
    assert source_of("net.py:build") != mark and mark[0] == "net.py:build"


def test_a_file_that_changes_within_a_second_and_keeps_its_size_is_executed_again(folder, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for number in range(4):
        (folder / "net.py").write_text(NET.replace('"mine"', f'"net{number}"'))
        os.utime(folder / "net.py", ns=(10**18, 10**18))
        assert build("net.py:build").name == f"net{number}"


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("none.py:build", "model.file: expected a Python file, got 'none.py' .no such file or directory.*folder"),
        ("net.py:make", "expected a function 'make' in net.py, got build, strict, unknown_types, nothing, broken"),
        ("net.py:", 'expected "FILE.py:FUNCTION" or "MODULE:FUNCTION"'),
        ("net.py:nothing", "expected a function that returns a halograd.Network, got NoneType"),
        ("net.py:broken", r"failed: IndexError: list index out of range \(.*net.py, line 30\)"),
        ("no_such_module:build", "'no_such_module' cannot be imported: ModuleNotFoundError: No module named"),
        ("syntax.py:build", r"syntax.py cannot be imported: SyntaxError: .*\(syntax.py, line 1\)"),
        (
            "raises.py:build",
            r"raises.py cannot be imported: ZeroDivisionError: division by zero \(.*raises.py, line 2\)",
        ),
    ],
)
def test_mistakes_are_one_line(folder, where, message):
    (folder / "syntax.py").write_text("def build(:\n")
    (folder / "raises.py").write_text("import math\n1 / 0\n")
    with pytest.raises(UserError, match=message) as caught:
        build(where)
    assert "\n" not in str(caught.value)


def test_a_configuration_names_a_model_or_a_file():
    text = CONFIG.format(edge=16, channels=3, data="data.h5", out="out")
    own = text[text.index("[data]") :]
    config = parse_config('[model]\nfile = "net.py:build"\nresolution = 16\n' + own)
    assert config.model.source == "net.py:build" and config.model.options == {"resolution": 16}
    for model, message in (
        ("resolution = 16", 'model.name: expected a model, or file = "net.py:build", got neither'),
        ('name = "mesh"\nfile = "net.py:build"', "model.file: expected no name with it"),
        ('file = "net.py"', 'model.file: expected "FILE.py:FUNCTION" or "MODULE:FUNCTION", got \'net.py\''),
    ):
        with pytest.raises(UserError, match=message):
            parse_config(f"[model]\n{model}\n" + own)


def test_it_is_planned_explained_and_predicted(folder, capsys):
    small = ["net.py:build", "--machine", "lassen", "--batch", "2"]
    assert run(["plan", *small, "--option", "widths=[8]", "--ranks", "4", "-o", "plan.json"]) == 0
    assert run(["explain", "plan.json"]) == 0
    assert run(["predict", *small, "--ranks", "2,4"]) == 0
    assert "mine on 4 ranks of lassen" in capsys.readouterr().out
