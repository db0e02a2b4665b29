"""Training steps that take the seconds that a file says, for tests to disturb.

Python loads this where PYTHONPATH holds this folder; the file's name is in HALOGRAD_TEST_PACE.
"""

import os
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
