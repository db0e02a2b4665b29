"""Modules of torch by `hg.from_torch`, runs with `model.torch`, and trained parameters back by `hg.to_torch`."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.data import ArrayDataset
from halograd.errors import UserError
from halograd.exporting import export_run
from halograd.interchange import torch_module
from halograd.kernels import get_backend
from halograd.models import build
from halograd.training import evaluate, train
from halograd.training.build import NAME
from halograd.training.config import ModelConfig
from halograd.training.executor import Executor
from halograd.user_code import load
from tests.interchange.support import (
    as_module,
    check_step,
    export,
    first,
    keep_operators,
    last,
    predicted,
    samples,
    torch,
)
from tests.training.runs import write_own

pytestmark = pytest.mark.torch
TITLES = list(torch_module.EXPORTERS)


@pytest.fixture(autouse=True)
def _exporters():
    torch()
    keep_operators()


@pytest.fixture(params=TITLES)
def exporter(request, monkeypatch) -> str:
    """Leave only one of torch's exporters."""
    monkeypatch.setattr(torch_module, "EXPORTERS", {request.param: torch_module.EXPORTERS[request.param]})
    return request.param


def _network(channels: int = 2):
    """Return a module with batch norm, a buffer, and a weight under two names."""
    nn = torch().nn
    torch().manual_seed(1)
    model = as_module(
        lambda m, x: m.head(m.norm(m.conv((x - m.mean) / 2)).relu()),
        conv=nn.Conv2d(channels, 4, 3, padding=1),
        norm=nn.BatchNorm2d(4),
        head=nn.Conv2d(4, 2, 1),
    )
    model.register_buffer("mean", torch().tensor([0.25, -0.5]).view(1, 2, 1, 1)[:, :channels])
    model.again = model.conv
    return model


def _state(model) -> dict[str, np.ndarray]:
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def test_a_module_is_not_modified(exporter):
    """Modes, running statistics, random numbers and methods are those from before the call; so after a refusal."""
    model = _network().eval()
    model.head.train()
    seed = torch().random.get_rng_state()
    before, attributes = _state(model), set(vars(model))
    hg.from_torch(model, torch().zeros(1, 2, 4, 4))
    model.function = lambda m, x: m.norm(m.conv(x)).sort(1)[0]
    with pytest.raises(UserError, match=r"FunctionModule: "):
        hg.from_torch(model, torch().zeros(1, 2, 4, 4))
    assert [one.training for one in (model, model.conv, model.norm, model.head)] == [False, False, False, True]
    assert set(vars(model)) == attributes
    assert torch().equal(seed, torch().random.get_rng_state())
    for name, value in _state(model).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_lists_of_a_module_stay(exporter):
    """Also one that two modules share and that forward() fills, as MONAI's DynUNet does for deep supervision."""
    nn, x = torch().nn, torch().zeros(1, 2, 4, 4)

    class Part(nn.Module):
        def __init__(self, heads, sizes):
            super().__init__()
            self.heads, self.sizes, self.conv = heads, sizes, nn.Conv2d(2, 2, 1)

        def forward(self, x):
            self.heads[0] = self.conv(x)
            self.sizes["last"] = x.shape[-1]
            return self.heads[0]

    heads, sizes = [None], {"last": 0}
    model = as_module(lambda m, x: m.first(x) + m.heads[0].relu(), first=Part(heads, sizes))
    model.heads = heads
    hg.from_torch(model, x)
    assert model.heads is model.first.heads is heads and heads == [None]
    assert model.first.sizes is sizes and sizes == {"last": 0}
    assert model(x).shape == x.shape


def test_a_step_is_that_of_torch(exporter):
    """The buffer is not trained, and the layer with two names has the first."""
    model = _network().double()
    network = hg.from_torch(model, torch().zeros(1, 2, 6, 6).double())
    assert list(network.parameters()) == [*("conv/w", "conv/b", "norm/gamma", "norm/beta", "head/w", "head/b")]
    assert list(network.inputs) == ["x"] and list(network.outputs) == ["output"]
    check_step(network, model, samples(6, 6, 2))


def test_frozen_parameters_stay(exporter):
    """Also in a network with another head; a layer that is frozen in part, and a run without trained layers, are
    refused.
    """
    model = _network().double()
    model.conv.requires_grad_(False)
    model.norm.requires_grad_(False)
    model.scale = torch().nn.Parameter(torch().ones(2, 1, 1).double(), requires_grad=False)
    model.function = lambda m, x: m.head(m.norm(m.conv(x)).relu()) * m.scale
    x = samples(6, 6, 2)
    network = hg.from_torch(model, first(x))
    assert network.frozen == {"conv", "norm", "scale"}
    check_step(network, copy.deepcopy(model), x)
    model.head.requires_grad_(False)
    network = hg.from_torch(model, first(x))
    with pytest.raises(ValueError, match="expected some layers to be trained, got all of them frozen"):
        _with_loss(network)
    assert _with_loss(hg.Network({"y": hg.Conv(2, 1)(network.outputs["output"])})).frozen == network.frozen
    model.norm.bias.requires_grad_(True)
    with pytest.raises(UserError, match=r"trained or frozen as a whole, got 'norm.weight' frozen; set requires_grad"):
        hg.from_torch(model, first(x))


def test_parameters_of_several_modules_are_one(exporter):
    """One parameter of two modules is trained as one, two equal ones as two; layers that share some are refused."""
    lib, x = torch(), samples(3, 4, 4)

    def of(one: bool):
        gain, equal = (lib.nn.Parameter(lib.full((4, 1, 1), 0.5)) for _ in range(2))
        blocks = [as_module(lambda m, x: x + m.conv(x) * m.gain, conv=lib.nn.Conv2d(4, 4, 1)) for _ in range(2)]
        blocks[0].gain, blocks[1].gain = gain, gain if one else equal
        return as_module(lambda m, x: m.second(m.first(x)), first=blocks[0], second=blocks[1]).double()

    class Scaled(lib.nn.Module):
        def forward(self, x, gain):
            return x * gain

    passed = as_module(lambda m, x: m.scaled(m.conv(m.scaled(x, m.gain)), m.gain), conv=lib.nn.Conv2d(4, 4, 1))
    passed.gain, passed.scaled = lib.nn.Parameter(lib.full((4, 1, 1), 0.5)), Scaled()
    for module in (of(one=True), of(one=False), passed.double()):
        network = hg.from_torch(module, first(x))
        assert network.parameter_count == sum(parameter.numel() for parameter in module.parameters())
        check_step(network, module, x)
    for make in (lambda: lib.nn.GroupNorm(2, 4), lambda: lib.nn.BatchNorm2d(4), lambda: lib.nn.Conv2d(4, 4, 1)):
        module = lib.nn.Sequential(make(), lib.nn.Sigmoid(), make()).double()
        module[2].bias = module[0].bias
        with pytest.raises(UserError, match=r"expected weights of its own, got those of node"):
            hg.from_torch(module, first(x))


def test_arguments_and_results_keep_their_names(exporter):
    """Tensors by position or by name; results in a dict, in lists within it, and one that is an argument itself."""

    class Two(torch().nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch().nn.Conv2d(1, 1, 1)

        def forward(self, image, mask=None, scale=2.0):
            y = self.conv(image)
            return {"conv2d": y * mask, "deep": [y + 1, None, (y * scale).relu()], "mask": mask}

    model, shape = Two().double(), (2, 1, 3, 3)
    image, mask = torch().rand(shape).double(), torch().rand(shape).double()
    want = model(image, mask)
    for given in ((image, mask), {"mask": mask, "image": image}):
        network = hg.from_torch(model, given)
        assert set(network.inputs) == {"image", "mask"}
        assert list(network.outputs) == ["conv2d", "deep_0", "deep_2", "mask_output"]
    with (
        hg.Communicator(MPI.COMM_SELF) as alone,
        Executor(network, alone, get_backend("numpy"), 2, dtype="float64", trainable=False) as executor,
    ):
        executor.set_input("image", last(image))
        executor.set_input("mask", last(mask))
        executor.forward(training=False)
        for name, tensor in {"conv2d": want["conv2d"], "deep_0": want["deep"][0], "deep_2": want["deep"][2]}.items():
            found = executor.gather(network.names[network.outputs[name]])
            np.testing.assert_allclose(found, last(tensor), rtol=1e-12, atol=1e-15)


def test_other_extents_than_those_of_the_example(exporter):
    """Sizes that forward() takes from its input follow the requested extents, which may be more than the example's."""
    interpolate = torch().nn.functional.interpolate
    model = as_module(
        lambda m, x: interpolate(m.down(x), size=x.shape[-2:], mode="nearest"), down=torch().nn.Conv2d(1, 1, 2, 2)
    ).double()
    network = hg.from_torch(model, torch().zeros(1, 1, 4, 4).double(), {"x": (8, 12, 1)})
    x = samples(8, 12, 1)
    np.testing.assert_allclose(predicted(network, x)["output"], last(model(first(x))), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_adaptive_poolings(exporter, axes, tmp_path):
    """Windows of unequal extents, as one layer each; also as the new exporter decomposes means into operators."""
    nn, extents = torch().nn, (8, 7, 5)[:axes]
    conv, size = getattr(nn, f"Conv{axes}d"), (3, 5, 2)[:axes]
    model = as_module(
        lambda m, x: m.b(m.mean(m.a(x)).relu() + m.max(x)),
        a=conv(2, 2, 1),
        b=conv(2, 2, 1),
        mean=getattr(nn, f"AdaptiveAvgPool{axes}d")(size),
        max=getattr(nn, f"AdaptiveMaxPool{axes}d")(size),
    ).double()
    x = samples(*extents, 2)
    network = hg.from_torch(model, first(x))
    kinds = {node.layer.kind for node in network.layers.values()}
    assert kinds >= {"AdaptiveAveragePool", "AdaptiveMaxPool"} and "Reshape" not in kinds
    check_step(network, copy.deepcopy(model), x)
    if exporter == "torch.export" and axes < 3:
        model.function = lambda m, x: m.b(m.mean(m.a(x)))
        network = hg.onnx.load(export(model, first(x), tmp_path / "m.onnx", "dynamo", training=True))
        assert [node.layer.kind for node in network.layers.values()] == ["Conv", "AdaptiveAveragePool", "Conv"]
        check_step(network, model, x)


def test_dropout_of_channels(exporter):
    """As a layer with the rate of the module, none in a part in evaluation; in evaluation the network is the module."""
    nn = torch().nn
    parts = {f"drop{axes}": getattr(nn, f"Dropout{axes}d")(0.1 * axes) for axes in (1, 2, 3)}
    off = nn.Sequential(nn.Dropout2d(0.5)).eval()
    model = as_module(
        lambda m, x: m.drop3(m.drop2(m.a(x))[:, :, None])[:, :, 0] + m.drop1(m.b(x).flatten(2)).reshape(x.shape),
        a=nn.Conv2d(2, 2, 1),
        b=nn.Conv2d(2, 2, 1),
        **parts,
    ).double()
    x = samples(8, 7, 2)
    network = hg.from_torch(model, first(x))
    drops = [node.layer for node in network.layers.values() if node.layer.kind == "ChannelDropout"]
    assert sorted(layer.rate for layer in drops) == [0.1, 0.2, 0.3]
    model.eval()
    np.testing.assert_allclose(predicted(network, x)["output"], last(model(first(x))), rtol=1e-12, atol=1e-15)
    tokens = as_module(
        lambda m, x: m.drop(m.b(x).flatten(2).transpose(1, 2)).mean(1), b=nn.Conv2d(2, 2, 1), drop=nn.Dropout1d(0.1)
    )
    with pytest.raises(UserError, match="expected channels at axis 1, got channels at the last axis"):
        hg.from_torch(tokens, first(x).float())
    tokens.function = lambda m, x: off(m.b(x))
    assert [node.layer.kind for node in hg.from_torch(tokens, first(x).float()).layers.values()] == ["Conv"]


def _random_depth():
    """Return functions of torch's libraries that leave out whole samples, as they compute it."""
    lib = torch()

    def per_sample(x):
        return (len(x), *(1 for _ in x.shape[1:]))

    def bernoulli(x, rate):
        noise = lib.empty(per_sample(x), dtype=x.dtype, device=x.device).bernoulli_(1 - rate)
        return x * noise.div_(1 - rate)

    def new(x, rate):
        noise = x.new_empty(per_sample(x)).bernoulli_(1 - rate)
        return x * noise.div_(1 - rate)

    def rounded(x, rate):
        return x / (1 - rate) * lib.floor(lib.rand(per_sample(x), dtype=x.dtype, device=x.device) + (1 - rate))

    return {"torchvision": bernoulli, "timm": new, "MONAI": rounded}


@pytest.mark.parametrize("name", ["torchvision", "timm", "MONAI"])
def test_random_depth(exporter, name):
    """As one layer: the identity in evaluation, and in training zero or the factor that keeps the mean."""
    drop = _random_depth()[name]
    module = as_module(
        lambda m, x: x + (drop(m.conv(x), 0.2) if m.training else m.conv(x)), conv=torch().nn.Conv2d(3, 3, 1)
    ).double()
    x = samples(4, 5, 3)
    network = hg.from_torch(module, first(x))
    layers = [node.layer for node in network.layers.values()]
    assert [layer.kind for layer in layers] == ["Conv", "StochasticDepth", "Add"]
    assert layers[1].rate == pytest.approx(0.2, abs=2e-7)
    branch = (last(module.eval()(first(x))) - x)[:1]
    np.testing.assert_allclose(predicted(network, x)["output"][:1], x[:1] + branch, rtol=1e-12, atol=1e-15)
    many = np.repeat(x[:1], 200, 0)
    with (
        hg.Communicator(MPI.COMM_SELF) as alone,
        Executor(network, alone, get_backend("numpy"), len(many), dtype="float64", trainable=False) as executor,
    ):
        executor.set_input("x", many)
        executor.forward(training=True)
        factors = (executor.gather(network.names[network.outputs["output"]]) - many) / branch
    kept = factors.mean((1, 2, 3)) > 0.5
    np.testing.assert_allclose(factors, np.where(kept, 1.25, 0.0).reshape(-1, 1, 1, 1) + 0 * factors, atol=1e-5)
    assert 0.7 < kept.mean() < 0.9


def test_dropout_in_place(exporter):
    """The new exporter writes it as random numbers; the old one refuses that of channels."""
    nn = torch().nn
    old = exporter == "TorchScript"
    parts = [nn.Conv2d(3, 3, 1), nn.Dropout(0.1, True), nn.ReLU(), nn.Dropout2d(0.2, not old), nn.Conv2d(3, 2, 1)]
    parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3, True), nn.Linear(2, 2)]
    module, x = nn.Sequential(*parts).double(), samples(4, 5, 3)
    network = hg.from_torch(module, first(x))
    drops = [node.layer for node in network.layers.values() if "Dropout" in node.layer.kind]
    assert [layer.kind for layer in drops] == ["Dropout", "ChannelDropout", "Dropout"]
    np.testing.assert_allclose([layer.rate for layer in drops], [0.1, 0.2, 0.3], atol=2e-7)
    found = predicted(network, x)["output"]
    np.testing.assert_allclose(found, module.eval()(first(x)).detach().numpy(), rtol=1e-12, atol=1e-15)


def test_other_random_numbers_are_refused(exporter):
    lib, x = torch(), first(samples(4, 5, 3))
    drop = _random_depth()["MONAI"]

    def noise(x, *shape):
        return lib.floor(lib.rand(*shape, dtype=x.dtype) + 0.8) / 0.8

    def twice(m, x):
        mask = noise(x, 2, 1, 1, 1)
        return m.conv(x) * mask + x * mask

    conv = lib.nn.Conv2d(3, 3, 1)
    other = "got random numbers that are not those of a dropout of elements, channels or samples"
    cases = {
        "whole batch": (lambda m, x: m.conv(x) * noise(x, 1, 1, 1, 1), other),
        "rows": (lambda m, x: m.conv(x) * noise(x, 2, 1, 4, 1), other),
        "two values": (twice, other),
        "two limits": (lambda m, x: m.conv(x) * (noise(x, 2, 1, 1, 1) + 0.5), other),
        "learned": (lambda m, x: m.conv(x) * (noise(x, 2, 1, 1, 1) * m.gain), other),
        "sum": (lambda m, x: m.conv(x) + noise(x, 2, 1, 1, 1), other),
        "not scaled": (lambda m, x: m.conv(x) * (noise(x, 2, 1, 1, 1) * 0.8), "divided by the part that is kept, 0.8"),
        "scaled otherwise": (lambda m, x: drop(m.conv(x) * 2, 0.2), "by the part that is kept, 0.8, got .* 2.5"),
    }
    for function, message in cases.values():
        module = as_module(function, conv=conv)
        module.gain = lib.nn.Parameter(lib.ones(1))
        with pytest.raises(UserError, match=message):
            hg.from_torch(module.double(), x)


def test_a_stack_of_results(exporter):
    """Each value of a stack becomes an output, also one that other layers read, and one that is repeated."""
    lib = torch()

    def forward(m, x):
        y = m.conv(x)
        return {"deep": lib.stack([y.relu(), y, y, x], -1), "sum": y.relu() + 1}

    module, x = as_module(forward, conv=lib.nn.Conv2d(3, 3, 1)).double(), samples(4, 5, 3)
    found, y = predicted(hg.from_torch(module, first(x)), x), module(first(x))
    assert list(found) == ["deep_0", "deep_1", "deep_2", "deep_3", "sum"]
    for array, tensor in zip(found.values(), [*y["deep"].unbind(-1), y["sum"]], strict=True):
        np.testing.assert_allclose(array, last(tensor), rtol=1e-12, atol=1e-15)
    module.function = lambda m, x: lib.stack([m.conv(x), x], 1) * 2
    with pytest.raises(UserError, match=r"\(Unsqueeze\): .*; a stack can be returned by forward\(\), where each"):
        hg.from_torch(module, first(x))


def test_what_is_refused():
    """The message has the node, the reasons of both exporters if neither can export, or the argument to change."""
    lib = torch()
    x = lib.zeros(1, 2, 4, 4)
    attention = as_module(lambda m, x: x @ m.conv(x).transpose(2, 3), conv=lib.nn.Conv2d(2, 2, 1))
    with pytest.raises(UserError, match=r"^FunctionModule: node 'node_matmul' \(MatMul\): expected "):
        hg.from_torch(attention, x)
    with pytest.raises(UserError, match=r"by torch.export: .*nonsense.*; by TorchScript: .*nonsense"):
        hg.from_torch(as_module(lambda m, x: m.conv(x).nonsense(), conv=lib.nn.Conv2d(2, 2, 1)), x)
    with pytest.raises(UserError, match=r"expected instance norms .* got 'norm' with track_running_stats=True"):
        hg.from_torch(as_module(lambda m, x: m.norm(x), norm=lib.nn.InstanceNorm2d(2, track_running_stats=True)), x)
    model = _network().train()
    model.norm.eval()
    with pytest.raises(UserError, match="expected norms in training mode, got 'norm' in evaluation mode"):
        hg.from_torch(model, x)
    model.norm = lib.nn.BatchNorm2d(model.norm.num_features, momentum=None)
    with pytest.raises(UserError, match="expected norms with a momentum, got 'norm' with momentum=None"):
        hg.from_torch(model, x)
    pools = (lib.nn.AvgPool2d(2, divisor_override=3), lambda x: lib.nn.functional.avg_pool2d(x, 2, divisor_override=3))
    for pool in pools:
        with pytest.raises(UserError, match="got divisor_override=3 in 'avg_pool2d'"):
            hg.from_torch(as_module(lambda m, x, pool=pool: pool(m.conv(x)), conv=lib.nn.Conv2d(2, 2, 1)), x)
    scaled = as_module(lambda m, x: lib.ops.aten.elu(m.conv(x), 0.5, 1.0, 3.0), conv=lib.nn.Conv2d(2, 2, 1))
    with pytest.raises(UserError, match=r"got input_scale=3.0 in 'elu'; write it as celu\(\)"):
        hg.from_torch(scaled, x)
    with pytest.raises(UserError, match=r"expected tensors \(N, C, \*spatial\), got ndarray of shape .* as 'x'"):
        hg.from_torch(_network(), np.zeros((1, 2, 4, 4)))
    with pytest.raises(UserError, match=r"arguments of forward\(\), got others: missing a required argument: 'x'"):
        hg.from_torch(_network(), {"y": x})
    with pytest.raises(UserError, match=r"shapes: expected inputs \(x\), got 'y'"):
        hg.from_torch(_network(), x, {"y": (4, 4, 2)})
    with pytest.raises(UserError, match=r"expected a torch.nn.Module, got function"):
        hg.from_torch(test_what_is_refused, x)


def test_a_detached_value_is_refused(exporter):
    model = as_module(lambda m, x: m.head(m.conv(x).detach()), conv=torch().nn.Conv2d(2, 2, 1), head=torch().nn.ReLU())
    with pytest.raises(UserError, match="detach"):
        hg.from_torch(model, torch().zeros(1, 2, 4, 4))


def test_a_norm_that_never_trains_is_refused(exporter):
    """A BatchNorm would take the statistics of the batch, which torch does not do for ``training=False``."""
    lib = torch()

    def network(training):
        def forward(m, x):
            return lib.nn.functional.batch_norm(m.conv(x), m.mean, m.var, training=training(m))

        module = as_module(forward, conv=lib.nn.Conv2d(2, 3, 1))
        module.register_buffer("mean", lib.full((3,), 0.5))
        module.register_buffer("var", lib.full((3,), 2.0))
        return hg.from_torch(module, lib.zeros(2, 2, 4, 4))

    assert [node.layer.kind for node in network(lambda m: m.training).layers.values()] == ["Conv", "BatchNorm"]
    with pytest.raises(UserError, match=r"\(BatchNormalization\).*, got a norm of running statistics in training"):
        network(lambda m: False)
    with pytest.raises(UserError, match=r"expected norms that evaluate with running statistics, got batch_norm\("):
        network(lambda m: True)


def test_a_missing_package_is_named(monkeypatch):
    model, x = _network(), torch().zeros(1, 2, 4, 4)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UserError, match="expected the library onnxscript, got none"):
        hg.from_torch(model, x)


def _with_loss(network: hg.Network) -> hg.Network:
    (y,) = network.outputs.values()
    loss = hg.MeanSquaredError()(y, hg.Input(y.shape, "target"))
    return hg.Network({"prediction": y, "loss": loss})


@pytest.mark.ranks(1, 2)
def test_a_trained_run_goes_back(comm, shared):
    """Only rank 0 has the module. Logits of the run and of the module agree; the module with other names is refused."""
    model = _network() if comm.rank == 0 else None
    example = torch().zeros(1, 2, 8, 8) if comm.rank == 0 else None
    network = _with_loss(hg.from_torch(model, example, comm=comm))
    x, target = samples(8, 8, 2, name="a"), samples(8, 8, 2, name="t")
    data = ArrayDataset({"x": x, "target": target})
    strategy = {"height": 2} if comm.size > 1 else {}
    out = shared / "run"
    run = hg.fit(network, data, out, epochs=2, batch=2, validation=0, strategy=strategy, normalize=False, comm=comm)
    run.apply(x, shared / "y.h5")
    if comm.rank:
        return
    import h5py

    with h5py.File(shared / "y.h5") as file:
        ours = file["prediction"][:]
    model.norm.num_batches_tracked += 7
    before = _state(model)
    assert hg.to_torch(run, model) is model
    assert model.norm.num_batches_tracked == 7
    assert not np.array_equal(before["conv.weight"], model.conv.weight.detach().numpy())
    assert model.again.weight is model.conv.weight
    np.testing.assert_array_equal(before["mean"], model.mean.numpy())
    model.eval()
    np.testing.assert_allclose(last(model(first(x).float())), ours, rtol=0, atol=1e-5)
    other = copy.deepcopy(model)
    hg.to_torch(out, other.double())  # the folder of the run, another dtype
    np.testing.assert_array_equal(other.head.weight.detach().numpy(), model.head.weight.detach().numpy())
    other.extra = torch().nn.Conv2d(1, 1, 1)
    with pytest.raises(UserError, match=r"got no counterpart of extra.weight, extra.bias, .* pass strict=False"):
        hg.to_torch(run, other)
    hg.to_torch(run, other, strict=False)
    del other.extra, other.head
    with pytest.raises(UserError, match=r"parameters of the run that the module has, got no .* of head.weight"):
        hg.to_torch(run, other)
    other.head = torch().nn.Conv2d(4, 3, 1)
    with pytest.raises(UserError, match=r"head.weight: expected shape \(3, 4, 1, 1\), got \(2, 4, 1, 1\) in the run"):
        hg.to_torch(run, other)


@pytest.mark.ranks(1, 2)
def test_an_executor_gives_the_parameters_after_its_last_step(comm, shared):
    """Updates that wait for the next forward pass are part of the result, without a call of `synchronize`."""
    model = torch().nn.Sequential(torch().nn.Conv2d(2, 3, 3, padding=1), torch().nn.Tanh()) if comm.rank == 0 else None
    x, target = samples(8, 8, 2, name="a"), samples(8, 8, 3, name="t")
    with hg.Communicator(comm) as world:
        network = _with_loss(hg.from_torch(model, first(x).float() if model else None, comm=world))
        key = next(name for name in network.inputs if name != "target")
        strategy = hg.Strategy({"height": comm.size})
        with hg.Executor(network, world, hg.get_backend("numpy"), len(x), strategy, "float64") as executor:
            trainer = hg.Trainer(executor, hg.SGD(executor.store, momentum=0.5), hg.Constant(0.1))
            executor.set_input(key, x)
            executor.set_input("target", target)
            for _ in range(2):
                trainer.step()
            found = hg.to_torch(executor, copy.deepcopy(model).double() if model else None)
    if comm.rank:
        return
    want = copy.deepcopy(model).double()
    steps = torch().optim.SGD(want.parameters(), lr=0.1, momentum=0.5)
    for _ in range(2):
        steps.zero_grad()
        torch().nn.functional.mse_loss(want(first(x)), first(target)).backward()
        steps.step()
    for ours, theirs in zip(_state(found).values(), _state(want).values(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-7)  # the exporter writes initial values in float32


@pytest.mark.ranks(2)
def test_ranks_agree(comm, shared):
    """An error of rank 0 is raised on all ranks; modules of ranks that differ stop a run."""
    x = torch().zeros(1, 2, 8, 8)
    with pytest.raises(UserError, match="expected norms in training mode"):
        model = _network().train()
        model.norm.eval()
        hg.from_torch(model if comm.rank == 0 else None, x, comm=comm)
    model = _network()
    with torch().no_grad():
        model.head.bias += comm.rank
    data = ArrayDataset({"x": samples(8, 8, 2), "target": samples(8, 8, 2, name="t")})
    network = _with_loss(hg.from_torch(model, x))
    with pytest.raises(UserError, match=r"initial values from FunctionModule \w+ as on rank 0, got FunctionModule"):
        hg.fit(network, data, shared / "run", epochs=1, batch=2, validation=0, strategy={"height": 2}, comm=comm)


def test_layers_of_parts_and_transposed_weights_go_back():
    """Arrays return to the module's order: scales per channel, dense layers after a flatten, at every position."""
    nn = torch().nn
    torch().manual_seed(2)
    model = as_module(
        lambda m, x: m.last(m.norm(m.scale * m.up(x)).flatten(1)),
        up=nn.ConvTranspose2d(2, 3, 2, 2),
        norm=nn.GroupNorm(1, 3),
        last=nn.Linear(48, 5),
    )
    model.scale = nn.Parameter(torch().rand(1, 3, 1, 1))
    network = hg.from_torch(model, torch().zeros(1, 2, 2, 2))
    arrays = {name: 2.0 * array for name, array in network.initial_values().items()}
    other = copy.deepcopy(model)
    torch_module.fill_module(other, torch_module.state_for(network, arrays))
    for name, value in _state(model).items():
        np.testing.assert_array_equal(2 * value, _state(other)[name], err_msg=name)


def test_a_module_of_another_type_gets_the_numbers():
    """Also of a type that NumPy lacks; elements that the network does not have stay."""
    lib = torch()
    model = as_module(lambda m, x: m.conv(x), conv=lib.nn.Conv2d(2, 2, 1)).bfloat16()
    before = model.conv.bias.detach().clone()
    numbers = np.array([[1.5, -0.1], [2.0, 3.0]], np.float32).reshape(2, 2, 1, 1)
    state = {"conv.weight": (numbers, np.ones_like(numbers, bool)), "conv.bias": (np.ones(2), np.array([True, False]))}
    torch_module.fill_module(model, state)
    assert lib.equal(model.conv.weight, lib.tensor(numbers).bfloat16())
    assert model.conv.bias.tolist() == [1.0, before[1].item()]


NET = """
import torch

import halograd as hg


def make(filters: int = 4):
    torch.manual_seed(1)
    parts = [torch.nn.Conv2d(3, filters, 3, padding=1), torch.nn.BatchNorm2d(filters), torch.nn.ReLU()]
    return torch.nn.Sequential(*parts, torch.nn.Conv2d(filters, 1, 1)), torch.zeros(1, 3, 16, 16)


def alone():
    return make()[0]


def double(network):
    y = network.outputs["output"]
    return hg.Network({"prediction": y, "loss": 2.0 * hg.MeanSquaredError()(y, hg.Input(y.shape, "target"))})
"""


def _write(folder) -> None:
    path = write_own(folder, NET)
    model = 'torch = "net.py:make"\nloss = "BinaryCrossEntropyWithLogits"\nfilters = 6'
    path.write_text(path.read_text().replace('file = "net.py:build"', model))


@pytest.mark.ranks(1, 2)
def test_a_run_needs_torch_only_once(comm, working, monkeypatch):
    """Without torch and the function's file, a run goes on, is evaluated and exported, and may be moved."""
    module, _ = _module(comm, working)
    cut = f"strategy.height={comm.size}"
    before = train(working / "run.toml", ["training.epochs=1", cut], comm=comm)
    comm.barrier()
    if comm.rank == 0:
        (working / "net.py").unlink()
    comm.barrier()
    hidden = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torch"}
    with monkeypatch.context() as without:
        for name in hidden:
            without.setitem(sys.modules, name, None)
        with pytest.raises(UserError, match=r"model\.filters: expected the options"):
            train(working / "run.toml", ["model.filters=7", cut], resume=True, comm=comm)
        result = train(working / "run.toml", ["training.epochs=2", cut], resume=True, comm=comm)
        assert result["steps"] == 2 * before["steps"]
        comm.barrier()
        if comm.rank == 0:
            (working / "out").rename(working / "moved")
        comm.barrier()
        found = evaluate(working / "moved", [cut], comm=comm)
        assert found["loss"] == pytest.approx(result["validation"]["loss"], rel=1e-12)
        if comm.rank == 0:
            export_run(working / "moved", "onnx", working / "trained.onnx")
            for setting in ("model.filters=7", "model.resolution=32"):
                key = setting.partition("=")[0]
                with pytest.raises(UserError, match=rf"{key}: expected the options .*; for .* set data\.extents"):
                    export_run(working / "moved", "onnx", working / "other.onnx", [setting])
            settings = ["model.filters=6", "data.extents=[32, 24]"]
            export_run(working / "moved", "onnx", working / "large.onnx", settings)
            (given,) = hg.onnx.load(working / "large.onnx").inputs.values()
            assert given.shape == (32, 24, 3)
    if comm.rank == 0:
        hg.to_torch(working / "moved", module.double())
        x = samples(16, 16, 3)
        ours = predicted(hg.onnx.load(working / "trained.onnx"), x)["prediction"]
        np.testing.assert_allclose(last(module.eval()(first(x))), ours, rtol=0, atol=1e-5)


def _module(comm, folder):
    """Write the files of a run, and return what its function makes. Collective."""
    if comm.rank == 0:
        _write(folder)
    comm.barrier()
    return load("net.py:make", "test")(filters=6)


def test_losses_of_an_imported_network(working):
    """By name, with a target of its kind, or from a function; from torch and from an ONNX file."""
    _write(working)
    network = build("torch:net.py:make", loss="SoftmaxCrossEntropy", filters=5)
    assert network.inputs["target"].shape == (16, 16, 1) and network.inputs["target"].dtype == "int32"
    assert network.parameters()["0/w"].shape == (5, 3, 3, 3)
    hg.onnx.save(hg.Network({"output": network.outputs["prediction"]}), None, working / NAME)
    for source in ("torch:net.py:make", f"onnx:{NAME}"):
        network = build(source, loss="net.py:double")
        assert list(network.outputs) == ["prediction", "loss"]
    for source, options, message in (
        ("torch:net.py:alone", {"loss": "Huber"}, r"expected .* a torch.nn.Module and an example, got Sequential"),
        ("torch:net.py:make", {}, "model.loss: expected one of .*, got None; .*--option loss="),
        ("torch:net.py:make", {"loss": "Hubert"}, "model.loss: expected one of .*, got 'Hubert'"),
        ("torch:net.py:make", {"loss": "net.py:alone"}, "model.loss: net.py:alone failed: TypeError"),
        ("torch:net.py:make", {"loss": "Huber", "width": 3}, "model.torch: net.py:make failed: TypeError"),
    ):
        with pytest.raises(UserError, match=message):
            build(source, **options)


def test_keys_that_do_not_go_together():
    assert ModelConfig(torch="net.py:make", loss="Huber", width=3).options == {"loss": "Huber", "width": 3}
    for keys, message in (
        ({"torch": "net.py:make"}, "loss: expected a loss with torch"),
        ({"torch": "net.py", "loss": "Huber"}, "torch: expected "),
        ({"torch": "net.py:make", "name": "mesh", "loss": "Huber"}, "torch: expected no name with it"),
        ({"onnx": "net.onnx", "loss": "Huber", "width": 3}, "width: expected no option but loss with onnx"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelConfig(**keys)
