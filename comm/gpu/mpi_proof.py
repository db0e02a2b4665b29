"""A program: does MPI send device memory to itself? Prints ``proven`` if so; may die. See `mpi_aware`."""

from __future__ import annotations

import sys

from halograd.comm.gpu.mpi_cuda import raw
from halograd.device.cupy import CupyDevice

__all__ = ["main"]

SIZES = (8, 1 << 20)  # [B]: messages that are sent at once, and by rendezvous


def main(ordinal: int) -> int:
    """Exit code: 0 if what was sent came back as it was, 2 if not."""
    from mpi4py import MPI

    device = CupyDevice(ordinal)
    for nbytes in SIZES:
        source, target = device.zeros((nbytes,), "uint8"), device.zeros((nbytes,), "uint8")
        source.fill(nbytes % 251 + 1)
        device.synchronize()
        message, room = raw(device.address(source), nbytes), raw(device.address(target), nbytes)
        MPI.COMM_SELF.Sendrecv(message, 0, 0, room, 0, 0)
        if not (device.to_host(target) == nbytes % 251 + 1).all():
            print(f"{nbytes} bytes came back changed", file=sys.stderr)
            return 2
    print("proven")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(int(sys.argv[1])))
    except Exception as error:
        print(error, file=sys.stderr)
        sys.exit(3)
