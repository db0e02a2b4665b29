"""Agreement of all ranks on the outcome of each phase of a test: a fault of one rank fails the test on all ranks.

The agreement uses non-blocking calls with a deadline on a communicator of its own: a blocking call would never return
if one rank failed while the others wait for it inside the test.
"""

from __future__ import annotations

import json
import os
import socket
import time
import zlib
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from tests.harness.record import Record
from tests.harness.watchdog import ask_for_stacks

if TYPE_CHECKING:
    from mpi4py import MPI

PASSED, SKIPPED, FAILED = 0, 1, 2
NAMES = {"passed": PASSED, "skipped": SKIPPED, "failed": FAILED}


class Agreement:
    """Exchange of all ranks' outcomes over a duplicate of `comm`. Collective over `comm`.

    Parameters
    ----------
    grace
        Time that a failed rank waits for the others [s] before it ends the job.
    stderr
        File descriptor for the last message: pytest captures number 2 during a test.
    """

    def __init__(self, comm: MPI.Intracomm, record: Record, grace: float, stderr: int) -> None:
        self.comm = comm.Dup()
        self.record = record
        self.grace = grace
        self.stderr = stderr
        host = socket.gethostname()
        everyone = enumerate(self.gather_objects([host, os.getpid()]))
        self._peers = {rank: pid for rank, (where, pid) in everyone if where == host}

    def outcomes(self, key: str, outcome: str, text: str, patience: float) -> list[int]:
        """Return every rank's outcome of the phase `key`; end the job if a rank does not report. Collective.

        A rank that failed waits `grace` [s], any other rank `patience` [s]: the others may still be at
        work, and each of them has a limit of its own.
        """
        mine = np.array([NAMES[outcome], zlib.crc32(key.encode())], np.int64)
        everyone = np.zeros((self.comm.size, 2), np.int64)
        request = self.comm.Iallgather(mine, everyone)
        failed = NAMES[outcome] == FAILED
        begin = time.monotonic()
        deadline = begin + (self.grace if failed else patience)
        while not request.Test():
            now = time.monotonic()
            if now > deadline:
                reason = text if failed else f"passed here, but other ranks never came to the end of {key}"
                self.give_up(key, reason)
            # A twentieth of the wait is slept too long at most: what one rank oversleeps all others wait for.
            time.sleep(min(max((now - begin) / 20, 5e-5), 5e-3))
        if len(set(everyone[:, 1])) > 1:
            self.give_up(key, f"the ranks run different tests; this one runs {key}\n{text}")
        return [int(code) for code in everyone[:, 0]]

    def gather_objects(self, value: object) -> list:
        """Return the JSON-serializable value of every rank on every rank. Collective."""
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        counts = np.zeros(self.comm.size, np.int64)
        self.comm.Allgather(np.array([data.size], np.int64), counts)
        everyone = np.zeros(int(counts.sum()), np.uint8)
        self.comm.Allgatherv(data, [everyone, counts])
        cuts = np.cumsum(counts)[:-1]
        return [json.loads(part.tobytes()) for part in np.split(everyone, cuts)]

    def give_up(self, key: str, text: str) -> NoReturn:
        """Write the reason and the tracebacks of the ranks of this node, and end the job. Local."""
        rank, size = self.comm.rank, self.comm.size
        self.record.write(fatal=key.partition(" ")[0], text=f"[rank {rank} of {size}] {text}")
        os.write(self.stderr, f"\n[rank {rank} of {size}] ends the job: {key}\n{text}\n".encode())
        ask_for_stacks(self.record.folder, self._peers)
        self.comm.Abort(1)
        os._exit(1)
