"""Files that would hang, fill the memory, or give invalid weights raise a one-line error immediately."""

import importlib.util
import os
import re

import numpy as np
import pytest

import halograd as hg
from halograd.errors import UserError
from tests.interchange.support import export, predicted, samples, torch


def _onnx():
    return pytest.importorskip("onnx", reason="needs onnx: pip install 'halograd[interchange]'")


def _file(path, nodes, weights, x=(1, 3, 8, 8), y=(1, 3, 8, 8)):
    """Write a graph with input ``x`` and output ``y``."""
    onnx = _onnx()
    helper, numbers = onnx.helper, onnx.numpy_helper
    given, made = (helper.make_tensor_value_info(name, 1, shape) for name, shape in (("x", x), ("y", y)))
    arrays = [numbers.from_array(np.asarray(array), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", [given], [made], arrays)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    return path


def _loop():
    helper = _onnx().helper
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Identity", ["v"], ["w"])],
        "body",
        [info("i", 7, []), info("go", 9, []), info("v", 1, [1])],
        [info("on", 9, []), info("w", 1, [1])],
    )
    return helper.make_node("Loop", ["n", "c", "v0"], ["made"], body=body)


def _computed():
    """Return, by message, nodes that compute constants, and their inputs."""
    node = _onnx().helper.make_node
    many = np.array([10**9])
    doubled = [node("Concat", ["b" if i else "a", "b" if i else "a"], ["b"], axis=0) for i in range(1)]
    doubled += [node("Concat", [f"b{i}"] * 2, [f"b{i + 1}"], axis=0) for i in range(40)]
    return {
        r"'made' \(Loop\): expected .*, got a loop over constants": (
            [_loop()],
            {"n": np.array(10**12), "c": np.array(True), "v0": np.ones(1, np.float32)},
        ),
        r"\(ConstantOfShape\): expected .*, got constants of 1000000000 numbers, more than": (
            [node("ConstantOfShape", ["n"], ["made"])],
            {"n": many},
        ),
        r"\(Tile\): expected .*, got constants of": ([node("Tile", ["v", "n"], ["made"])], {"n": many, "v": [1.0]}),
        r"\(Expand\): expected .*, got constants of": ([node("Expand", ["v", "n"], ["made"])], {"n": many, "v": [1.0]}),
        r"\(Range\): expected .*, got constants of": (
            [node("Range", ["v", "n", "d"], ["made"])],
            {"v": np.array(0), "n": np.array(10**10), "d": np.array(1)},
        ),
        r"\(Concat\): expected .*, got constants of": (doubled, {"a": [1.0], "b0": np.ones(64, np.float32)}),
        r"\(Tile\): expected .*, got random numbers": (
            [node("RandomUniform", [], ["r"], shape=[1]), node("Tile", ["r", "n"], ["made"])],
            {"n": np.array([10**6])},
        ),
        r"\(Mul\): expected .*, got random numbers": (
            [
                node("RandomUniform", [], ["r0"], shape=[1, 1, 1, 1]),
                *(node("Floor", [f"r{i}"], [f"r{i + 1}"]) for i in range(3000)),
                node("Mul", ["x", "r3000"], ["made"]),
            ],
            {},
        ),
        r"\(RandomNormal\): expected .*, got random numbers": ([node("RandomNormal", [], ["made"], shape=[3])], {}),
    }


@pytest.mark.parametrize("message", list(_computed()) if importlib.util.find_spec("onnx") else [])
def test_constants_are_computed_within_bounds(message, tmp_path):
    nodes, weights = _computed()[message]
    relu = _onnx().helper.make_node("Relu", ["x"], ["y"])
    with pytest.raises(UserError, match=message):
        hg.onnx.load(_file(tmp_path / "m.onnx", [*nodes, relu], weights))


def test_weights_of_a_long_chain_are_refused_by_name(tmp_path):
    """Also if they could be those of weight norm, for which the chain would be computed again."""
    node = _onnx().helper.make_node
    chain = [node("Mul", ["c.weight_v", "c.weight_g"], ["0"])]
    chain += [node("Abs", [f"{i}"], [f"{i + 1}"]) for i in range(3000)]
    weights = {"c.weight_v": np.ones((3, 3, 1, 1), np.float32), "c.weight_g": np.ones((3, 1, 1, 1), np.float32)}
    path = _file(tmp_path / "m.onnx", [*chain, node("Conv", ["x", "3000"], ["y"], "c")], weights)
    with pytest.raises(UserError, match=rf"^{path}: node 'c' \(Conv\): expected parameters as they are trained, got"):
        hg.onnx.load(path)


@pytest.mark.parametrize("group", [0, -1, 2])
@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
def test_groups_that_no_convolution_has_are_refused_by_name(kind, group, tmp_path):
    node = _onnx().helper.make_node(kind, ["x", "c.weight"], ["y"], "c", kernel_shape=[3, 3], group=group, pads=[1] * 4)
    path = _file(tmp_path / "m.onnx", [node], {"c.weight": np.ones((3, 3, 3, 3), np.float32)})
    with pytest.raises(UserError, match=rf"^{path}: node 'c' \({kind}\)"):
        hg.onnx.load(path)


#: By operator: attributes that ONNX does not permit, or that no layer has.
MALFORMED = [
    ("Conv", {"strides": [0, 1], "kernel_shape": [3, 3]}),
    ("Conv", {"dilations": [0, 0], "kernel_shape": [3, 3]}),
    ("Conv", {"pads": [1], "kernel_shape": [3, 3]}),
    ("Conv", {"kernel_shape": [2, 2]}),
    ("MaxPool", {"kernel_shape": [0, 0]}),
    ("MaxPool", {"kernel_shape": [3]}),
    ("MaxPool", {"kernel_shape": [2, 2], "strides": [-1, 1]}),
    ("AveragePool", {"kernel_shape": [2, 2], "pads": [-9, 0, 0, 0]}),
    ("DepthToSpace", {"blocksize": 0, "mode": "CRD"}),
    ("Elu", {"alpha": -1.0}),
    ("Softmax", {"axis": 9}),
    ("Concat", {"axis": 9}),
    ("Transpose", {"perm": [0, 9, 9, 9]}),
    ("LRN", {"size": -3}),
    ("Gelu", {"approximate": "best"}),
]


@pytest.mark.parametrize("kind, attributes", MALFORMED)
def test_malformed_attributes_are_refused_by_name(kind, attributes, tmp_path):
    inputs = ["x", "c.weight"] if kind == "Conv" else ["x"]
    node = _onnx().helper.make_node(kind, inputs, ["y"], "c", **attributes)
    path = _file(tmp_path / "m.onnx", [node], {"c.weight": np.ones((3, 3, 3, 3), np.float32)})
    with pytest.raises(UserError, match=rf"^{path}: node 'c' \({kind}\)") as found:
        hg.onnx.load(path)
    assert "\n" not in str(found.value)


#: By operator: attributes, and a constant input that no layer can read exactly.
INEXACT = {
    "Gather": (["x", "c"], {"axis": 1}, np.array([2, 3])),
    "Gemm": (["x", "w", "c"], {}, np.ones(1, np.float32)),
    "Resize": (
        ["x", "", "", "c"],
        {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        | {"keep_aspect_ratio_policy": "not_larger"},
        np.array([1, 3, 16, 8]),
    ),
}


@pytest.mark.parametrize("kind", INEXACT)
def test_what_would_give_other_numbers_is_refused_by_name(kind, tmp_path):
    inputs, attributes, constant = INEXACT[kind]
    node = _onnx().helper.make_node(kind, inputs, ["y"], "c", **attributes)
    weights = {"c": constant} | ({"w": np.ones((3, 5), np.float32)} if kind == "Gemm" else {})
    extents = (1, 3) if kind == "Gemm" else (1, 3, 8, 8)
    path = _file(tmp_path / "m.onnx", [node], weights, extents, extents)
    with pytest.raises(UserError, match=rf"^{path}: node 'c' \({kind}\): expected"):
        hg.onnx.load(path)


@pytest.mark.parametrize("numbers, extents", [([1, 2, 1, 1], (1, 6)), ([2, 1, 1, 2], (2, 3))])
@pytest.mark.parametrize("sizes", [False, True])
def test_resizes_of_samples_and_channels_are_refused(numbers, extents, sizes, tmp_path):
    """A layer resizes space only."""
    attributes = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    inputs = ["x", "", "", "c"] if sizes else ["x", "", "c"]
    node = _onnx().helper.make_node("Resize", inputs, ["y"], "c", **attributes)
    constant = np.array([1, 3, 8, 8]) * numbers if sizes else np.array(numbers, np.float32)
    path = _file(tmp_path / "m.onnx", [node], {"c": constant}, y=(None,) * 4)
    message = rf"'c' \(Resize\): expected the samples and channels of its input, .1, 3., got {re.escape(str(extents))}"
    with pytest.raises(UserError, match=message):
        hg.onnx.load(path)


@pytest.mark.parametrize("size", [3, [3, 3, 2]], ids=["size", "sizes"])
@pytest.mark.parametrize("i", [-3, -1, 0, 2])
def test_parts_by_their_number(size, i, tmp_path):
    """Counted from the end, too, and with a smaller part at the end."""
    node = _onnx().helper.make_node
    nodes = [node("SplitToSequence", ["x", "n"], ["parts"], axis=1), node("SequenceAt", ["parts", "i"], ["y"])]
    weights = {"n": np.array(size), "i": np.array(i)}
    path = _file(tmp_path / "m.onnx", nodes, weights, (1, 8, 4, 4), (None,) * 4)
    x = samples(4, 4, 8)
    np.testing.assert_array_equal(predicted(hg.onnx.load(path), x)["y"], np.split(x, [3, 6], -1)[i])


@pytest.mark.parametrize("attributes", [{"pads": [2**33, 0, 0, 0]}, {"dilations": [9, 1]}])
def test_extents_that_no_value_has_are_refused(attributes, tmp_path):
    """Impossible extents are an error before any loop over them, and before ONNX's library would end the process."""
    node = _onnx().helper.make_node
    nodes = [
        node("MaxPool", ["x"], ["0"], "pool", kernel_shape=[2, 2], **attributes),
        node("Slice", ["0", "first", "last", "axis"], ["y"], "cut"),
    ]
    numbers = {"first": np.array([4]), "last": np.array([2**62]), "axis": np.array([2])}
    path = _file(tmp_path / "m.onnx", nodes, numbers)
    with pytest.raises(UserError, match=rf"^{path}: node 'pool' \(MaxPool\): expected extents from 1 to"):
        hg.onnx.load(path)


def _network():
    return hg.Network(hg.Conv(2, 1, name="c")(hg.Input((4, 4, 3), "x")))


def test_pipes_are_not_read(tmp_path):
    """Named pipes are an error, because reading one would wait for a writer forever."""
    _onnx()
    pytest.importorskip("safetensors", reason="needs safetensors: pip install 'halograd[interchange]'")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="expected an ONNX file, got none: expected a regular file, got a named pipe"):
        hg.onnx.load(tmp_path / "pipe")
    with pytest.raises(UserError, match="expected a safetensors file, got none: expected a regular file, got a named"):
        hg.interchange.load_weights(_network(), tmp_path / "pipe")
    onnx = _onnx()
    helper = onnx.helper
    weights = onnx.TensorProto(name="c.weight", data_type=1, dims=[3, 3, 1, 1], data_location=1)
    weights.external_data.add(key="location", value="pipe")
    infos = [helper.make_tensor_value_info(name, 1, [1, 3, 4, 4]) for name in "xy"]
    node = helper.make_node("Conv", ["x", "c.weight"], ["y"], "c")
    graph = helper.make_graph([node], "g", infos[:1], infos[1:], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match="pipe: expected weights, got none: expected a regular file, got a named pipe"):
        hg.onnx.load(tmp_path / "m.onnx")


@pytest.mark.parametrize("kind", ["int8", "uint8", "bool", "int32", "int64"])
def test_weights_of_integers_are_refused(kind, tmp_path):
    """Integer weights are an error, because quantized weights without their scales have other values."""
    numpy = pytest.importorskip("safetensors.numpy", reason="needs safetensors: pip install 'halograd[interchange]'")
    arrays = {"c.weight": np.ones((2, 3, 1, 1), kind), "c.bias": np.zeros(2, np.float32)}
    numpy.save_file(arrays, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=r"expected c/w as c\.weight of type F64, F32, F16, got (I|U|B).*\.float\(\)"):
        hg.interchange.load_weights(_network(), tmp_path / "w.safetensors")


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_weights_of_all_sizes_with_a_point_are_read(kind, tmp_path):
    numpy = pytest.importorskip("safetensors.numpy", reason="needs safetensors: pip install 'halograd[interchange]'")
    arrays = {"c.weight": np.full((2, 3, 1, 1), 0.5, kind), "c.bias": np.zeros(2, kind)}
    numpy.save_file(arrays, tmp_path / "w.safetensors")
    assert (hg.interchange.load_weights(_network(), tmp_path / "w.safetensors")["c/w"] == 0.5).all()


@pytest.mark.torch
def test_weights_of_bfloat16_are_refused(tmp_path):
    lib = torch()
    save = pytest.importorskip("safetensors.torch", reason="needs safetensors: pip install 'halograd[interchange]'")
    arrays = {"c.weight": lib.ones(2, 3, 1, 1, dtype=lib.bfloat16), "c.bias": lib.zeros(2)}
    save.save_file(arrays, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=r"of type F64, F32, F16, got BF16; .*\.float\(\)"):
        hg.interchange.load_weights(_network(), tmp_path / "w.safetensors")


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(number, tmp_path):
    """Weights that are not finite are an error; in training they would look like a too large learning rate."""
    numpy = pytest.importorskip("safetensors.numpy", reason="needs safetensors: pip install 'halograd[interchange]'")
    weights = np.ones((2, 3, 1, 1), np.float32)
    weights[1, 2] = number
    numpy.save_file({"c.weight": weights, "c.bias": np.zeros(2, np.float32)}, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=r"w\.safetensors: c\.weight: expected finite numbers, got 1 of 6 that are inf"):
        hg.interchange.load_weights(_network(), tmp_path / "w.safetensors")
    node = _onnx().helper.make_node("Conv", ["x", "c.weight"], ["y"], "c")
    path = _file(tmp_path / "m.onnx", [node], {"c.weight": weights}, y=(1, 2, 8, 8))
    with pytest.raises(UserError, match=r"m\.onnx: weight c\.weight: expected finite numbers, got 1 of 6"):
        hg.onnx.load(path).initial_values()


@pytest.mark.torch
def test_a_large_weight_of_a_small_file_is_no_allocation(tmp_path):
    """A file that declares large extents without their data, as if truncated, is an error and allocates nothing."""
    onnx = _onnx()
    path = export(torch().nn.Conv2d(3, 4, 1), torch().zeros(2, 3, 4, 4), tmp_path / "m.onnx", "old")
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.name.endswith("weight"):
            tensor.ClearField("raw_data")
            tensor.dims[:] = [4 * 10**9, 3, 10, 10]
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value="w.bin")
    (tmp_path / "w.bin").write_bytes(b"1234")
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UserError):
        hg.onnx.load(path).initial_values()
