"""Random networks, losses and ways to train, on any number of ranks against one process.

Most errors come from combinations of two features, such as shared layers with replicated gradients, or parts of a batch
with trials of schemes. Each case draws a random subset of the features.

    mpiexec -n 3 python -m tests.training.combinations --count 200
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers import Node
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy
from halograd.training.auto_reduction import Tuning
from halograd.training.evaluation import Evaluation
from halograd.training.executor import Executor
from halograd.training.optimizers import SGD, Adam, AdamW
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer
from tests.layers.cuts import random_strategy
from tests.training.steps import copied

__all__ = ["Case", "Outcome", "differences", "trained"]

CLASSES, STEPS, IGNORED = 4, 3, 255
#: Schemes of gradient reduction; with "auto" those that are tried come behind one another.
SCHEMES = (
    *(Scheme(), Scheme("sharded"), Scheme("per_layer"), Scheme("blocking"), Scheme("hierarchical")),
    *(Scheme("host_accumulate"), Scheme("two_chunks", first_layers=2), Scheme("auto"), Scheme(replicated_dense=1)),
)


class Draw:
    """Random choices from a seed."""

    def __init__(self, *seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def one(self, *some: Any) -> Any:
        """Return one of these values."""
        return some[int(self.rng.integers(len(some)))]

    def chance(self, share: float) -> bool:
        """Return True with this probability."""
        return bool(self.rng.random() < share)


@dataclass
class Case:
    """Network and its training, all drawn from `seed`."""

    seed: int
    network: hg.Network = field(init=False)
    parts: int = field(init=False)
    batch: int = field(init=False)
    ignored: int | None = field(init=False)

    def __post_init__(self) -> None:
        draw = Draw(77, self.seed)
        self.ignored = draw.one(None, IGNORED)
        self.network = _network(draw, self.ignored)
        self.parts = draw.one(1, 1, 2, 3)
        self.batch = self.parts * draw.one(1, 2, 3, 4)
        self.scheme, self.clip = draw.one(*SCHEMES), draw.one(None, 0.5)
        self._kind, self._average = draw.one(SGD, Adam, AdamW), draw.one(0.0, 0.5, 0.9)
        self._factors = draw.one({}, {"shared": 0.5, "dense*": 2.0}, {"*": 1.7, "first": 0.0})

    def __str__(self) -> str:
        own = f"{self._kind.__name__}, average {self._average}, factors {self._factors}"
        return f"case {self.seed}: {self.batch} samples in {self.parts} parts, {self.scheme}, {own}"

    def optimizer(self, store: Any) -> Any:
        """Return a new optimizer of these parameters."""
        return self._kind(store, weight_decay=1e-2, factors=self._factors, average=self._average)

    def strategy(self, size: int) -> Strategy:
        """Return a random cut for these ranks; with replicated dense layers only samples are cut."""
        if self.scheme.replicated_dense:
            return Strategy({"sample": size}, reduction=self.scheme)
        found = random_strategy(self.network, size, self.seed)
        return Strategy(found.parts, found.layers, bucket_bytes=found.bucket_bytes, reduction=self.scheme)

    def arrays(self, step: int) -> dict[str, np.ndarray]:
        """Return the inputs of the batch of a step."""
        draw = Draw(5, self.seed, step)
        return {name: self._array(draw, name, (self.batch, *i.shape)) for name, i in self.network.inputs.items()}

    def _array(self, draw: Draw, name: str, shape: tuple[int, ...]) -> np.ndarray:
        rng = draw.rng
        if name == "classes":
            found = rng.integers(0, CLASSES, shape)
            return found if self.ignored is None else np.where(rng.random(shape) < 0.3, self.ignored, found)
        if name.startswith("weight"):
            found, half = 2 * rng.random(shape), slice(max(1, shape[draw.one(0, 1)] // 2))
            where = draw.one(found < 0.8, (half,), (slice(None), half), found < 0)
            found[where] = 0
            return found
        return rng.random(shape) if name == "masks" else rng.standard_normal(shape)


def _network(draw: Draw, ignored: int | None) -> hg.Network:
    """Return a trunk of shared layers; its outputs are a map of classes, a map of masks, and values per sample."""
    height, width = int(draw.rng.integers(4, 10)), int(draw.rng.integers(3, 8))
    x = hg.Input((height, width, 3), "x")
    normed = draw.chance(0.3)
    again = hg.Conv(8, 3, padding=1, name="shared", activation=draw.one(None, "relu", "tanh"), weight_norm=normed)
    norm, y = hg.GroupNorm(2, name="norm"), hg.Conv(8, 3, padding=1, name="first", activation="relu")(x)
    values, bent = [norm(y)], _bending(draw, width)
    for _ in range(int(draw.rng.integers(1, 4))):
        y = again(draw.one(*values))
        y = norm(y) if draw.chance(0.4) else y
        y = bent(y, values[-1]) if draw.chance(0.5) else y
        y = hg.Dropout(0.3)(y) if draw.chance(0.3) else y
        y = draw.one(hg.StochasticDepth, hg.ChannelDropout)(0.3)(y) if draw.chance(0.3) else y
        values.append(y + values[-1] if draw.chance(0.5) else y)
    y = hg.BatchNorm(eps=0.1, name="batch_norm")(values[-1]) if draw.chance(0.3) else values[-1]
    vector = hg.GlobalAveragePool()(again(hg.AveragePool(2)(values[-1])))
    mix = hg.Dense(8, name="dense1", activation=draw.one(None, "tanh"), weight_norm=draw.chance(0.2))
    vector = hg.Concat()(mix(vector), mix(mix(vector))) if draw.chance(0.6) else mix(vector)
    vector = hg.Dense(3, name="dense3")(hg.Dense(24, name="dense2", activation="tanh")(vector))
    maps = hg.Conv(CLASSES, 1, name="maps", weight_norm=draw.chance(0.3))(y)
    maps = hg.LogSoftmax()(maps) if draw.chance(0.3) else maps
    loss = _losses(draw, maps, hg.Conv(2, 3, padding=1, name="masked")(y), vector, ignored)
    made = hg.Network({"maps": maps, "vector": vector, "loss": loss}, name="combined")
    return made.freeze(draw.one("shared", "norm", "first", "dense1")) if draw.chance(0.3) else made


def _bending(draw: Draw, width: int) -> Callable[[Node, Node], Node]:
    """Return a function that combines two values with other inputs in a random way; its layers may be called often."""
    settings, row = hg.Input((2,), "settings"), hg.Input((1, width, 8), "row")
    factor, summand, pooled = (hg.Dense(8, name=name) for name in ("factor", "summand", "pooled"))
    rows, mask = hg.Conv(8, 1, name="rows"), hg.Conv(1, 1, name="mask", activation="sigmoid")

    def bent(y: Node, other: Node) -> Node:
        return draw.one(
            lambda: y * (1 + factor(settings)) + summand(settings),
            lambda: other - 0.5 * y,
            lambda: y * mask(other) + other * (1 - mask(y)),
            lambda: y / 2 + rows(row),
            lambda: pooled(hg.GlobalAveragePool()(other)) + y,
            lambda: hg.ChannelShuffle(draw.one(2, 4))(y),
            lambda: hg.Mish()(-y),
        )()

    return bent


def _losses(draw: Draw, maps: Node, masks: Node, vector: Node, ignored: int | None) -> Any:
    """Return a sum of losses, some of them with weights, for training only, or divided by their weights."""
    height, width, _ = maps.shape
    forms = [(height, width, 1), (1, width, 1), (height, 1, 1), (1, 1, 1), (1,)]
    many = [hg.Input(draw.one(*forms), f"weights{k}") for k in range(3)]

    def weighted(loss: Any, prediction: Node, target: Node, k: int) -> Any:
        return loss(prediction, target, many[k]) if draw.chance(0.6) else loss(prediction, target)

    classes = hg.Input((height, width, 1), "classes", "int32")
    smooth, norm = draw.one(0.0, 0.1), draw.one(None, "count", "weights")
    entropy = hg.SoftmaxCrossEntropy(draw.one(None, [0.5, 2.0, 0.0, 1.5]), norm, smooth, ignored)
    found = weighted(entropy, maps, classes, 0)
    if draw.chance(0.6):
        reduction = draw.one("batch", "sample")
        overlap = draw.one(
            hg.Dice("softmax", reduction, ignore_index=ignored),
            hg.Tversky(0.3, 0.7, "softmax", reduction, ignore_index=ignored),
        )
        found = found + 0.5 * weighted(overlap, maps, classes, 0)
    norm = draw.one("count", "weights")
    some = [one(normalization=norm) for one in (hg.Huber, hg.Focal, hg.AbsoluteError, hg.MeanSquaredError)]
    some += [hg.BinaryCrossEntropyWithLogits([1.0, 3.0], normalization=norm), hg.Dice("sigmoid"), hg.Tversky(0.2, 0.6)]
    extra = weighted(draw.one(*some), masks, hg.Input(masks.shape, "masks"), 1)
    found = found + (hg.training_only(extra) if draw.chance(0.2) else 0.3 * extra)
    numbers = hg.MeanSquaredError(normalization=draw.one("count", "weights"))
    target = hg.Input((3,), "numbers")
    return found + (
        numbers(vector, target, hg.Input((draw.one(1, 3),), "weights3"))
        if draw.chance(0.6)
        else numbers(vector, target)
    )


@dataclass
class Outcome:
    """Result of a training; arrays are this rank's blocks."""

    losses: list[float]
    scores: dict[str, float | None]
    arrays: dict[str, np.ndarray]
    blocks: dict[str, tuple[slice, ...]]


def trained(case: Case, comm: Communicator, strategy: Strategy) -> Outcome:
    """Train some steps, then evaluate short batches with averaged parameters. Collective over `comm`."""
    size = case.batch // case.parts
    kernels, network = get_backend("numpy"), case.network
    with Executor(network, comm, kernels, size, strategy, "float64", seed=3, parts=case.parts) as executor:
        ranked, tuning = (Scheme(replicated_dense=1), Scheme("bucketed")), Tuning(interval=2, step=0)
        trainer = Trainer(executor, case.optimizer(executor.store), Constant(0.05), case.clip, ranked, tuning)
        losses = []
        for step in range(STEPS):
            arrays = case.arrays(step)
            for part in range(case.parts):
                _fill(executor, arrays, slice(part * size, (part + 1) * size))
                executor.count()
            for part in range(case.parts):
                _fill(executor, arrays, slice(part * size, (part + 1) * size))
                if part + 1 < case.parts:
                    trainer.add()
                else:
                    losses.append(float(trainer.step()))
        trainer.synchronize()
        with trainer.averaged():
            scores = _evaluated(case, executor)
            store = executor.store
            arrays = {f"average of {name}": array.copy() for name, array in store.params.items()}
        arrays |= copied({**store.params, **store.state})
        blocks = {name: store.box(name.removeprefix("average of ")).slices() for name in arrays}
    return Outcome(losses, scores, arrays, blocks)


def _fill(executor: Executor, arrays: dict[str, np.ndarray], some: slice) -> None:
    for name, array in arrays.items():
        executor.set_input(name, array[some])


def _evaluated(case: Case, executor: Executor) -> dict[str, float | None]:
    evaluation = Evaluation(executor, calibrated=True)
    evaluation.begin()
    for number in range(2):
        _fill(executor, case.arrays(100 + number), slice(executor.batch))
        executor.mode.valid = max(1, executor.batch - number)
        executor.forward(training=False)
        evaluation.add()
    found = evaluation.finish()
    evaluation.close()
    return found


def differences(found: Outcome, want: Outcome) -> list[str]:
    """Return the descriptions of all differences from the outcome of one process."""
    wrong = [] if np.allclose(found.losses, want.losses, rtol=1e-10, atol=0) else [f"losses {found.losses}"]
    for key, value in want.scores.items():
        same = value == found.scores[key] if value is None else np.isclose(found.scores[key] or 0, value, rtol=1e-9)
        wrong += [] if same else [f"{key} {found.scores[key]} for {value}"]
    for name, array in found.arrays.items():
        whole = want.arrays[name]
        bound = 1e-10 * max(1.0, float(np.abs(whole).max(initial=0)))
        if not np.allclose(array, whole[found.blocks[name]], rtol=0, atol=bound):
            wrong.append(name)
    return wrong


def main() -> int:
    """Compare the cases of the command line; the last line gives the number of cases without differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    held = refused = 0
    with Communicator(MPI.COMM_WORLD) as comm, Communicator(MPI.COMM_SELF) as alone:
        for seed in range(options.first, options.first + options.count):
            case = Case(seed)
            try:
                found = trained(case, comm, case.strategy(comm.size))
            except UserError as error:
                refused += 1
                if comm.rank == 0:
                    print(f"{case}: refused: {error}", flush=True)
                continue
            wrong = comm.allgather_objects(differences(found, trained(case, alone, Strategy())))
            held += not any(wrong)
            if comm.rank == 0 and any(wrong):
                print(f"{case}: {next(filter(None, wrong))}", flush=True)
        if comm.rank == 0:
            print(f"{held} of {options.count - refused} cases held, {refused} refused")
    return 0


if __name__ == "__main__":
    sys.exit(main())
