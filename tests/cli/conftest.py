"""Commands in the process of the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from halograd import measuring
from halograd.cli.run import run
from halograd.perfmodel.machine import Machine


@pytest.fixture
def typed(capsys) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process: exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = run([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def known(shared, monkeypatch) -> Path:
    """A folder of all ranks, with an empty cache, on a machine that need not be measured."""
    machine = Machine.load("p100-cluster")
    monkeypatch.setenv("HALOGRAD_CACHE", str(shared / "cache"))
    monkeypatch.setattr(measuring.Measuring, "known_machine", lambda self, path: machine)
    return shared
