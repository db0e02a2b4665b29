"""The C interface of oneDNN 3 by ctypes: constants, prototypes, error codes.

The numbers are those of the public headers; versions 3.2 to 3.13 only added to them. Other files use the constants by
name and call the functions of :class:`Abi`; ctypes prototypes and status codes stay here.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

from ..kernel import KernelError

__all__ = ["NAME", "Abi", "Argument", "DnnlError", "candidates", "dims", "open_library"]


NAME = "libdnnl.so.3"
ENVIRONMENT = "DNNL_LIB"
_REMEDY = f"pip install onednn-cpu-gomp (x86-64 Linux), or set {ENVIRONMENT} to a {NAME} of oneDNN 3"


def candidates() -> list[str]:
    """Return the paths of the library to try, in order: the environment variable's alone if it is set; else those of
    this Python, of conda and of the system.
    """
    named = os.environ.get(ENVIRONMENT)
    if named:
        return [named]
    prefixes = [sys.prefix, os.environ.get("CONDA_PREFIX", "")]
    return [*(str(Path(p) / "lib" / NAME) for p in prefixes if p), NAME]


def open_library() -> tuple[ctypes.CDLL, str]:
    """Return the library and its path.

    Raises
    ------
    KernelError
        If no library can be loaded; the message has the reason for each path.
    """
    reasons = []
    for path in candidates():
        try:
            return ctypes.CDLL(path), path
        except OSError as error:
            reasons.append(f"{path}: {' '.join(str(error).split())}")
    raise KernelError(f"expected oneDNN's library, got none ({'; '.join(reasons)}); {_REMEDY}")


# Data types (dnnl_data_type_t).
TYPES = {"float16": 1, "bfloat16": 2, "float32": 3, "uint8": 6}
# Kinds of propagation (dnnl_prop_kind_t).
FORWARD_TRAINING, FORWARD_INFERENCE, BACKWARD, BACKWARD_DATA = 64, 96, 128, 160
# Algorithms (dnnl_alg_kind_t).
CONVOLUTION_DIRECT = 0x1
RELU, TANH, ELU, ABS, LINEAR, SOFT_RELU, LOGISTIC, SWISH = 0x20, 0x21, 0x22, 0x24, 0x26, 0x27, 0x29, 0x2C
EXP, CLIP, POWER, ROUND, HARDSWISH = 0x2A, 0x2E, 0x30, 0x32, 0x34
# ReLU that preserves NaN: algorithm and its two parameters. The second variant turns -inf into NaN (see
# `pointwise.py`).
EXACT_RELU = (ELU, 0.0, 0.0)
KEEPING_RELU = (HARDSWISH, 3.4028234663852886e38, 0.0)
RELU_BY_OUTPUT = 0x100
POOLING_MAX, POOLING_AVERAGE_INCLUDE, POOLING_AVERAGE_EXCLUDE = 0x1FF, 0x2FF, 0x3FF
BINARY_ADD, BINARY_MULTIPLY, BINARY_MAXIMUM = 0x1FFF0, 0x1FFF1, 0x1FFF2
BINARY_SUBTRACT, BINARY_GREATER_EQUAL = 0x1FFF5, 0x1FFF6
REDUCTION_SUM = 0x2FFF4
# Flags of batch normalization (dnnl_normalization_flags_t).
GLOBAL_STATISTICS, SCALE, SHIFT, FUSE_RELU = 1, 2, 4, 8
# Arguments of primitives (DNNL_ARG_*).
SRC, SRC_1, DST, WEIGHTS, BIAS = 1, 2, 17, 33, 41
MEAN, VARIANCE, GAMMA, BETA, WORKSPACE, SCRATCHPAD = 49, 50, 51, 52, 64, 80
DIFF_SRC, DIFF_DST, DIFF_WEIGHTS, DIFF_BIAS, DIFF_GAMMA, DIFF_BETA = 129, 145, 161, 169, 255, 256
POST_OPERATION = 32768  # argument of operation i: POST_OPERATION * (i + 1) | SRC_1
# Queries (dnnl_query_t).
_QUERY_IMPL, _QUERY_ARGUMENT = 8, 255
# dnnl_format_tag_any, dnnl_cpu, dnnl_stream_in_order, dnnl_scratchpad_mode_user.
_ANY_FORMAT, _CPU, _IN_ORDER, _USER_SCRATCHPAD = 1, 1, 1, 1
_STATUS = {
    1: "out of memory",
    2: "invalid arguments",
    3: "unimplemented",
    4: "no further implementation",
    5: "runtime error",
    6: "not required",
}
OUT_OF_MEMORY, UNIMPLEMENTED, INVALID, LAST_IMPLEMENTATION = 1, 3, 2, 4
# Instruction sets (dnnl_cpu_isa_t) by their bits; a set includes those whose bits it has.
_INSTRUCTION_SETS = {
    0x1: "SSE4.1",
    0x3: "AVX",
    0x7: "AVX2",
    0xF: "AVX2-VNNI",
    0x1F: "AVX2-VNNI-2",
    0x27: "AVX-512",
    0x67: "AVX-512-VNNI",
    0xE7: "AVX-512-BF16",
    0x1EF: "AVX-512-FP16",
    0xFEF: "AVX-512-AMX",
    0x1FEF: "AVX-512-AMX-FP16",
}
#: Instruction sets with products of 16 bits, by dtype. On others, oneDNN emulates bfloat16 or has no kernels.
NATIVE = {
    "bfloat16": ("AVX2-VNNI-2", "AVX-512-BF16", "AVX-512-FP16", "AVX-512-AMX", "AVX-512-AMX-FP16"),
    "float16": ("AVX2-VNNI-2", "AVX-512-FP16", "AVX-512-AMX", "AVX-512-AMX-FP16"),
}
# Threading runtimes whose calls block until the work is done: sequential, OpenMP, TBB.
_BLOCKING = (1, 2, 4)
# DNNL_MAX_NDIMS, the length of a dnnl_dims_t.
_MAX_DIMS = 12

_Out = POINTER(c_void_p)
_Dims = POINTER(c_int64)


class DnnlError(KernelError):
    """Error: a oneDNN call returned an error code.

    Attributes
    ----------
    status : int
        The error code.
    """

    def __init__(self, function: str, status: int) -> None:
        super().__init__(f"oneDNN: {function}: {_STATUS.get(status, f'status {status}')}")
        self.status = status


class Argument(ctypes.Structure):
    """``dnnl_exec_arg_t``: the index of an argument (``DNNL_ARG_*``) and the handle of its memory."""

    _fields_ = [("index", c_int), ("memory", c_void_p)]


class _Version(ctypes.Structure):
    _fields_ = [
        ("major", c_int),
        ("minor", c_int),
        ("patch", c_int),
        ("hash", c_char_p),
        ("cpu_runtime", c_uint),
        ("gpu_runtime", c_uint),
    ]


def dims(values: Any) -> Any:
    """Return the values as ``dnnl_dims_t``."""
    return (c_int64 * _MAX_DIMS)(*values)


# Types of the arguments of dnnl_*_primitive_desc_create between the engine and the attributes.
_DESCRIPTORS: dict[str, tuple[Any, ...]] = {
    "reorder": (c_void_p, c_void_p, c_void_p),  # takes a descriptor in place of the engine
    "binary": (c_int, c_void_p, c_void_p, c_void_p),
    "matmul": (c_void_p, c_void_p, c_void_p, c_void_p),
    "convolution_forward": (c_int, c_int, *(c_void_p,) * 4, *(_Dims,) * 4),
    "convolution_backward_data": (c_int, *(c_void_p,) * 3, *(_Dims,) * 4, c_void_p),
    "convolution_backward_weights": (c_int, *(c_void_p,) * 4, *(_Dims,) * 4, c_void_p),
    "eltwise_forward": (c_int, c_int, c_void_p, c_void_p, c_float, c_float),
    "eltwise_backward": (c_int, c_void_p, c_void_p, c_void_p, c_float, c_float, c_void_p),
    "batch_normalization_forward": (c_int, c_void_p, c_void_p, c_float, c_uint),
    "batch_normalization_backward": (c_int, c_void_p, c_void_p, c_void_p, c_float, c_uint, c_void_p),
    "reduction": (c_int, c_void_p, c_void_p, c_float, c_float),
    "pooling_forward": (c_int, c_int, c_void_p, c_void_p, *(_Dims,) * 5),
    "pooling_backward": (c_int, c_void_p, c_void_p, *(_Dims,) * 5, c_void_p),
}


class Abi:
    """Checked calls into one loaded library; handles are integers.

    Raises
    ------
    KernelError
        If the library is not a oneDNN 3 whose CPU calls block.
    """

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        self._library = library
        try:
            library.dnnl_version.restype = POINTER(_Version)
            version = library.dnnl_version().contents
        except AttributeError:
            raise KernelError(
                f"expected oneDNN 3 in {path}, got a library without dnnl_version; set DNNL_LIB"
            ) from None
        self.version = f"{version.major}.{version.minor}.{version.patch}"
        if version.major != 3:
            raise KernelError(f"expected oneDNN 3, got {self.version} in {path}; set DNNL_LIB to another library")
        if version.cpu_runtime not in _BLOCKING:
            raise KernelError(
                f"expected a oneDNN built for OpenMP, TBB or one thread, got CPU runtime {version.cpu_runtime} in "
                f"{path}, whose calls return early; set DNNL_LIB to another library"
            )
        self._declare()

    def _declare(self) -> None:
        create, call = self._create, self._call
        self.engine = create("dnnl_engine_create", c_int, c_size_t)
        self.stream = create("dnnl_stream_create", c_void_p, c_uint)
        self._desc_strides = create("dnnl_memory_desc_create_with_strides", c_int, _Dims, c_int, _Dims)
        self._desc_tag = create("dnnl_memory_desc_create_with_tag", c_int, _Dims, c_int, c_int)
        self.desc_clone = create("dnnl_memory_desc_clone", c_void_p)
        self.memory = create("dnnl_memory_create", c_void_p, c_void_p, c_void_p)
        self._attr = create("dnnl_primitive_attr_create")
        self._attr_scratchpad = call("dnnl_primitive_attr_set_scratchpad_mode", c_void_p, c_int)
        self.attr_post_operations = call("dnnl_primitive_attr_set_post_ops", c_void_p, c_void_p)
        self.post_operations = create("dnnl_post_ops_create")
        self.append_eltwise = call("dnnl_post_ops_append_eltwise", c_void_p, c_int, c_float, c_float)
        self.append_sum = call("dnnl_post_ops_append_sum", c_void_p, c_float, c_int, c_int)
        self.append_binary = call("dnnl_post_ops_append_binary", c_void_p, c_int, c_void_p)
        self.primitive = create("dnnl_primitive_create", c_void_p)
        self.next_implementation = call("dnnl_primitive_desc_next_impl", c_void_p)
        self._isa = self._raw("dnnl_get_effective_cpu_isa", c_int)
        self._query = call("dnnl_primitive_desc_query", c_void_p, c_int, c_int, c_void_p)
        self.set_data = call("dnnl_memory_set_data_handle", c_void_p, c_void_p)
        self._query_desc = self._raw("dnnl_primitive_desc_query_md", c_void_p, c_void_p, c_int, c_int)
        self.desc_size = self._raw("dnnl_memory_desc_get_size", c_size_t, c_void_p)
        self._desc_equal = self._raw("dnnl_memory_desc_equal", c_int, c_void_p, c_void_p)
        self.execute = self._raw("dnnl_primitive_execute", c_int, c_void_p, c_void_p, c_int, c_void_p)
        for kind in (
            "engine",
            "stream",
            "memory",
            "memory_desc",
            "primitive",
            "primitive_desc",
            "primitive_attr",
            "post_ops",
        ):
            setattr(self, f"destroy_{kind}", call(f"dnnl_{kind}_destroy", c_void_p))
        for name, types in _DESCRIPTORS.items():
            engine = (c_void_p, *types, c_void_p)
            setattr(self, name, create(f"dnnl_{name}_primitive_desc_create", *engine))

    def _raw(self, name: str, result: Any, *types: Any) -> Callable[..., Any]:
        function = getattr(self._library, name)
        function.argtypes, function.restype = types, result
        return function

    def _call(self, name: str, *types: Any) -> Callable[..., None]:
        function = self._raw(name, c_int, *types)

        def checked(*args: Any) -> None:
            status = function(*args)
            # Not a KernelError, after which another implementation would be tried.
            if status == OUT_OF_MEMORY:
                raise MemoryError(f"oneDNN: {name}: {_STATUS[status]}")
            if status:
                raise DnnlError(name, status)

        return checked

    def _create(self, name: str, *types: Any) -> Callable[..., int]:
        function = self._call(name, _Out, *types)

        def created(*args: Any) -> int:
            handle = c_void_p()
            function(ctypes.byref(handle), *args)
            return handle.value or 0

        return created

    # ------------------------------------------------------------------ calls that use constants of this file
    def cpu_engine(self) -> int:
        """Return the handle of an engine for the CPU."""
        return self.engine(_CPU, 0)

    def cpu_stream(self, engine: int) -> int:
        """Return the handle of an in-order stream."""
        return self.stream(engine, _IN_ORDER)

    def desc(self, shape: Any, dtype: str, strides: Any = None) -> int:
        """Return the handle of a memory descriptor. Without strides the primitive chooses the format."""
        kind = TYPES[dtype]
        if strides is None:
            return self._desc_tag(len(shape), dims(shape), kind, _ANY_FORMAT)
        return self._desc_strides(len(shape), dims(shape), kind, dims(strides))

    def desc_equal(self, a: int, b: int) -> bool:
        """Return whether two descriptors describe the same memory layout."""
        return bool(self._desc_equal(a, b))

    def attributes(self) -> int:
        """Return the handle of attributes that leave the scratchpad to the caller."""
        # The scratchpad is then part of the scratch memory that all kernels share.
        attr = self._attr()
        self._attr_scratchpad(attr, _USER_SCRATCHPAD)
        return attr

    def implementation(self, descriptor: int) -> str:
        """Return the name of the implementation of a primitive descriptor."""
        text = c_char_p()
        self._query(descriptor, _QUERY_IMPL, 0, ctypes.byref(text))
        return (text.value or b"").decode()

    def instruction_set(self) -> str:
        """Return the name of the largest instruction set that the library uses here (``ONEDNN_MAX_CPU_ISA``)."""
        isa = self._isa()
        return _INSTRUCTION_SETS.get(isa, f"instruction set {isa:#x}")

    def argument_desc(self, descriptor: int, argument: int) -> int:
        """Return the borrowed handle of the memory descriptor of one argument; 0 if the primitive has no such argument.
        """
        return self._query_desc(descriptor, _QUERY_ARGUMENT, argument) or 0

    def set_threads(self, threads: int) -> None:
        """Set the number of threads of primitives that this thread creates from now on, and of matrix products that it
        runs (OpenMP builds only).

        The function is looked up in oneDNN itself, so it belongs to the OpenMP runtime that oneDNN is linked with.
        """
        function = getattr(self._library, "omp_set_num_threads", None)
        if function is not None:
            function(c_int(threads))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # Only for the type checker: attributes set in _declare take precedence.
        raise AttributeError(name)
