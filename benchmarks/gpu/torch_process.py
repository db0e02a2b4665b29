"""torch in a separate process that runs steps on request, because its cuDNN may differ from halograd's."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["TorchError", "TorchProcess", "find_torch"]

_ROOT = Path(__file__).resolve().parents[2]
_SERVER = "benchmarks.gpu.torch_steps"


class TorchError(RuntimeError):
    """Error of a command that torch cannot execute, or for which it takes too long."""


def find_torch() -> str | None:
    """Return a text on the packages that a comparison with torch lacks; None if none is missing."""
    return "needs torch (pip install torch)" if find_spec("torch") is None else None


class TorchProcess:
    """Client of ``benchmarks/gpu/torch_steps.py`` by JSON lines. Local. While it waits, it uses neither CPU nor GPU.

    Parameters
    ----------
    device
        ``"cuda"``, or ``"cpu"`` for tests.
    """

    def __init__(self, device: str = "cuda") -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", _SERVER, device]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT, env=environment, bufsize=1
        )

    def request(self, patience: float, **command: Any) -> dict[str, Any]:
        """Send a command and return its reply; end the process after `patience` seconds without one.

        Raises
        ------
        TorchError
            If there is no reply, or torch reports an error.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:  # a broken pipe, or one that is closed
            raise TorchError(f"torch has ended ({error})") from error
        ready, _, _ = select.select([self._process.stdout], [], [], patience)
        if not ready:
            self.close()
            raise TorchError(f"torch did not reply within {patience:.0f} s to {command['do']!r}")
        line = self._process.stdout.readline()
        if not line:
            raise TorchError(f"torch has ended with exit code {self._process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise TorchError(str(reply["error"]))
        return reply

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> TorchProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
