"""Construction of the network, strategy, optimizer and schedule of a configuration, with checks of ranks, data and
memory.

The graph of a module of torch is kept in the folder of its run, so that later jobs need neither torch nor its source.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halograd import schema
from halograd.documents import bytes_text, read_json, shown_path
from halograd.errors import UserError
from halograd.schema import nearest

from ..comm.boot import start_text
from ..data.augment import AUGMENTATIONS
from ..data.dataset import named
from ..data.targets import LabelMap
from ..device import Device, as_dtype
from ..kernels import BACKENDS
from ..layers import Input, Loss, Network
from ..layers.resized import resized
from ..layers.strategy import Strategy, counts_of, cuts_text, parameter_blocks
from ..limits import memory_size
from ..models import build
from ..models.foreign import write_graph
from ..perfmodel.cost import memory_of, program_of
from ..perfmodel.plans import Plan, is_plan
from ..perfmodel.profile.device import rank_memory
from ..perfmodel.quantities import Bytes
from ..program.keeping import Keeping, keep_few
from ..program.program import Target
from .config import Config, DataConfig, StrategyConfig
from .optimizers import OPTIMIZERS, Optimizer, groups_of
from .store import ParameterStore

if TYPE_CHECKING:
    from ..comm import Communicator


__all__ = [
    "check_batch",
    "check_memory",
    "datasets_of",
    "fit_memory",
    "fitting_cuts",
    "keep_model",
    "kept_model",
    "label_maps",
    "make_network",
    "make_optimizer",
    "make_strategy",
    "needs_of",
    "other_cuts",
    "state_slots",
    "weighted_targets",
    "weights_of",
    "with_reduction",
]

#: Axes of a cut that is the same for all layers.
AXES: tuple[str, ...] = ("sample", "depth", "height", "width")
#: Number of cuts in a message; number of ranks up to which all cuts are tried.
SHOWN, MOST_RANKS = 3, 8192


def make_network(config: Config) -> Network:
    """Build the network of ``[model]``, with a loss to train.

    Raises
    ------
    UserError
        If the model is unknown, does not accept an option or samples of ``data.extents``, has no loss, or lacks a layer
        that ``training.freeze`` names.
    """
    network = build(config.model.source, **config.model.options)
    if "loss" not in network.outputs or not isinstance(network.outputs["loss"].layer, Loss):
        raise UserError(
            f"model: expected a network with a loss as output 'loss', got {config.model.source!r} with outputs "
            f"{', '.join(network.outputs)}"
        )
    try:
        network = network.freeze(*config.training.freeze)
    except ValueError as error:
        raise UserError(f"training.freeze: {error}") from error
    try:
        return network if config.data.extents is None else resized(network, config.data.extents)
    except ValueError as error:
        raise UserError(f"data.extents: {error}") from error


def datasets_of(data: DataConfig, network: Network) -> tuple[dict[str, str], dict[str, str]]:
    """Return the names of the datasets of inputs and of targets, by the name of the network's input.

    With ``data.invalid = "mask"``, weights need no dataset.

    Raises
    ------
    UserError
        If an input of the network has no dataset or two, or a name is not an input.
    """
    compared = network.targets
    masked = weights_of(network) if data.invalid == "mask" else frozenset()
    inputs = _named(data, "inputs", [name for name in network.inputs if name not in compared])
    targets = _named(data, "targets", [name for name in compared if name not in masked])
    both = sorted(set(inputs) & set(targets))
    if both:
        raise UserError(f"data.targets: expected {both[0]!r} in one table, got it also in data.inputs; remove one")
    swapped = [name for name in inputs if name in compared]
    if swapped:
        raise UserError(
            f"data.inputs.{swapped[0]}: expected it in data.targets, because only the loss of network {network.name!r} "
            "reads it; data.inputs are normalized, and needed to predict"
        )
    for name in (*inputs, *targets):
        if name not in network.inputs:
            key = "inputs" if name in inputs else "targets"
            raise UserError(
                f"data.{key}.{name}: expected inputs of network {network.name!r} ({', '.join(network.inputs)}), got "
                f"{name!r}{nearest(name, network.inputs)}"
            )
    # With ``data.invalid = "mask"``, the weights are computed from the targets.
    left = [name for name in network.inputs if name not in {*inputs, *targets, *masked}]
    if left:
        key = "targets" if left[0] in compared else "inputs"
        raise UserError(
            f"data.{key}: expected a dataset for {left[0]!r}, which network {network.name!r} reads, got none"
        )
    return inputs, targets


def weights_of(network: Network) -> frozenset[str]:
    """Return the names of the inputs that the loss uses only as weights of positions."""
    loss = network.outputs["loss"]
    return frozenset(network.names[n] for i, n in enumerate(loss.inputs) if loss.layer.weighs(i))


def weighted_targets(network: Network) -> dict[str, list[str]]:
    """Return, by the name of each target that always has weights, the names of all its weights.

    Weights that the network computes are unknown: targets with such weights are left out.
    """
    loss, weighted = network.outputs["loss"], {}
    for i, node in enumerate(loss.inputs):
        weights = [loss.inputs[w] for w in loss.layer.weights_of(i, len(loss.inputs))]
        if weights and network.names[node] in network.targets and all(isinstance(w, Input) for w in weights):
            weighted[network.names[node]] = [network.names[w] for w in weights]
    return weighted


def label_maps(data: DataConfig, network: Network) -> dict[str, LabelMap]:
    """Return the map from numbers of the files to labels, by the name of the target.

    Raises
    ------
    UserError
        If a name is not a target, or a table of numbers is given for several targets.
    """
    weights = weights_of(network)
    labels = [name for name in network.targets if name not in weights]
    tables: dict[str, Any] = dict(data.labels)
    # One table of numbers, not a table per target.
    if any(isinstance(value, int) for value in tables.values()):
        if len(labels) != 1:
            raise UserError(
                f"data.labels: expected a table per target ({', '.join(labels) or 'there are none'}), got only numbers"
            )
        tables = {labels[0]: tables}
    for name in tables:
        if name not in labels:
            raise UserError(f"data.labels.{name}: expected a target ({', '.join(labels) or 'there are none'})")
    # Keys of TOML tables are strings.
    return {name: LabelMap({int(have): number for have, number in table.items()}) for name, table in tables.items()}


def _named(data: DataConfig, key: str, names: Sequence[str]) -> dict[str, str]:
    """Return the datasets of ``data.inputs`` or ``data.targets`` by the name of the network's input.

    A single dataset belongs to the only input. The default dataset is optional.
    """
    names_given = getattr(data, key)
    if isinstance(names_given, dict):
        return named(names_given, "")
    if not names and key not in data.model_fields_set:
        return {}
    if len(names) != 1:
        expected = f"a table with {', '.join(names)}, as the network reads them" if names else "nothing"
        raise UserError(f"data.{key}: expected {expected}, got one dataset, {names_given!r}")
    return named(names_given, names[0])


def make_strategy(
    config: StrategyConfig,
    size: int,
    network: Network | None = None,
    batch: int | None = None,
    trainable: bool = True,
    suit: Callable[[Strategy], Strategy] = lambda strategy: strategy,
) -> Strategy:
    """Build the strategy of ``[strategy]`` for `size` ranks; a plan must fit `network` and `batch`, if they are given.

    Only with `trainable`, the outputs to keep for ``recompute = "block"`` are chosen. `suit` takes a strategy with one
    cut for all layers, and returns it with other cuts of small layers (:mod:`halograd.training.small`).

    Raises
    ------
    UserError
        If the numbers of parts do not fit the ranks (the message names some that fit), if the file is missing or of
        another kind, or if the strategy is ``auto``, for which `halograd.auto.plan_run` is needed.
    """
    if config.auto:
        raise UserError(
            "strategy: expected a complete strategy, got auto; train by `halograd train`, or pass "
            "planner=halograd.auto.plan_run"
        )
    if config.file is not None:
        data = read_json(config.file, "strategy")
        # A strategy by `Strategy.save`, without the network and ranks that a plan names.
        if not is_plan(data):
            return schema.build(Strategy, data, f"strategy {shown_path(config.file)}")
        plan = Plan.from_dict(data, f"plan {shown_path(config.file)}")
        try:
            if network is not None:
                plan.check(network, size, batch)
        except UserError as error:
            # A new plan helps only if the number of ranks has changed.
            if plan.ranks == size:
                raise
            raise UserError(f"{error}, or plan it when the run starts: `--set strategy=auto`") from error
        return plan.strategy
    cuts = {axis: getattr(config, axis) for axis in ("depth", "height", "width") if getattr(config, axis) != 1}
    if network is not None:
        Strategy(cuts).refuse_empty_blocks(network)  # too few rows are an error for any number of ranks
    spatial = math.prod(counts_of(cuts).values())
    if config.sample is None and size % spatial:
        raise UserError(
            f"strategy: {spatial} spatial parts do not divide the {size} ranks; {start_text(spatial, True)} "
            f"or choose other parts{other_cuts(config, size, network, batch)}"
        )
    cuts["sample"] = size // spatial if config.sample is None else config.sample
    needed = math.prod(counts_of(cuts).values())
    if needed != size:
        raise UserError(
            f"strategy: {cuts_text(cuts)} needs {needed} ranks, the run has {size}; {start_text(needed)} or choose "
            f"other parts{other_cuts(config, size, network, batch)}"
        )
    options: dict[str, Any] = {"halo": config.halo}
    if config.attention != "auto":
        options["attention"] = config.attention
    if config.statistics is not None:
        options["statistics"] = config.statistics
    if config.recompute == "pointwise":
        options["recompute"] = config.recompute
    if config.recompute_halo != "keep":
        options["recompute_halo"] = config.recompute_halo
    strategy = suit(Strategy(cuts, options=options, bucket_bytes=config.bucket_bytes, passes=tuple(config.passes)))
    # After `suit`: the best outputs to keep depend on the cuts.
    if config.recompute == "block" and trainable and network is not None and batch is not None:
        return keep_few(network, strategy, Target(batch, size))
    return strategy


def with_reduction(strategy: Strategy, config: Config) -> Strategy:
    """Return the strategy with the scheme of ``[reduction]`` if the configuration has that table."""
    if "reduction" not in config.model_fields_set:
        return strategy
    return replace(strategy, reduction=config.reduction.scheme())


def make_optimizer(config: Config, store: ParameterStore) -> Optimizer:
    """Create the optimizer of ``[optimizer]`` for these parameters.

    Raises
    ------
    UserError
        If factors on the learning rate name layers that the network does not have.
    """
    own, factors = config.optimizer, config.schedule.factors
    try:
        groups_of(factors, store.network)
    except ValueError as error:
        raise UserError(f"schedule.factors: {error}") from error
    make, settings = OPTIMIZERS[own.kind], {key: getattr(own, key) for key in type(own).model_fields}
    return make(store, factors=factors, average=config.training.average, **settings)


# -- cuts that fit ---------------------------------------------------------------------------------


def fitting_cuts(network: Network, size: int, batch: int, target: Mapping[str, int]) -> list[dict[str, int]]:
    """List the cuts of samples and space for `size` ranks, equal for all layers; most similar to `target` first.

    Parameters
    ----------
    batch
        Number of samples of a pass, and so the largest number of parts along samples.
    target
        Parts per axis; missing axes have one.
    """
    products = (dict(zip(AXES, parts)) for parts in _products(size, len(AXES)))
    cuts = [parts for parts in products if parts["sample"] <= batch and _fits(network, parts, size)]
    # Distance of two cuts: the factors between their parts, on all axes, multiplied.
    return sorted(cuts, key=lambda parts: sum(abs(math.log(parts[a] / target.get(a, 1))) for a in AXES))


def _products(size: int, factors: int) -> Iterator[tuple[int, ...]]:
    """Yield tuples of `factors` integers with the product `size`."""
    if factors == 1:
        yield (size,)
        return
    for first in (d for d in range(1, size + 1) if size % d == 0):
        yield from ((first, *rest) for rest in _products(size // first, factors - 1))


def _fits(network: Network, parts: dict[str, int], size: int) -> bool:
    strategy = Strategy(parts)
    try:
        strategy.validate(network, size)
        strategy.refuse_empty_blocks(network)
    except UserError:
        return False
    return True


def other_cuts(config: StrategyConfig, size: int, network: Network | None, batch: int | None) -> str:
    """Return command-line options with cuts that fit; empty without network or batch, or above `MOST_RANKS` ranks."""
    if network is None or batch is None or size > MOST_RANKS:
        return ""
    counts = counts_of({axis: getattr(config, axis) or 1 for axis in AXES})
    named = config.model_fields_set
    # One part on every axis leaves no option, so the number of parts along samples is named.
    cuts = [
        " ".join(f"--set strategy.{axis}={n}" for axis, n in parts.items() if n > 1 or axis in named)
        or "--set strategy.sample=1"
        for parts in fitting_cuts(network, size, batch, counts)[:SHOWN]
    ]
    text = " or ".join(f"`{cut}`" for cut in [*cuts, "--set strategy=auto"])
    return f"; for {size} rank{'s' if size > 1 else ''}: {text}"


# -- limits ----------------------------------------------------------------------------------------


def check_batch(config: Config, samples: int, trainable: bool) -> None:
    """Raise UserError if the samples do not suffice for a batch. Local, the same on every rank.

    Parameters
    ----------
    samples
        Number of training samples; without `trainable`, that of all samples.
    """
    batch, patches = config.training.batch if trainable else config.training.at_once, 1
    if trainable:
        patches = max(1, config.data.patches)
    if (least_samples(config) if trainable else batch) > samples:
        subject = "the training samples" if trainable else "the samples"
        subject += f" ({patches} patches of each)" * (patches > 1)
        raise UserError(
            f"training.batch: expected at most {samples * patches}, {subject} of {config.data.where}, got {batch}; "
            "choose a smaller batch" + (", or hold out fewer samples by data.validation" if trainable else "")
        )


def least_samples(config: Config) -> int:
    """Return the smallest number of samples for which an epoch of training has a whole batch."""
    if config.training.steps_per_epoch:
        return 1
    return -(-config.training.batch // max(1, config.data.patches))


def cuts_windows(data: DataConfig, labelled: bool) -> bool:
    """Return whether windows of the network's size are cut out of the samples; never if targets are not read (without
    `labelled`).
    """
    augment = data.augment
    crops = augment is not None and AUGMENTATIONS[augment.kind].crops(augment)
    return labelled and (data.patches > 0 or crops)


def state_slots(config: Config) -> int:
    """Return how many arrays as large as the parameters the optimizer and the moving average keep."""
    return int(config.training.average > 0) + len(OPTIMIZERS[config.optimizer.kind].states(config.optimizer))


def needs_of(
    config: Config, comm: Communicator, network: Network, strategy: Strategy, trainable: bool, workspace: int | None
) -> dict[str, int]:
    """Return the memory that a run needs on this rank, by use [B]. Local.

    Kernels hold `workspace` [B] of it; None: an estimate.
    """
    batch, dtype, size = config.training.at_once, config.training.dtype, comm.size
    blocks = parameter_blocks(network, strategy, size)
    target = Target(batch, size, comm.rank, as_dtype(dtype), trainable, rounds=_rounds(config))
    slots = state_slots(config) if trainable else 0
    # Buffers for batches: one is in use while the others are read ahead.
    program, ahead = program_of(network, strategy, target, blocks, config.training.accumulate), config.data.prefetch + 1
    return memory_of(program, blocks, slots, ahead=ahead, workspace=workspace)


def _rounds(config: Config) -> bool:
    """Return whether the kernels of a configuration write gradients in 16 bits where activations have 16 bits."""
    return BACKENDS[config.backend.kernels].rounds_gradients


def check_memory(
    config: Config,
    comm: Communicator,
    network: Network,
    strategy: Strategy,
    trainable: bool,
    workspace: int | None = None,
    others: int = 0,
) -> None:
    """Raise UserError if arrays do not fit into the memory of a node. Collective; the same error on all ranks.

    The cost model counts all arrays (:func:`halograd.perfmodel.cost.memory_of`). A run that is rejected would fail in
    its first step. The message names the rule of ``strategy.recompute`` that fits, if there is one.

    Parameters
    ----------
    workspace
        Memory that the kernels of this rank hold [B]; None before they are made: then it is not counted, and only the
        rule that the message names must fit with an estimate.
    others
        Memory that this rank needs in addition [B], such as that of training during an evaluation of whole samples.
    """
    nodes = _memory_by_node(config, comm, network, strategy, trainable, workspace or 0, others)
    for there_is, mine in nodes:
        # The ranks of a node share its memory.
        total = sum(sum(needs.values()) for needs in mine)
        if total > there_is:
            uses = {use: sum(needs.get(use, 0) for needs in mine) for needs in mine for use in needs}
            most = sorted(uses.items(), key=lambda item: -item[1])[:3]
            rule = _fitting_rule(config, comm, network, strategy, workspace) if trainable else None
            remedy = "" if rule is None else f'set strategy.recompute = "{rule}", with which it fits, or '
            raise UserError(
                f"training.batch: expected a network and a batch within the {bytes_text(there_is)} of memory of a "
                f"node, got {bytes_text(total)} for its {len(mine)} rank(s): "
                f"{', '.join(f'{use} {bytes_text(n)}' for use, n in most)}; {remedy}use more nodes, a smaller batch or "
                "a smaller network"
            )


def fit_memory(
    config: Config, comm: Communicator, network: Network, strategy: Strategy, device: Device
) -> Strategy:
    """Return the strategy that recomputes no more than a rank's memory requires, for ``recompute = "auto"``.

    Collective; the same result on all ranks. The limit is the memory of the device, or a rank's share of the memory of
    its node; ``strategy.memory`` may be less.

    Raises
    ------
    UserError
        If no choice fits.
    """
    limit = rank_memory(comm, device)
    if config.strategy.memory is not None:
        limit = min(limit, int(schema.build(Bytes, config.strategy.memory, at="strategy.memory")))

    def needed(candidate: Strategy) -> list[int]:
        return comm.allgather_objects(sum(needs_of(config, comm, network, candidate, True, None).values()))

    ranks = needed(strategy)
    excess = max(ranks) - limit
    if excess <= 0:
        return strategy
    # All ranks choose for the rank that needs the most, so they choose the same.
    dtype, rank = as_dtype(config.training.dtype), ranks.index(max(ranks))
    target = Target(config.training.at_once, comm.size, rank, dtype, rounds=_rounds(config))
    keeping = Keeping(network, strategy, target)
    # Only the arena of activations depends on what is recomputed, so it has to save all of the excess.
    capacity: float = keeping.most - excess
    while (smaller := keeping.within(capacity)) is not None:
        over = max(needed(smaller)) - limit  # another rank may need the most now
        if over <= 0:
            return smaller
        # Smaller by at least 1 B each time, so the search ends.
        capacity -= over
    # The needs of that rank, with the smallest arena in place of the largest.
    least = max(ranks) - keeping.most + keeping.arena(keeping.fewest())
    raise UserError(
        f"strategy.recompute: expected a step within {bytes_text(limit)} per rank, the smallest found needs "
        f"{bytes_text(least)}; use more ranks, a smaller batch, or training.accumulate"
    )


def _memory_by_node(
    config: Config,
    comm: Communicator,
    network: Network,
    strategy: Strategy,
    trainable: bool,
    workspace: int | None,
    others: int = 0,
) -> list[tuple[int, list[dict[str, int]]]]:
    """Return, per node, its memory, and the memory that each of its ranks needs, by use [B]. Collective."""
    needs = needs_of(config, comm, network, strategy, trainable, workspace)
    if others:
        needs = {**needs, "parameter": 0, "the other batches": others}  # they share the parameters
    ranks = comm.allgather_objects((comm.nodes[comm.rank], memory_size(1), needs))
    sizes = {node: there_is for node, there_is, _ in ranks}
    return [(there_is, [own for other, _, own in ranks if other == node]) for node, there_is in sizes.items()]


def _fitting_rule(
    config: Config, comm: Communicator, network: Network, strategy: Strategy, workspace: int | None
) -> str | None:
    """Return the rule of recomputation with which the arrays fit; None if neither rule suffices. Collective."""
    # The strategy decides already what is computed again.
    if strategy.recomputes or config.strategy.file is not None or config.strategy.auto:
        return None
    # The rule that costs less time comes first; "block" needs the least memory.
    for rule in ("pointwise", "block"):
        changed = replace(strategy, options={**strategy.options, "recompute": rule})
        if rule == "block":
            changed = keep_few(network, strategy, Target(config.training.at_once, comm.size))
        nodes = _memory_by_node(config, comm, network, changed, True, workspace)
        if all(sum(sum(needs.values()) for needs in mine) <= there_is for there_is, mine in nodes):
            return rule
    return None


#: Name of the file in the folder of the run.
NAME = "model.onnx"


def keep_model(config: Config, folder: Path) -> Config:
    """Write the module of ``model.torch`` to the folder of a new run. Local.

    Returns
    -------
    Config
        The configuration with that file; unchanged for other models.
    """
    if config.model.torch is None:
        return config
    # With `onnx` set, these options are the loss only.
    options = config.model.model_copy(update={"onnx": None}).options
    write_graph(config.model.torch, options, folder / NAME)
    return kept_model(config, folder, options)


def kept_model(config: Config, folder: Path, trained: Mapping[str, Any]) -> Config:
    """Return the configuration of a run with the graph in its folder, if ``model.torch`` was kept there. Local.

    Raises
    ------
    UserError
        If options of the function differ from those of `trained`, the run's own table ``[model]``: the graph was made
        with these.
    """
    if config.model.torch is None or not (folder / NAME).is_file():
        return config
    # The loss is no part of the graph, and may be changed.
    options = {key: value for key, value in (config.model.model_extra or {}).items() if key != "loss"}
    for key, value in options.items():
        if key not in trained or trained[key] != value:
            raise UserError(
                f"model.{key}: expected the options of model.torch with which the run was trained, because it keeps "
                f"its module as {folder / NAME}, got {value!r}; for samples of other extents set data.extents (apply "
                "needs no setting), for another module train another run"
            )
    return config.model_copy(update={"model": config.model.model_copy(update={"onnx": str(folder / NAME)})})
