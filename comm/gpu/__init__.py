"""Ways for arrays of a device to travel, by name. `Communicator.use_device` chooses one for a run.

``nccl``
    NCCL, on streams of its own that events order beside that of the kernels. The host never waits.
``cuda-ipc``
    Ranks of one node map each other's send buffers and read them, ordered by events of CUDA.
``mpi-cuda``
    Messages of an MPI that reaches device memory, and was seen to.
``mpi-staged``
    By way of pinned host memory and the transport of the host; always works (:mod:`halograd.comm.device_channel`).
``auto``
    The first of these that can work, by the rule of :func:`halograd.comm.gpu.choice.choose`.

Importing this package imports neither CuPy nor NCCL.
"""

from .choice import NAMES, Choice, RankFacts, choose

__all__ = ["NAMES", "Choice", "RankFacts", "choose"]
