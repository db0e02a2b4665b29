"""`halograd demo`: from nothing to a trained network and a report, in minutes."""

from .demonstration import run_demo
from .files import FULL, QUICK, DemoSettings

__all__ = ["FULL", "QUICK", "DemoSettings", "run_demo"]
