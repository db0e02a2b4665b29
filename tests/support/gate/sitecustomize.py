"""Training jobs that wait for the test that disturbs them; Python loads this module if PYTHONPATH has this folder.

HALOGRAD_TEST_GATE names a file with the number of permitted steps, then the ranks with this limit (none: all ranks). A
rank at the limit waits before its next step, until the file is removed or the rank receives a signal to stop, which
``FILE.noted`` records in a line.

For the watchdog all ranks make progress until ``FILE.hangs`` exists; ``FILE.waits.RANK`` contains the number of updates
after which a rank waits for another. Its time limits are longer on a slow or busy machine.

With HALOGRAD_TEST_LATE rank 0 signals the script of its Slurm job after the end of training, and waits some seconds
so that the script can forward the signal.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

if "train" in sys.orig_argv and "HALOGRAD_TEST_GATE" in os.environ:
    from mpi4py import MPI

    from halograd.training import watchdog
    from halograd.training.signals import StopSignals
    from halograd.training.trainer import Trainer

    FILE = Path(os.environ["HALOGRAD_TEST_GATE"])
    HANGS, NOTED = (FILE.with_name(f"{FILE.name}.{what}") for what in ("hangs", "noted"))
    signals = []

    def may_step(step):
        try:
            steps, *ranks = map(int, FILE.read_text().split())
        except FileNotFoundError:
            return True
        return bool(signals) or step < steps or bool(ranks and MPI.COMM_WORLD.rank not in ranks)

    def gated(trainer, *arguments, step=Trainer.step, **options):
        while not may_step(trainer.optimizer.step):
            time.sleep(0.01)
        return step(trainer, *arguments, **options)

    def noting(noted, number, frame, note=StopSignals._note):
        note(noted, number, frame)
        signals.append(number)
        with NOTED.open("a") as file:
            file.write(f"{number}\n")

    def state(one, state=watchdog.Watchdog._state):
        found = state(one)
        if found[-1] and found == getattr(one, "found", None):
            FILE.with_name(f"{FILE.name}.waits.{MPI.COMM_WORLD.rank}").write_text(str(found[0]))
        one.found = found
        return found if HANGS.exists() else object()

    Trainer.step, StopSignals._note, watchdog.Watchdog._state = gated, noting, state
    slowness = min(4.0, float(os.environ.get("HALOGRAD_TEST_SLOWNESS", 1)))
    for name in ("LOCKED", "ABORT", "LAST"):
        setattr(watchdog, name, getattr(watchdog, name) * slowness)

    if "HALOGRAD_TEST_LATE" in os.environ:
        from halograd.cli import run

        def late_leave(code, leave=run.leave):
            if os.environ["SLURM_PROCID"] == "0":
                subprocess.run(["scancel", "--batch", "--signal=USR1", os.environ["SLURM_JOB_ID"]], check=True)
                time.sleep(4)
            leave(code)

        run.leave = late_leave
