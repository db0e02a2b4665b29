"""Commands run in the process of the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from halograd import measuring
from halograd.cli.run import run
from halograd.perfmodel.machine import Machine


@pytest.fixture
def typed(capsys) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs a command in this process and returns exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = run([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def known(shared, monkeypatch) -> Path:
    """Return a folder shared by all ranks; the cache is empty, and the machine is known without measurements."""
    machine = Machine.load("p100-cluster")
    monkeypatch.setenv("HALOGRAD_CACHE", str(shared / "cache"))
    monkeypatch.setattr(measuring.Measuring, "known_machine", lambda self, path: machine)
    return shared
