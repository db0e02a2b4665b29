"""Double of CuPy's arrays over NumPy memory, which rejects what CuPy rejects and counts waits of the host.

The behaviour is that of CuPy's sources (`cupy/_core/core.pyx`, `_kernel.pyx`, `_manipulation/basic.py` of version 14):
ufuncs and functions of NumPy dispatch to it; an array of the host among the operands raises TypeError, as does a
conversion to one; `reduce` exists for `add` and `multiply` only; ufuncs take no `where`; an index of one element gives
an array of no axes, not a number.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

__all__ = ["DeviceArray", "unwrap"]

_SCALARS = (bool, int, float, complex, np.generic)
_COMPARISONS = {"greater", "greater_equal", "less", "less_equal", "equal", "not_equal"}
#: Functions and the keywords that CuPy's own take.
_FUNCTIONS: dict[str, set[str]] = {
    "all": {"axis", "out", "keepdims"},
    "amax": {"axis", "out", "keepdims"},
    "amin": {"axis", "out", "keepdims"},
    "any": {"axis", "out", "keepdims"},
    "argmax": {"axis", "dtype", "out", "keepdims"},
    "broadcast_to": {"shape"},
    "concatenate": {"axis", "out"},
    "copyto": {"casting", "where"},
    "dot": {"out"},
    "empty_like": {"dtype", "shape"},
    "expand_dims": {"axis"},
    "max": {"axis", "out", "keepdims"},
    "mean": {"axis", "dtype", "out", "keepdims"},
    "min": {"axis", "out", "keepdims"},
    "moveaxis": {"source", "destination"},
    "ones_like": {"dtype", "shape"},
    "reshape": {"newshape"},
    "roll": {"shift", "axis"},
    "shape": set(),
    "squeeze": {"axis"},
    "stack": {"axis", "out"},
    "sum": {"axis", "dtype", "out", "keepdims"},
    "take": {"indices", "axis", "out"},
    "transpose": {"axes"},
    "where": set(),
    "zeros_like": {"dtype", "shape"},
}
#: Those that enqueue nothing.
_VIEWS = {"broadcast_to", "expand_dims", "moveaxis", "reshape", "squeeze", "transpose"}


def unwrap(value: Any) -> Any:
    """Return the NumPy array that a device array wraps; return anything else unchanged."""
    return value.memory if isinstance(value, DeviceArray) else value


class DeviceArray(NDArrayOperatorsMixin):
    """Array of a :class:`FakeDevice`.

    Attributes
    ----------
    memory
        The wrapped NumPy array, for the double's own use.
    device
        The device that holds the array.
    """

    def __init__(self, memory: np.ndarray, device: Any, base: DeviceArray | None = None) -> None:
        self.memory, self.device, self.base = memory, device, base

    # -- what it is -----------------------------------------------------------------------------
    @property
    def shape(self) -> tuple[int, ...]:
        return self.memory.shape

    @property
    def strides(self) -> tuple[int, ...]:
        return self.memory.strides

    @property
    def dtype(self) -> np.dtype:
        return self.memory.dtype

    @property
    def ndim(self) -> int:
        return self.memory.ndim

    @property
    def size(self) -> int:
        return self.memory.size

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @property
    def itemsize(self) -> int:
        return self.memory.itemsize

    @property
    def flags(self) -> Any:
        flags = self.memory.flags
        return SimpleNamespace(
            c_contiguous=flags.c_contiguous, f_contiguous=flags.f_contiguous, owndata=self.base is None
        )

    @property
    def data(self) -> Any:
        """Address of the first element, as the attribute `ptr`, as in CuPy."""
        return SimpleNamespace(ptr=self.memory.__array_interface__["data"][0])

    @property
    def T(self) -> DeviceArray:
        return self._view(self.memory.T)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        address = self.memory.__array_interface__["data"][0]
        return {"data": (address, False), "shape": self.shape, "typestr": self.dtype.str, "version": 3}

    def __len__(self) -> int:
        return len(self.memory)

    def __iter__(self) -> Any:
        return (self._view(row) for row in self.memory)

    def _view(self, memory: np.ndarray) -> DeviceArray:
        return DeviceArray(memory, self.device, self if self.base is None else self.base)

    def _new(self, value: Any) -> DeviceArray:
        return self.device.adopt(np.asarray(value))

    # -- what makes the host wait ---------------------------------------------------------------
    def get(self) -> np.ndarray:
        self.device.synchronized("get()")
        return self.memory.copy()

    def item(self) -> Any:
        self.device.synchronized("item()")
        return self.memory.item()

    def tolist(self) -> Any:
        self.device.synchronized("tolist()")
        return self.memory.tolist()

    def __float__(self) -> float:
        self.device.synchronized("float()")
        return float(self.memory)

    def __int__(self) -> int:
        self.device.synchronized("int()")
        return int(self.memory)

    def __index__(self) -> int:
        self.device.synchronized("index")
        return int(self.memory)

    def __bool__(self) -> bool:
        self.device.synchronized("bool()")
        return bool(self.memory)

    def __format__(self, spec: str) -> str:
        self.device.synchronized("format()")
        return format(self.memory.item() if not self.ndim else self.memory, spec)

    def __repr__(self) -> str:
        return f"<DeviceArray {self.dtype} {self.shape}>"

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array "
            "explicitly."
        )

    def set(self, values: Any) -> None:
        if not isinstance(values, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if self.dtype != values.dtype:
            raise TypeError(f"{values.dtype} array cannot be set to {self.dtype} array")
        if self.shape != values.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {values.shape}")
        if not self.flags.c_contiguous:
            raise RuntimeError("Cannot set to non-contiguous array")
        self.device.operated()
        np.copyto(self.memory, values)

    # -- views and elements ---------------------------------------------------------------------
    def __getitem__(self, key: Any) -> DeviceArray:
        key, advanced = self._key(key)
        found = self.memory[key]
        return self._new(found) if advanced else self._view(np.asarray(self.memory[(*key, ...)] if key else found))

    def __setitem__(self, key: Any, value: Any) -> None:
        key, _ = self._key(key)
        self._check_operand(value)
        self.device.operated()
        self.memory[key] = unwrap(value)

    def _key(self, key: Any) -> tuple[tuple, bool]:
        parts, advanced = (key if isinstance(key, tuple) else (key,)), False
        for part in parts:
            if isinstance(part, np.ndarray):
                raise TypeError("an index on the host: CuPy would copy it in every step")
            if isinstance(part, DeviceArray):
                advanced = True
                if part.dtype == np.bool_:
                    self.device.synchronized("index by a mask")
        if not advanced and ... in parts:
            # So that the dots appended in __getitem__ are not a second ellipsis.
            where = parts.index(...)
            named = sum(p is not None for p in parts) - 1
            parts = (*parts[:where], *[slice(None)] * (self.ndim - named), *parts[where + 1 :])
        return tuple(unwrap(p) for p in parts), advanced

    def reshape(self, *shape: Any) -> DeviceArray:
        shape = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        result = self.memory.reshape(shape)
        return self._view(result) if np.shares_memory(result, self.memory) or not self.size else self._new(result)

    def view(self, dtype: Any = None) -> DeviceArray:
        return self._view(self.memory.view() if dtype is None else self.memory.view(dtype))

    def transpose(self, *axes: Any) -> DeviceArray:
        return self._view(self.memory.transpose(*axes))

    def squeeze(self, axis: Any = None) -> DeviceArray:
        return self._view(self.memory.squeeze(axis))

    def ravel(self) -> DeviceArray:
        return self.reshape(-1)

    def copy(self) -> DeviceArray:
        self.device.operated()
        return self._new(self.memory.copy())

    def astype(self, dtype: Any, copy: bool = True) -> DeviceArray:
        if not copy and self.dtype == np.dtype(dtype):
            return self
        self.device.operated()
        return self._new(self.memory.astype(dtype))

    def fill(self, value: Any) -> None:
        self.device.operated()
        self.memory.fill(unwrap(value))

    # -- arithmetic -----------------------------------------------------------------------------
    def _check_operand(self, value: Any) -> None:
        if isinstance(value, np.ndarray):
            raise TypeError(f"Unsupported type {type(value)}")
        if isinstance(value, DeviceArray) and value.device is not self.device:
            raise ValueError("Array device must be same as the current device")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", ())
        if len(out) > 1:
            raise ValueError("The 'out' parameter must have exactly one array value")
        if method not in ("__call__", "reduce"):
            return NotImplemented
        if method == "reduce" and ufunc.__name__ not in ("add", "multiply"):
            raise NotImplementedError(f"`cupy_{ufunc.__name__}.reduce` is not supported yet")
        legal = {"axis", "dtype", "keepdims"} if method == "reduce" else {"dtype", "casting", "axes"}
        if set(kwargs) - legal:
            raise TypeError(f"Wrong arguments {sorted(set(kwargs) - legal)} for ufunc {ufunc.__name__}")
        if ufunc.__name__ in _COMPARISONS:
            inputs = tuple(x.item() if isinstance(x, np.ndarray) and not x.ndim else x for x in inputs)
        for operand in (*inputs, *out):
            self._check_operand(operand)
            if not isinstance(operand, (DeviceArray, *_SCALARS)):
                return NotImplemented
        target = unwrap(out[0]) if out else None
        self.device.operated()
        result = getattr(ufunc, method)(*map(unwrap, inputs), **kwargs, **({"out": target} if out else {}))
        return out[0] if out else self._new(result)

    def __array_function__(self, func: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = func.__name__
        if name not in _FUNCTIONS:
            return NotImplemented
        if set(kwargs) - _FUNCTIONS[name]:
            raise TypeError(f"{name}() got an unexpected keyword argument {sorted(set(kwargs) - _FUNCTIONS[name])}")
        if name == "shape":
            return args[0].shape
        if name == "copyto":
            return self._copyto(*args, **kwargs)
        flat = [*args, *kwargs.values()]
        for operand in [x for a in flat for x in (a if isinstance(a, (tuple, list)) else (a,))]:
            self._check_operand(operand)
        if name not in _VIEWS:
            self.device.operated()
        plain = [type(a)(map(unwrap, a)) if isinstance(a, (tuple, list)) else unwrap(a) for a in args]
        result = func(*plain, **{k: unwrap(v) for k, v in kwargs.items()})
        if kwargs.get("out") is not None:
            return kwargs["out"]
        shared = isinstance(result, np.ndarray) and np.shares_memory(result, self.memory)
        return self._view(result) if shared else self._new(result)

    def _copyto(self, target: Any, source: Any, casting: str = "same_kind", where: Any = None) -> None:
        if not isinstance(target, DeviceArray):
            raise TypeError(f"Unsupported type {type(target)}")
        if isinstance(source, np.ndarray):
            if source.size != 1:
                raise ValueError("non-scalar numpy.ndarray cannot be used for copyto")
            source = source.item()
        for operand in (source, where):
            self._check_operand(operand)
        self.device.operated()
        mask = {} if where is None else {"where": unwrap(where)}
        np.copyto(target.memory, unwrap(source), casting=casting, **mask)  # type: ignore[call-overload]

    def sum(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return np.sum(self, axis=axis, dtype=dtype, out=out, keepdims=keepdims)  # type: ignore[call-overload]

    def mean(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return np.mean(self, axis=axis, dtype=dtype, out=out, keepdims=keepdims)  # type: ignore[call-overload]

    def max(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return np.amax(self, axis=axis, out=out, keepdims=keepdims)  # type: ignore[call-overload]

    def min(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return np.amin(self, axis=axis, out=out, keepdims=keepdims)  # type: ignore[call-overload]

    def any(self, axis: Any = None) -> Any:
        return np.any(self, axis=axis)  # type: ignore[call-overload]

    def all(self, axis: Any = None) -> Any:
        return np.all(self, axis=axis)  # type: ignore[call-overload]
