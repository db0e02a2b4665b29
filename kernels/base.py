"""Common part of all backends: arrays, dtypes and lifetime."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from types import ModuleType, TracebackType
from typing import Any, ClassVar, TypeVar

from ..device import HOST, Device
from . import checks
from .kernel import FusedActivation, Kernel, Substitute, chain
from .memory import OwnArrays

__all__ = ["Base"]

Self = TypeVar("Self", bound="Base")


class Base(ABC):
    """Arrays, dtypes and lifetime of a backend; see :class:`halograd.kernels.Backend`."""

    name: ClassVar[str]
    xp: ModuleType
    version: str
    threads: int
    dtypes: tuple[str, ...]
    conv_dtypes: tuple[str, ...]
    dtype_remedy: str
    #: Whether training in a 16-bit dtype that the backend only emulates (`emulates`) is permitted.
    emulate: bool = False
    device: Device = HOST

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return a packed array aligned to 64 bytes, contents undefined."""

    def zeros(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return a packed array of zeros aligned to 64 bytes."""
        array = self.empty(shape, dtype)
        array.fill(0)
        return array

    def synchronize(self) -> None:
        """Wait until all kernels called so far have finished. A no-op on a CPU, where a call returns after it has
        finished.
        """
        return

    def before_capture(self) -> None:
        """Prepare for the capture of kernels into a graph: from now on no scratch memory or workspace is freed."""
        return

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Memory that kernels hold in addition to their arguments: shared scratch memory, workspaces of libraries, and
        what single kernels keep [B].

        It does not include arrays whose size does not depend on that of a block: of one element per channel, and work
        arrays of a chunk of elements, which a kernel allocates in its first call.
        """

    @cached_property
    def own(self) -> OwnArrays:
        """Arrays that single kernels keep."""
        return OwnArrays()

    @abstractmethod
    def close(self) -> None:
        """Free the memory and handles of the backend. Close its kernels first. `close` may be called twice."""

    def emulates(self, dtype: str) -> str:
        """Return the reason why the backend only emulates a dtype of 16 bits, with its kernels of float32; "" if the
        backend computes in the dtype.
        """
        return ""

    def take_substitutes(self) -> list[Substitute]:
        """Return descriptions of the kernels built since the last call for which the backend's library has no fast
        implementation, so that another one is used.
        """
        return []

    def describe(self) -> str:
        """Return one line for the log: the library and its version."""
        return f"{self.name} {self.version}, {self.threads} thread(s) per rank"

    def describe_arithmetic(self, dtype: str) -> str:
        """Return a string for the log: how products of this dtype are computed, and how to change it. Empty if there is
        no choice.
        """
        return ""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def add(self, xs: Sequence[Any], y: Any, activation: FusedActivation | None = None) -> Kernel: ...

    @abstractmethod
    def activation(
        self, kind: str, x: Any, y: Any, dy: Any, dx: Any, alpha: float = 0.0
    ) -> tuple[Kernel, Kernel | None]: ...

    def activated(self, kernel: Kernel, y: Any, activation: FusedActivation | None) -> Kernel:
        """Return `kernel`, which writes `y` and cannot fuse the activation f, followed by ``y = f(y)``; without an
        activation, `kernel` itself.
        """
        if activation is None:
            return kernel
        # In place, so without a gradient: the gradient might read the input.
        return chain(kernel, self.activation(activation.kind, y, y, None, None, activation.alpha)[0])

    def added(self, kernel: Kernel, y: Any, residual: Any, activation: FusedActivation | None) -> Kernel:
        """Return `kernel`, which writes `y`, followed by ``y = f(y + residual)``. In one run of the returned kernel,
        `kernel` may run twice.
        """
        return chain(kernel, self.add([y, residual], y, activation))

    def _check_dtypes(self, what: str, **arrays: Any) -> None:
        checks.check_dtypes(what, self.dtypes, self.dtype_remedy, **arrays)
