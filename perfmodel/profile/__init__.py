"""Measuring this machine: messages, collectives, the device, and the layers of a network.

:func:`measure_machine` and :func:`measure_layers` do it; what they find is a :class:`Profile` and a :class:`TimeCache`.
"""

from halograd.perfmodel.profile.cache import CACHE_VARIABLE, Conditions, TimeCache, cache_path
from halograd.perfmodel.profile.candidates import conditions_of, passing_bytes, works_of
from halograd.perfmodel.profile.crowd import Crowd
from halograd.perfmodel.profile.fit import Fit, fit_line
from halograd.perfmodel.profile.layers import LayerTimer, last_level_cache
from halograd.perfmodel.profile.measure import Measured, measure_layers, measure_machine
from halograd.perfmodel.profile.record import Profile, record_path

__all__ = [
    "CACHE_VARIABLE",
    "Conditions",
    "Crowd",
    "Fit",
    "LayerTimer",
    "Measured",
    "Profile",
    "TimeCache",
    "cache_path",
    "conditions_of",
    "fit_line",
    "last_level_cache",
    "measure_layers",
    "measure_machine",
    "passing_bytes",
    "record_path",
    "works_of",
]
