"""`halograd doctor`: what was found on this machine, and whether training can run."""

from halograd.cli.doctor.report import examine

__all__ = ["examine"]
