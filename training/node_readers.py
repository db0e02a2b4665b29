"""One rank of every node reads a file, and passes on what the ranks of its node need of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import TypeVar

import numpy as np

from ..comm import Communicator
from ..comm.errors import mark_agreed

__all__ = ["NodeReaders"]

#: What an MPI library counts in 32 bits is sent in parts [B].
PART = 1 << 30

Result = TypeVar("Result")


class NodeReaders:
    """The first rank of every node. Collective over `comm` to make and to use; one rank is alone without one.

    Attributes
    ----------
    reads
        Whether this rank is one of them.
    """

    def __init__(self, comm: Communicator | None) -> None:
        self._comm = None if comm is None or comm.size == 1 else comm
        self.reads = True
        if self._comm is not None:
            nodes = self._comm.nodes
            self.reads = nodes.index(nodes[self._comm.rank]) == self._comm.rank

    def run(self, call: Callable[[], Result]) -> Result | None:
        """What `call`, which must not communicate, returns on a rank that reads; None elsewhere.

        Raises
        ------
        Exception
            What `call` raises on any rank, on all ranks.
        """
        if self._comm is None:
            return call()
        result, fault = None, None
        if self.reads:
            try:
                result = call()
            except Exception as error:
                if self._comm.rank == 0:
                    mark_agreed(error, True, self._comm.size, needs_no_rank=True)
                fault = error
        self._comm.agree(fault)
        return result

    def from_first(self, value: Result | None) -> Result:
        """The small object that rank 0, which reads, passes."""
        found = value if self._comm is None else self._comm.bcast(value)
        assert found is not None
        return found

    def pass_on(
        self, wanted: Iterable[tuple[str, tuple[int, ...]]], arrays: Mapping[str, np.ndarray], dtype: np.dtype
    ) -> Iterator[np.ndarray]:
        """One whole array after the other, by name, on all ranks. Take it to the end.

        Parameters
        ----------
        wanted
            Names and shapes, the same on all ranks.
        arrays
            All of them, C-contiguous, on ranks that read.
        dtype
            Theirs.

        Yields
        ------
        Each is valid until the next one.
        """
        if self._comm is None:
            yield from (arrays[name] for name, _ in wanted)
            return
        wanted = list(wanted)
        nodes = self._comm.nodes
        node = self._comm.split(nodes[self._comm.rank])
        assert node is not None
        with closing(node):
            most = max((int(np.prod(shape)) for _, shape in wanted), default=0)
            room = np.empty(0 if self.reads else most, dtype)
            for name, shape in wanted:
                flat = arrays[name].reshape(-1) if self.reads else room[: int(np.prod(shape))]
                for start in range(0, flat.nbytes, PART):
                    node.mpi.Bcast(flat.view(np.uint8)[start : start + PART])
                yield flat.reshape(shape)
