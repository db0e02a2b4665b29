"""`halograd demo`: from nothing to a trained network and a report, in minutes."""

from halograd.demo.demonstration import run_demo
from halograd.demo.files import FULL, QUICK, DemoSettings

__all__ = ["FULL", "QUICK", "DemoSettings", "run_demo"]
