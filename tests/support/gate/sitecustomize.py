"""Training jobs that wait for the test that disturbs them; Python loads this module if PYTHONPATH has this folder.

HALOGRAD_TEST_GATE names a file with the number of permitted steps, then the ranks with this limit (none: all ranks). A
rank at the limit waits before its next step, until the file is removed or the rank receives a signal to stop, which
``FILE.noted`` records in a line.

The watchdog reports no rank until ``FILE.hangs`` exists; ``FILE.waits.RANK`` contains the number of updates after
which a rank waits for another, for a second.
Time limits between ranks are longer on a slow or busy machine.

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

    from halograd.training import peers, watch, watchdog
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

    def looking(one, now, look=watch.Watch._look):
        state = one._station.state()
        if state and state[-1] and state == one._before:
            FILE.with_name(f"{FILE.name}.waits.{one._rank}").write_text(str(state[0]))
        if not HANGS.exists():
            one._before, one._since, one._complained = state, now, now
        look(one, now)

    Trainer.step, StopSignals._note, watch.Watch._look = gated, noting, looking
    slowness = min(4.0, float(os.environ.get("HALOGRAD_TEST_SLOWNESS", 1)))
    for name in ("ANSWERS", "TURN", "LAST", "GRACE"):
        setattr(watch, name, getattr(watch, name) * slowness)
    watchdog.LAST = watch.LAST
    peers.PATIENCE = 1e4

    if "HALOGRAD_TEST_LATE" in os.environ:
        from halograd.cli import run

        def late_leave(code, leave=run.leave):
            if os.environ["SLURM_PROCID"] == "0":
                subprocess.run(["scancel", "--batch", "--signal=USR1", os.environ["SLURM_JOB_ID"]], check=True)
                time.sleep(4)
            leave(code)

        run.leave = late_leave
