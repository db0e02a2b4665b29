"""Test of the files that a call passes through, from the command line to a kernel of a training step."""

import sys

import pytest

import halograd
from halograd.cli import main
from halograd.cli import run as command
from halograd.kernels.kernel import Kernel

FOLDER = halograd.__path__[0] + "/"


@pytest.mark.ranks(1)
def test_a_step_goes_through_four_files(config, monkeypatch):
    """The stack of every kernel call of a training step, from the command's function on, has four files of ours."""
    paths, call = {}, Kernel.__call__

    def watched(kernel):
        frame, files = sys._getframe(1), []
        while frame is not None:
            files.insert(0, frame.f_code.co_filename)
            frame = frame.f_back
        own = dict.fromkeys(file.removeprefix(FOLDER) for file in files if file.startswith(FOLDER))
        paths.setdefault(tuple(own), kernel.impl)
        call(kernel)

    monkeypatch.setattr(Kernel, "__call__", watched)
    monkeypatch.setattr(command, "leave", sys.exit)  # the command line finalizes MPI, which other tests need
    with pytest.raises(SystemExit):
        main(["train", str(config), "--set", "training.epochs=1"])
    step = ("cli/run.py", "cli/commands.py", "training/run.py", "training/trainer.py", "training/executor.py")
    assert step in paths, paths
    own = {path[len(step) :] for path in paths if path[: len(step)] == step}
    assert all(len(more) == 0 or more[0].startswith("layers/") for more in own), "what a layer computes between kernels"
