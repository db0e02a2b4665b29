"""Imported networks with other extents than those of their export, and one step against torch under every cut."""

import importlib.util

import numpy as np
import pytest

import halograd as hg
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.testing import grids
from halograd.training.executor import Executor
from tests.interchange import unet
from tests.interchange.support import EXPORTERS, as_module, export, first, last, predicted, samples, shake, torch
from tests.support.on_rank_0 import on_rank_0

pytestmark = pytest.mark.torch
OWN, OTHER = (8, 12, 3), (16, 20, 3)


def _frozen():
    """Return a dictionary by name: a module whose export contains sizes of its input, and the kind of node that
    contains them.
    """
    lib = torch()
    nn, functional = lib.nn, lib.nn.functional

    def conv(stride=1):
        return nn.Conv2d(3, 4, 3, stride, 1)

    def whole(m, x):
        return m.d(functional.avg_pool2d(m.c(x), x.shape[2:]))

    def pooled(m, x):
        y = m.c(x)
        return lib.cat([y, functional.interpolate(y.mean((2, 3), keepdim=True), size=y.shape[-2:])], 1)

    def expanded(m, x):
        y = m.c(x)
        return y.mean((2, 3), keepdim=True).expand(-1, -1, *y.shape[2:])

    return {
        "resize to the input": (
            lambda: as_module(lambda m, x: functional.interpolate(m.c(x), x.shape[-2:], mode="bilinear"), c=conv(2)),
            "Resize",
        ),
        "resize to another value": (lambda: as_module(pooled, c=conv()), "Resize"),
        "expand": (lambda: as_module(expanded, c=conv()), "Expand"),
        "cut to a half": (lambda: as_module(lambda m, x: m.c(x)[:, :, : x.shape[2] // 2], c=conv()), "Slice"),
        "second half": (lambda: as_module(lambda m, x: m.c(x)[:, :, x.shape[2] // 2 :], c=conv()), "Slice"),
        "middle": (
            lambda: as_module(lambda m, x: m.c(x)[..., x.shape[3] // 4 : x.shape[3] // 4 + 6], c=conv()),
            "Slice",
        ),
        "pool over everything": (
            lambda: as_module(whole, c=conv(), d=nn.Conv2d(4, 2, 1)),
            "AveragePool",
        ),
        "view": (lambda: as_module(lambda m, x: m.c(x).reshape(2, 4, *x.shape[2:]).relu(), c=conv()), "Reshape"),
    }


FROZEN = list(_frozen()) if importlib.util.find_spec("torch") else []


NEW = ("resize to the input", "expand", "second half")


@pytest.mark.parametrize("name, exporter", [*((name, "old") for name in FROZEN), *((name, "dynamo") for name in NEW)])
def test_sizes_of_the_example_are_refused_at_other_extents(name, exporter, tmp_path):
    """At other extents a model with fixed sizes is an error that names the node, even if only the result differs."""
    make, kind = _frozen()[name]
    module, x = make().double(), samples(*OWN)
    path = export(module, first(x), tmp_path / "m.onnx", exporter)
    (y,) = predicted(hg.onnx.load(path, {"x": OWN}), x).values()
    want = last(module(first(x)))
    np.testing.assert_allclose(y.reshape(want.shape), want, rtol=0, atol=1e-12)
    for shape in (OTHER, (16, 12, 3) if name in ("cut to a half", "second half") else (8, 20, 3)):
        with pytest.raises(UserError, match=rf"\({kind}\): expected sizes that follow .* got .*; export with dynamic_"):
            hg.onnx.load(path, {"x": shape})


def _free():
    """Return a dictionary by name: modules that are correct at all extents, although some of their values have a
    fixed size.
    """
    lib = torch()
    nn, functional = lib.nn, lib.nn.functional

    def gated(m, x):
        y = m.c(x)
        return y[:, :, 1:-1] * lib.sigmoid(m.d(functional.adaptive_avg_pool2d(y, 1)))

    def upsampled(m, x):
        y = functional.max_pool2d(m.n(m.c(x)), 2)
        return lib.cat([m.c(x), functional.interpolate(y, scale_factor=2, mode="bilinear")], 1)

    def classes(m, x):
        y = m.c(x).mean((2, 3))
        return m.l(y).reshape(-1, 2)

    conv = lambda: nn.Conv2d(3, 4, 3, padding=1)  # noqa: E731
    return {
        "gate, slice": lambda: as_module(gated, c=conv(), d=nn.Conv2d(4, 4, 1)),
        "u-net": lambda: as_module(upsampled, c=conv(), n=nn.BatchNorm2d(4)),
        "classes": lambda: as_module(classes, c=conv(), l=nn.Linear(4, 2)),
    }


@pytest.mark.parametrize(
    "name, exporter", [*((name, "old") for name in (_free() if FROZEN else ())), ("u-net", "dynamo")]
)
def test_what_follows_the_input_is_read_at_other_extents(name, exporter, tmp_path):
    module = _free()[name]().double()
    path = export(module, first(samples(*OWN)), tmp_path / "m.onnx", exporter)
    for shape in (OTHER, (5 if name != "u-net" else 6, 12, 3)):
        x = samples(*shape)
        (y,) = predicted(hg.onnx.load(path, {"x": shape}), x).values()
        np.testing.assert_allclose(y, last(module(first(x))), rtol=0, atol=1e-12)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_sizes_follow_the_input_where_the_file_leaves_them_open(exporter, tmp_path):
    lib = torch()
    make, _ = _frozen()["resize to the input"]
    module, names = make().double(), {0: "n", 2: "h", 3: "w"}
    dynamic = {"dynamic_axes": {"x": names}}
    if exporter == "dynamo":
        dynamic = {"dynamic_shapes": (dict.fromkeys(names, lib.export.Dim.DYNAMIC),)}
    path = export(module, first(samples(*OWN)), tmp_path / "m.onnx", exporter, **dynamic)
    x = samples(*OTHER)
    (y,) = predicted(hg.onnx.load(path, {"x": OTHER}), x).values()
    np.testing.assert_allclose(y, last(module(first(x))), rtol=0, atol=1e-12)


RATE = 0.1


def _step_of_torch(module, x, classes):
    """Return the loss of a torch module, and its parameters after a step of SGD."""
    lib = torch()
    module.train()
    optimizer = lib.optim.SGD(module.parameters(), lr=RATE)
    loss = lib.nn.functional.cross_entropy(module(first(x)), lib.tensor(classes[..., 0]).long())
    loss.backward()
    optimizer.step()
    return loss.item(), {name: p.detach().numpy() for name, p in module.named_parameters()}


def _trainable(path):
    """Return the network of a file, completed with a loss, as in docs/torch.md."""
    imported = hg.onnx.load(path)
    (logits,) = imported.outputs.values()
    target = hg.Input((*logits.shape[:-1], 1), "target", "int32")
    return hg.Network({"prediction": logits, "loss": hg.SoftmaxCrossEntropy()(logits, target)})


@pytest.mark.parametrize(
    "exporter",
    [pytest.param("old", marks=pytest.mark.ranks(1, 4)), pytest.param("dynamo", marks=pytest.mark.ranks(2))],
)
def test_a_step_of_a_u_net_is_that_of_torch(exporter, comm, shared):
    x = samples(*unet.RESOLUTION, unet.CHANNELS)
    classes = np.floor(4 * np.abs(samples(*unet.RESOLUTION, 1, name="t"))) % unet.CLASSES
    path = shared / "unet.onnx"

    def of_torch():
        module = unet.make().double()
        shake(module)
        export(module, first(x), path, exporter, training=True)
        return _step_of_torch(module, x, classes)

    want, after = on_rank_0(comm, of_torch)
    network = _trainable(path)
    for parts in grids(comm.size, ("sample", "height", "width")):
        if parts["sample"] > len(x):
            continue
        with hg.Communicator(comm) as ranks:
            strategy = hg.Strategy(parts)
            with Executor(network, ranks, get_backend("numpy"), len(x), strategy, "float64") as executor:
                trainer = hg.Trainer(executor, hg.SGD(executor.store), hg.Constant(RATE))
                executor.set_input("x", x)
                executor.set_input("target", classes)
                assert trainer.step() == pytest.approx(want, rel=1e-11), parts
                trainer.synchronize()
                found = executor.store.gather(ranks, executor.store.params)
        for name, array in (found or {}).items():
            layer, _, key = name.rpartition("/")
            theirs = after[f"{layer}.{'bias' if key in ('b', 'beta') else 'weight'}"]
            ours = np.moveaxis(array, -1, 1) if array.ndim > 1 else array
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-11, err_msg=f"{name} {parts}")
