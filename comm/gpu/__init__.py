"""Transports of device arrays, by name. `Communicator.use_device` chooses one for a run.

``nccl``
    NCCL on its own streams, which events order relative to the stream of the kernels. The host never waits.
``mpi-cuda``
    Messages of an MPI library that was proven to reach device memory.
``mpi-staged``
    Pinned host memory and the transport of the host; always works (:mod:`halograd.comm.device_channel`).
``auto``
    The first of these that works, by the rule of :func:`halograd.comm.gpu.choice.choose`.

Importing this package imports neither CuPy nor NCCL.
"""

from .choice import DEVICE_TRANSPORTS, Choice, RankFacts, choose

__all__ = ["DEVICE_TRANSPORTS", "Choice", "RankFacts", "choose"]
