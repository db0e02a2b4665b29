"""Commands in the process of the tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from halograd.cli.run import run


@pytest.fixture
def typed(capsys) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process: exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = run([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
