"""Double of the module `cudnn` (nvidia-cudnn-frontend 1.26) whose graphs run on host memory.

A graph stores its tensors' extents, strides, paddings and uids. A launch reads the table of addresses as the real one
does, accesses memory through those extents and strides only, and computes with NumPy. So a wrong stride, a
swapped address or a padding on the wrong side gives a wrong result. The double rejects what cuDNN rejects, and
overwrites its workspace, which must not overlap other memory.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

from halograd.kernels import Geometry
from halograd.kernels.numpy import NumpyBackend

DataType = Enum("DataType", "FLOAT DOUBLE HALF BFLOAT16")
HeurMode = Enum("HeurMode", "A B FALLBACK")
NumericalNote = Enum(
    "NumericalNote",
    "TENSOR_CORE DOWN_CONVERT_INPUTS REDUCED_PRECISION_REDUCTION FFT NONDETERMINISTIC WINOGRAD "
    "WINOGRAD_TILE_4x4 WINOGRAD_TILE_6x6 WINOGRAD_TILE_13x13",
)
ReductionMode = Enum("ReductionMode", "ADD MAX")
BehaviorNote = Enum("BehaviorNote", "RUNTIME_COMPILATION SUPPORTS_CUDA_GRAPH_NATIVE_API")
DTYPES = {
    DataType.FLOAT: np.dtype(np.float32),
    DataType.DOUBLE: np.dtype(np.float64),
    DataType.HALF: np.dtype(np.float16),
    DataType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}


MADE = {"fprop": "y", "dgrad": "x", "wgrad": "w"}


class NotSupported(RuntimeError):
    """Double of ``cudnn.cudnnGraphNotSupportedError``."""


@dataclass
class EngineDouble:
    """Double of an engine: its name, requirements and unsupported cases."""

    name: str
    notes: tuple[str, ...] = ()
    workspace: int = 0
    seconds: float = 1e-3
    compiled: bool = False
    builds: bool = True
    launches: bool = True


def default_engines() -> list[EngineDouble]:
    """Return engines as cuDNN proposes them for float32: TF32 tensor cores first."""
    return [
        EngineDouble("eng62_k2=1", ("TENSOR_CORE", "DOWN_CONVERT_INPUTS"), 4096, 1e-3),
        EngineDouble("eng10_k1=3", ("NONDETERMINISTIC",), 1000, 3e-3),
        EngineDouble("eng0", (), 512, 4e-3),
        EngineDouble("eng71", (), 0, 2e-3, compiled=True),
    ]


@dataclass
class TensorDouble:
    """Double of a tensor of a graph; `compute` returns a virtual tensor's values from those of others.

    With `adds` they are added to those of the array.
    """

    dim: list[int] | None = None
    stride: list[int] | None = None
    data_type: DataType | None = None
    uid: int = -1
    output: bool = False
    compute: Callable[[dict[int, np.ndarray]], np.ndarray] | None = None
    adds: bool = False

    def set_output(self, value: bool) -> TensorDouble:
        self.output = value
        return self

    def set_data_type(self, value: DataType) -> TensorDouble:
        self.data_type = value
        return self

    def set_dim(self, value: list[int]) -> TensorDouble:
        assert isinstance(value, list)
        self.dim = value
        return self

    def set_stride(self, value: list[int]) -> TensorDouble:
        assert isinstance(value, list)
        self.stride = value
        return self

    def set_uid(self, value: int) -> TensorDouble:
        self.uid = value
        return self

    def view(self, address: int) -> np.ndarray:
        """Return the memory at `address` with this tensor's dtype, extents and strides."""
        assert address and address % 16 == 0, f"tensor {self.uid} at {address}"
        dtype = DTYPES[self.data_type]
        last = sum((n - 1) * s for n, s in zip(self.dim, self.stride))
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * ((last + 1) * dtype.itemsize)).from_address(address))
        return as_strided(raw.view(dtype), self.dim, [s * dtype.itemsize for s in self.stride])


def channels_last(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(a, 1, -1).astype(np.float64))


def channels_first(a: np.ndarray) -> np.ndarray:
    return np.moveaxis(a, -1, 1)


@lru_cache
def reference() -> NumpyBackend:
    """Return one shared reference backend, because opening one searches all libraries of the process."""
    return NumpyBackend()


def geometry_of(x: list[int], w: list[int], window: dict[str, list[int]]) -> Geometry:
    pads = tuple(zip(window["pre_padding"], window["post_padding"]))
    return Geometry(tuple(w[2:]), tuple(window["stride"]), tuple(window["dilation"]), pads, x[1] // w[1])


class GraphDouble:
    """Double of a graph of one convolution or one attention."""

    def __init__(self, module: CudnnDouble, **settings: Any) -> None:
        self.module, self.settings = module, settings
        self.handle = settings.get("handle")
        assert self.handle is None or self.handle in module.handles, "a graph of an unknown handle"
        self.tensors: list[TensorDouble] = []
        self.results: list[TensorDouble] = []
        self.window: dict[str, list[int]] = {}
        self.roles: dict[str, TensorDouble] = {}
        self.stage = "described"
        self.engines: list[EngineDouble] = []
        self.barred: set[int] = set()
        self.limit: int | None = None
        self.candidate: int | None = None
        self.plans: list[str] = []  # which it stores
        self.prepared = False
        self.sums = 0
        module.graphs.append(self)

    # ------------------------------------------------------------------ description
    def tensor(self, *, name: str, dim: list[int], stride: list[int], data_type: DataType, uid: int) -> TensorDouble:
        made = TensorDouble(list(dim), list(stride), data_type, uid)
        self.tensors.append(made)
        return made

    def _convolution(self, kind: str, roles: dict[str, TensorDouble], window: dict[str, list[int]]) -> TensorDouble:
        self.kind, self.roles, self.window = kind, roles, window
        out = self._result(self._convolve)
        self.roles = {**roles, MADE[kind]: out}
        return out

    def _result(self, compute: Callable[[dict[int, np.ndarray]], np.ndarray]) -> TensorDouble:
        self.results.append(TensorDouble(compute=compute))
        return self.results[-1]

    def conv_fprop(self, image: TensorDouble, weight: TensorDouble, **window: list[int]) -> TensorDouble:
        return self._convolution("fprop", {"x": image, "w": weight}, window)

    def conv_dgrad(self, loss: TensorDouble, filter: TensorDouble, **window: list[int]) -> TensorDouble:
        return self._convolution("dgrad", {"y": loss, "w": filter}, window)

    def conv_wgrad(self, image: TensorDouble, loss: TensorDouble, **window: list[int]) -> TensorDouble:
        return self._convolution("wgrad", {"x": image, "y": loss}, window)

    def bias(self, *, input: TensorDouble, bias: TensorDouble) -> TensorDouble:
        return self._result(lambda memory: input.compute(memory) + memory[bias.uid].astype(np.float64))

    def relu(self, input: TensorDouble) -> TensorDouble:
        return self._result(lambda memory: np.maximum(input.compute(memory), 0))

    # ------------------------------------------------------------------ epilogues with sums
    def _elementwise(self, compute: Callable[..., np.ndarray], *inputs: TensorDouble) -> TensorDouble:
        """Return a virtual tensor; intermediate results are float32."""
        return self._result(lambda memory: compute(*(self._values(t, memory) for t in inputs)).astype(np.float32))

    @staticmethod
    def _values(t: TensorDouble, memory: dict[int, np.ndarray]) -> np.ndarray:
        return (t.compute(memory) if t.compute else memory[t.uid]).astype(np.float32)

    def add(self, *, a: TensorDouble, b: TensorDouble) -> TensorDouble:
        return self._elementwise(np.add, a, b)

    def sub(self, *, a: TensorDouble, b: TensorDouble) -> TensorDouble:
        return self._elementwise(np.subtract, a, b)

    def mul(self, *, a: TensorDouble, b: TensorDouble) -> TensorDouble:
        return self._elementwise(np.multiply, a, b)

    def rsqrt(self, *, input: TensorDouble) -> TensorDouble:
        return self._elementwise(lambda x: 1 / np.sqrt(x), input)

    def relu_backward(self, *, loss: TensorDouble, input: TensorDouble) -> TensorDouble:
        return self._elementwise(lambda gradient, x: gradient * (x > 0), loss, input)

    def reduction(self, *, input: TensorDouble, mode: ReductionMode) -> TensorDouble:
        """Return sums per channel, added to the contents of the output if the module `accumulates`.

        They are in float32, of 128 rows one after the other, and of these sums in any order, as by atomic additions.
        """
        assert mode is ReductionMode.ADD

        def add_up(x: np.ndarray) -> np.ndarray:
            rows = np.moveaxis(x, 1, -1).reshape(-1, x.shape[1])
            tiles = np.add.reduceat(rows, range(0, len(rows), 128), axis=0)
            return np.add.accumulate(tiles, axis=0)[-1].reshape(1, -1, *(1 for _ in x.shape[2:]))

        made = self._elementwise(add_up, input)
        made.adds, self.sums = self.module.accumulates, self.sums + 1
        return made

    def sdpa(
        self,
        *,
        q: TensorDouble,
        k: TensorDouble,
        v: TensorDouble,
        bias: TensorDouble | None,
        attn_scale: float,
        generate_stats: bool,
    ) -> list[TensorDouble]:
        assert generate_stats
        self.kind, self.roles, self.scale = "sdpa", {"q": q, "k": k, "v": v}, attn_scale
        if bias is not None:
            self.roles["bias"] = bias
        return [self._result(lambda memory, i=i: self._attend(memory)[i]) for i in range(2)]

    def sdpa_backward(self, *, o: Any, dO: Any, stats: Any, dBias: Any, use_deterministic_algorithm: bool, **inputs):
        self.sdpa(generate_stats=True, **inputs)
        self.kind, self.results = "sdpa_backward", []
        self.roles |= {"o": o, "dO": dO, "stats": stats}
        if dBias is not None:  # an output that is given like an input
            self.tensors.remove(dBias)
            dBias.output, dBias.compute = True, lambda memory: self._gradients(memory)[3]
            self.results.append(dBias)
        made = [self._result(lambda memory, i=i: self._gradients(memory)[i]) for i in range(3)]
        assert use_deterministic_algorithm in (True, False)
        return made

    # ------------------------------------------------------------------ planning
    def validate(self) -> None:
        self.outputs = [t for t in self.results if t.output]
        for made in self.outputs:
            assert made.dim and made.stride and made.data_type, "an output needs extents, strides and type"
        used = [*self.tensors, *self.outputs]
        assert len({t.uid for t in used}) == len(used) and all(t.uid > 0 for t in used), "tensors need numbers"
        if self.kind in MADE:
            self._check_convolution()
        else:
            self._check_attention()
        self._expect("described", "validated")

    def _check_attention(self) -> None:
        assert self.settings["sm_version"] == 90, "the frontend would load libcudart"
        roles = self.roles
        (b, heads, queries, d), (_, key_heads, keys, _), (_, _, _, e) = (roles[n].dim for n in "qkv")
        assert roles["k"].dim == [b, key_heads, keys, d] and roles["v"].dim == [b, key_heads, keys, e]
        sizes = {"o": [b, heads, queries, e], "stats": [b, heads, queries, 1], "bias": [1, heads, queries, keys]}
        for name in sizes.keys() & roles.keys():
            assert roles[name].dim == sizes[name], name
        assert all(t.stride[-1] == 1 for t in (*roles.values(), *self.outputs))
        wide = [t for t in (*self.tensors, *self.outputs) if t.data_type is DataType.FLOAT]
        assert len(wide) == 1 and wide[0].dim == sizes["stats"] and wide[0].stride[1:] == [queries, 1, 1]
        if d % 8 or e % 8:
            raise NotSupported("hidden_dim should be multiple of 8")
        if heads % key_heads:
            raise NotSupported("number of heads for key and query")

    def _check_convolution(self) -> None:
        made, *sums = self.outputs
        if not sums:
            assert made is self.results[-1]
        elif self.kind == "dgrad":
            assert self.results[0].dim == made.dim, "a data gradient with an epilogue needs its extents"
        for total in sums:
            assert total.data_type is DataType.FLOAT
            assert total.dim == [1, made.dim[1], *(1 for _ in made.dim[2:])]
        self.results[0].dim = made.dim  # result of the convolution, if a bias or a ReLU follows
        x, w, y = (self.roles[name].dim for name in "xwy")
        pads = [*self.window["pre_padding"], *self.window["post_padding"]]
        if min(pads) < 0:
            raise NotSupported("negative padding")
        if len(x) not in (4, 5):
            raise NotSupported(f"{len(x) - 2} spatial axes")
        geometry = geometry_of(x, w, self.window)
        assert y == [x[0], w[0], *geometry.output_shape(x[2:])], f"{y} does not follow from {x} and {geometry}"
        assert x[1] % w[1] == 0 and w[0] % (x[1] // w[1]) == 0

    def _expect(self, before: str, after: str) -> None:
        assert self.stage == before, f"expected a graph that is {before}, got {self.stage}"
        self.stage = after

    def build_operation_graph(self) -> None:
        self._expect("validated", "built")

    def create_execution_plans(self, modes: list[HeurMode]) -> None:
        assert modes == [HeurMode.A, HeurMode.FALLBACK]
        self._expect("built", "planned")
        self.engines = self.module.engines()
        if not self.engines:
            raise NotSupported("No valid engine\nconfigs for this graph")

    def deselect_numeric_notes(self, notes: list[NumericalNote]) -> None:
        names = {note.name for note in notes}
        self.barred |= {i for i, e in enumerate(self.engines) if names & set(e.notes)}

    def deselect_workspace_greater_than(self, limit: int) -> None:
        self.limit = limit

    def get_execution_plan_count(self) -> int:
        return len(self.engines)

    def get_plan_name_at_index(self, index: int) -> str:
        return self.engines[index].name

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        return self.engines[index].workspace

    def get_behavior_notes_for_plan_at_index(self, index: int) -> list[BehaviorNote]:
        return [BehaviorNote.RUNTIME_COMPILATION] if self.engines[index].compiled else []

    def build_plan_at_index(self, index: int) -> None:
        assert self.stage == "planned"
        engine = self.engines[index]
        too_large = self.limit is not None and engine.workspace > self.limit
        if index in self.barred or too_large or not engine.builds:
            raise NotSupported(f"Chosen plan index {index} has been deselected.")
        self.module.built.append(engine.name)
        self.plans.append(engine.name)
        self.candidate, self.prepared = index, False

    # ------------------------------------------------------------------ serialization
    def serialize(self) -> list[int]:
        assert self.candidate is not None
        self.module.saved[self.module.stamp] = self
        return list(json.dumps([self.module.stamp, self.candidate]).encode())

    def deserialize(self, blob: list[int]) -> None:
        assert isinstance(blob, list)
        stamp, candidate = json.loads(bytes(blob))
        if stamp not in self.module.saved:
            raise RuntimeError("plan of another library")
        other = self.module.saved[stamp]
        for name in ("tensors", "window", "roles", "kind", "outputs", "engines"):
            setattr(self, name, getattr(other, name))
        self.stage, self.candidate = "planned", candidate
        self.module.restored += 1

    # ------------------------------------------------------------------ launch
    def _prepare_variant_pack_template(self) -> None:
        self.prepared = True

    def _get_variant_pack_uids_sorted(self) -> list[int]:
        return sorted(t.uid for t in [*self.tensors, *self.outputs])

    def _execute_with_raw_ptrs(self, location: int, count: int, workspace: int, handle: int) -> None:
        assert self.prepared, "a table of addresses needs its template, anew for each plan built"
        uids = self._get_variant_pack_uids_sorted()
        assert count == len(uids)
        table = (ctypes.c_uint64 * count).from_address(location)
        self._launch(dict(zip(uids, table)), workspace, handle, "table")

    def execute(self, pack: dict[int, int], workspace: int, handle: int) -> None:
        assert all(isinstance(address, int) for address in pack.values())
        self._launch(pack, workspace, handle, "public")

    def _launch(self, addresses: dict[int, int], workspace: int, handle: int, way: str) -> None:
        module = self.module
        assert handle in module.handles and module.streams.get(handle) == module.current_stream()
        engine = self.engines[self.candidate]
        self.module.launched = self
        if not engine.launches:
            raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED\n at launch")
        module.launches.append((engine.name, module.streams[handle], way))
        module.clock += engine.seconds
        if engine.workspace:
            assert workspace and workspace % 256 == 0, "a workspace was needed"
            ctypes.memset(workspace, 0xFF, engine.workspace)
        memory = {t.uid: t.view(addresses[t.uid]) for t in self.tensors}
        computed = [t.compute(memory) for t in self.outputs]
        for t, values in zip(self.outputs, computed):
            target = t.view(addresses[t.uid])
            target[...] = (values + target if t.adds else values).astype(target.dtype)

    def _probabilities(self, memory: dict[int, np.ndarray]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return the arrays in float64, keys and values for every head of the queries, and the scores."""
        x = {name: memory[t.uid].astype(np.float64) for name, t in self.roles.items()}
        groups = x["q"].shape[1] // x["k"].shape[1]
        x["k"], x["v"] = (np.repeat(x[name], groups, axis=1) for name in "kv")
        return x, self.scale * x["q"] @ x["k"].swapaxes(2, 3) + x.get("bias", 0)

    def _attend(self, memory: dict[int, np.ndarray]) -> list[np.ndarray]:
        x, scores = self._probabilities(memory)
        stats = np.logaddexp.reduce(scores, axis=3, keepdims=True)
        return [np.exp(scores - stats) @ x["v"], stats]

    def _gradients(self, memory: dict[int, np.ndarray]) -> list[np.ndarray]:
        """Return the gradients by the stored results, as cuDNN does: wrong ones give wrong gradients."""
        x, scores = self._probabilities(memory)
        p = np.exp(scores - x["stats"])
        change = p * (x["dO"] @ x["v"].swapaxes(2, 3) - (x["dO"] * x["o"]).sum(axis=3, keepdims=True))
        key_heads = self.roles["k"].dim[1]

        def shared(a: np.ndarray) -> np.ndarray:
            return a.reshape(a.shape[0], key_heads, -1, *a.shape[2:]).sum(axis=2)

        dk, dv = self.scale * change.swapaxes(2, 3) @ x["q"], p.swapaxes(2, 3) @ x["dO"]
        return [self.scale * change @ x["k"], shared(dk), shared(dv), change.sum(axis=0, keepdims=True)]

    def _convolve(self, memory: dict[int, np.ndarray]) -> np.ndarray:
        geometry = geometry_of(self.roles["x"].dim, self.roles["w"].dim, self.window)
        given = {name: channels_last(memory[t.uid]) for name, t in self.roles.items() if t.uid in memory}
        shape = self.roles[MADE[self.kind]].dim
        out = np.empty((shape[0], *shape[2:], shape[1]))
        numpy = reference()
        if self.kind == "fprop":
            numpy.conv_forward(given["x"], given["w"], None, out, geometry)()
        elif self.kind == "dgrad":
            numpy.conv_backward_data(given["y"], given["w"], out, geometry)()
        else:
            numpy.conv_backward_filter(given["x"], given["y"], out, None, geometry)()
        return channels_first(out)


class CudnnDouble:
    """Double of the module `cudnn`. `engines` returns the proposed engines for every graph."""

    __version__ = "1.26.0"
    data_type, heur_mode = DataType, HeurMode
    numerical_note, behavior_note, reduction_mode = NumericalNote, BehaviorNote, ReductionMode
    cudnnGraphNotSupportedError = NotSupported

    def __init__(self, current_stream: Callable[[], int]) -> None:
        self.current_stream = current_stream
        self.engines: Callable[[], list[EngineDouble]] = default_engines
        self.version = 92800
        self.accumulates = False
        self.handles: list[int] = []
        self.streams: dict[int, int] = {}
        self.set_streams = 0
        self.graphs: list[GraphDouble] = []
        self.built: list[str] = []
        self.launches: list[tuple[str, int, str]] = []
        self.clock = 0.0
        self.stamp = "build 1"
        self.saved: dict[str, GraphDouble] = {}
        self.restored = 0
        self._handles_made = 1000

    def backend_version(self) -> int:
        return self.version

    def wait(self, seconds: float) -> None:
        """Let time pass on the device."""
        self.clock += seconds

    def create_handle(self) -> int:
        self._handles_made += 1
        self.handles.append(self._handles_made)
        return self._handles_made

    def destroy_handle(self, handle: int) -> None:
        self.handles.remove(handle)

    def set_stream(self, *, handle: int, stream: int) -> None:
        self.set_streams += 1
        self.streams[handle] = stream

    def pygraph(self, **settings: Any) -> GraphDouble:
        return GraphDouble(self, **settings)
