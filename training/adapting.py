"""Adaptation of a trained run to other data, or to another number of ranks.

A run was trained on samples of one size, in batches, on some number of ranks. To predict or evaluate other samples, the
settings that the user did not set follow from the files and the ranks:

- the extents of the samples, if the parameters stay the same: ``model.resolution``, if the model has that option and
  takes them, else ``data.extents``;
- ``data.layout``, if the file does not define it and only one axis has the channels of the network;
- ``training.batch``: at most the number of samples;
- ``strategy``: of the cuts that the ranks, the batch and the samples allow, the one most similar to that of the run.

Up to rounding, predictions depend neither on the cut nor on the batch. Other settings are checked where they are used.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from halograd.documents import to_toml
from halograd.errors import UserError

from ..data.files import locate
from ..data.formats import open_stored
from ..data.structure import input_kind, looking_into, shape_of
from ..data.windows import KEY as SLIDING
from ..data.windows import Slide
from ..layers import Network
from ..layers.settings import difference, fingerprint
from ..layers.strategy import counts_of
from ..models import has_option
from ..models.own import call_own
from .build import AXES, MOST_RANKS, cuts_windows, datasets_of, fitting_cuts, make_network, make_strategy
from .config import Config, check_config

__all__ = ["adapted", "at_size", "extents_of", "grid_of"]


def adapted(
    config: Config, overrides: Sequence[str], ranks: int, labelled: bool, slide: Slide | None = None
) -> tuple[Config, list[str]]:
    """Return a configuration adapted to its data and to `ranks`, and the changed settings. Local.

    Parameters
    ----------
    config
        Configuration of a trained run, with the data to read.
    overrides
        ``section.key=value`` strings that `config` contains already; these settings are not changed.
    ranks
        Number of ranks.
    labelled
        Whether targets are read, so that samples may be cropped.
    slide
        Windows in which the samples are computed; None: whole samples.

    Returns
    -------
    config, settings
        `settings` are ``section.key=value`` strings.

    Raises
    ------
    UserError, DataError
        If files cannot be examined, or no network can be built for their samples.
    """
    keys = [override.partition("=")[0].strip() for override in overrides]
    settings: list[str] = []

    def free(*names: str) -> bool:  # unless the user set one of them, a part of it ("a.b.c") or its table ("a")
        pairs = [(f"{key}.", f"{name}.") for key in keys for name in names]
        # With dots at the ends, "data.lag" does not match "data.lagged".
        return not any(key.startswith(name) or name.startswith(key) for key, name in pairs)

    def change(section: str, values: dict[str, Any], without: Collection[str] = ()) -> None:
        nonlocal config
        config = _changed(config, section, values, without)
        settings.extend(f"{section}.{key}={to_toml(value)}" for key, value in values.items())

    network = make_network(config)
    look = _look if config.data.file is None else _look_at_own
    looked = look(config, network, _further_times(config, labelled))
    if looked.layout is not None and free("data.layout"):
        change("data", {"layout": looked.layout})
    # If so, the network keeps its size, whatever the extents of the samples are.
    crops = cuts_windows(config.data, labelled)
    extents = looked.extents
    if slide is not None:
        samples = looked.extents or extents_of(network)
        # Then a batch consists of windows, not of samples.
        looked = replace(looked, samples=looked.samples * slide.count(samples))
        if not free("model.resolution", "data.extents"):
            raise UserError(f"{SLIDING}: expected no --set of model.resolution or data.extents with it, got one")
        if slide.window != extents_of(network):
            configuration = sized(_changed(config, "data", {}, without=["extents"]), slide.window)
            change("data", {}, without=["extents"])
            change(*configuration)
            network = make_network(config)
    elif extents and not crops and free("model.resolution", "data.extents"):
        with suppress(UserError):  # otherwise the samples are refused, by their size
            configuration = sized(_changed(config, "data", {}, without=["extents"]), extents)
            change("data", {}, without=["extents"])
            change(*configuration)
            network = make_network(config)
    if 0 < looked.samples < config.training.at_once and free("training.batch", "training.accumulate"):
        # A batch may not have more samples than there are.
        change("training", {"batch": looked.samples}, without=["accumulate"])
    if free("strategy") and not config.strategy.auto:
        # Last, because the cuts that fit depend on the extents and on the batch.
        cut = _other_cut(config, network, ranks)
        if cut is not None:
            change("strategy", cut, without=[*AXES, "file"])
    return config, settings


def sized(config: Config, extents: Sequence[int]) -> tuple[str, dict[str, Any]]:
    """Return the section and the setting with which the network accepts samples of these extents. Local.

    `config` has no ``data.extents``.

    Raises
    ------
    UserError
        If there is no such setting.
    """
    network = make_network(config)
    resolution = {"resolution": extents[0] if len({*extents}) == 1 else list(extents)}
    if has_option(config.model.source, "resolution"):
        with suppress(UserError):
            other = make_network(_changed(config, "model", resolution))
            # Otherwise the trained parameters do not fit.
            if difference(fingerprint(network), fingerprint(other), extents=False) is None:
                return "model", resolution
    own = {"extents": list(extents)}
    # For its error only: not every network takes samples of these extents.
    make_network(_changed(config, "data", own))
    return "data", own


def at_size(config: Config, extents: Sequence[int], samples: int, ranks: int) -> Config:
    """Return the configuration for `samples` samples of these extents on `ranks` ranks. Local.

    Raises
    ------
    UserError
        If the network takes no samples of these extents.
    """
    config = _changed(config, "data", {}, without=["extents"])
    if tuple(extents) != extents_of(make_network(config)):
        config = _changed(config, *sized(config, extents))
    if samples < config.training.at_once:
        config = _changed(config, "training", {"batch": samples}, without=["accumulate"])
    elif config.training.accumulate > 1:
        # Nothing is trained, so there are no gradients of parts to add: a part becomes the batch.
        config = _changed(config, "training", {"batch": config.training.at_once}, without=["accumulate"])
    cut = None if config.strategy.auto else _other_cut(config, make_network(config), ranks)
    return config if cut is None else _changed(config, "strategy", cut, without=[*AXES, "file"])


def extents_of(network: Network) -> tuple[int, ...]:
    """Return the spatial extents of the input that :func:`grid_of` names. Local."""
    return network.inputs[grid_of(network)].shape[:-1]


def grid_of(network: Network) -> str:
    """Return the name of the first input that predictions depend on and that has spatial axes; if none has, of the
    first input that they depend on. Local.
    """
    made_of = [name for name in network.inputs if name not in network.targets]
    return next((name for name in made_of if len(network.inputs[name].shape) > 1), made_of[0])


def _changed(config: Config, section: str, values: dict[str, Any], without: Collection[str] = ()) -> Config:
    """Return the configuration with the `values` in a section, and without the keys `without` of that section."""
    tables = config.model_dump(mode="json", exclude_unset=True)
    kept = {key: value for key, value in tables.get(section, {}).items() if key not in without}
    return check_config({**tables, section: {**kept, **values}})


@dataclass(frozen=True)
class _Looked:
    """Number of samples (counted until it suffices for a batch), and settings of the data that differ from the
    configuration.
    """

    samples: int
    extents: tuple[int, ...] = ()
    layout: Literal["NHWC", "NCHW"] | None = None


def _further_times(config: Config, labelled: bool) -> int:
    """Return the number of time points of a series without a sample of their own: other samples include them
    (``data.lag``).
    """
    data = config.data
    return data.lag * (data.history - 1 + (data.rollout if labelled else 0))


def _look(config: Config, network: Network, further: int) -> _Looked:
    """Count the samples of the first input in the files, until they fill a batch, and read its extents and layout from
    the first file that has samples. Local.

    A file has `further` more rows than samples; gaps in its times are not searched for.
    """
    data, looked = config.data, _Looked(0)
    inputs, targets = datasets_of(data, network)
    name, dataset = next(iter(inputs.items()))
    *grid, channels = network.inputs[name].shape
    # The network reads the channels of all time points, the file has those of one.
    shape = (*grid, channels // data.history)
    for path in locate(data.path, data.format, inputs, targets):
        with open_stored(path, data.format, data.allow_external) as file, looking_into(file.path):
            array = file.find(dataset)
            if not looked.samples:
                shown = _shown_layout(array.shape, shape) if "layout" not in array.attrs else None
                layout = data.layout or shown
                have = shape_of(array, input_kind(array, file.path, layout))
                looked = _Looked(0, _others(have, shape), None if data.layout else shown)
            looked = replace(looked, samples=looked.samples + max(0, len(array) - further))
        # More samples change no setting, and there may be thousands of files.
        if looked.samples >= config.training.at_once:
            break
    return looked


def _look_at_own(config: Config, network: Network, further: int) -> _Looked:
    """Examine the first input, as :func:`_look` does, of a data set that a function of the user returns. Local."""
    data = config.data
    assert data.file is not None
    own = call_own(data.file, "data.file", data.path, **data.options)
    try:
        name = next((name for name in network.inputs if name in own.fields and name not in network.targets), None)
        extents = () if name is None else _others(own.fields[name].shape, network.inputs[name].shape)
        return _Looked(max(0, len(own) - further), extents)
    except (AttributeError, TypeError):
        return _Looked(config.training.at_once)  # not a data set; an error is raised when it is opened for reading
    finally:
        with suppress(AttributeError):
            own.close()


def _shown_layout(shape: tuple[int, ...], expected: tuple[int, ...]) -> Literal["NHWC", "NCHW"] | None:
    """Return the order of axes of an array of samples if either its second or its last axis, but not both, has as many
    elements as a sample of shape `expected` has channels; else None.
    """
    if len(shape) != len(expected) + 1 or (shape[1] == expected[-1]) == (shape[-1] == expected[-1]):
        return None
    return "NHWC" if shape[-1] == expected[-1] else "NCHW"


def _others(have: tuple[int, ...], expected: tuple[int, ...]) -> tuple[int, ...]:
    """Return the extents in `have` if they differ from those in `expected`, and the numbers of axes and of channels
    agree; else ().
    """
    fits = len(have) == len(expected) > 1 and have[-1] == expected[-1]
    return have[:-1] if fits and have != expected else ()


def _other_cut(config: Config, network: Network, ranks: int) -> dict[str, int] | None:
    """Return the cut that fits and is most similar to that of the run; None if the run's cut fits, or if none does."""
    own, batch = config.strategy, config.training.at_once
    try:
        strategy = make_strategy(own, ranks, network, batch, trainable=False)
        strategy.validate(network, ranks)
        strategy.refuse_empty_blocks(network)
        # Validation permits more parts than samples, but ranks without samples would be idle.
        if max(strategy.parts_of(name)["sample"] for name in network.layers) <= batch:
            return None
    except UserError:
        pass  # the cut does not fit these samples or ranks
    counts = counts_of({axis: getattr(own, axis) or 1 for axis in AXES})
    cuts = fitting_cuts(network, ranks, batch, counts) if ranks <= MOST_RANKS else []
    # `sample` also if it is 1: without it, the samples are cut among all remaining ranks.
    return {axis: parts for axis, parts in cuts[0].items() if parts > 1 or axis == "sample"} if cuts else None
