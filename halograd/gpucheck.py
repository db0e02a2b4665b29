"""``python -m halograd.gpucheck``: check of the results and the speed of a GPU; see docs/gpu.md.

The checks are tests (tests/gpu) and benchmarks (benchmarks/gpu), so the command must run in the repository.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from .errors import UserError

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Run the checks; return the exit code, as documented in tests/gpu/command.py.

    Raises
    ------
    UserError
        If the command does not run in the repository.
    """
    if not (ROOT / "tests" / "gpu" / "command.py").exists():
        raise UserError(f"gpucheck: expected tests/gpu of the repository in {ROOT}, got none; run it in a clone")
    # `tests` is not a part of the installed package.
    sys.path.insert(0, str(ROOT))
    return int(importlib.import_module("tests.gpu.command").main())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
