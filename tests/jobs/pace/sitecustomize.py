"""Training steps that take the seconds that a file says, for tests to disturb; a signal when all is trained.

Python loads this where PYTHONPATH holds this folder; the file's name is in HALOGRAD_TEST_PACE. With HALOGRAD_TEST_LATE
rank 0 has the script of the job signaled when training has ended, and leaves it some seconds to pass that on.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

if "train" in sys.orig_argv and "HALOGRAD_TEST_PACE" in os.environ:
    from halograd.training.trainer import Trainer

    _step = Trainer.step

    def _slow_step(self, *arguments, **options):
        time.sleep(float(Path(os.environ["HALOGRAD_TEST_PACE"]).read_text()))
        return _step(self, *arguments, **options)

    Trainer.step = _slow_step

    if "HALOGRAD_TEST_LATE" in os.environ:
        from halograd.cli import run

        _leave = run.leave

        def _late_leave(code):
            if os.environ["SLURM_PROCID"] == "0":
                subprocess.run(["scancel", "--batch", "--signal=USR1", os.environ["SLURM_JOB_ID"]], check=True)
                time.sleep(4)
            _leave(code)

        run.leave = _late_leave
