"""Entry point of ``python -m tests.gpu``, the same as ``python -m halograd.gpucheck``."""

import sys

from tests.gpu.command import main

sys.exit(main())
