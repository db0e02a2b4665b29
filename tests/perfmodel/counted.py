"""Networks and strategies whose messages and bytes are counted."""

import random

import halograd as hg
from halograd.layers.strategy import AXES, Strategy
from halograd.perfmodel.cost.account import LOSS_BYTES
from halograd.perfmodel.cuts import candidates
from tests.layers.graphs import Gate
from tests.models.gated import embedded
from tests.support.grids import grids_in_turn
from tests.training.steps import NETWORKS

BATCH = 4


def zoo():
    """Return a network of layers that the models lack, with a value and an input that each have two readers."""
    x = hg.Input((12, 10, 4), name="x")
    # Residuals with a gradient and without, with an activation and without.
    z = hg.BatchNorm(activation="relu", name="with input")(hg.Conv(4, 1, name="beside")(x), x)
    a = hg.GroupNorm(2, name="group")(hg.Conv(6, 3, padding=1, name="first")(z))
    b = hg.AveragePool(3, 2, 1, name="average")(a)
    c = hg.MaxPool(3, 2, 1, name="max")(a)
    b = hg.BatchNorm(activation="relu", name="block")(b, hg.Add(activation="relu", name="sum")(b, c))
    c = hg.BatchNorm(name="linear block")(c, hg.Add(name="plain sum")(b, c))
    y = Gate(1)(hg.Concat(name="join")(b, c), hg.Concat(name="again")(c, b))
    y = hg.Resize(2, mode="bilinear", name="up")(hg.BatchNorm(statistics="sample", name="norm")(y))
    y = hg.Concat(name="inputs")(y, hg.Conv(4, 1, name="aside")(x))
    y = hg.Dropout(0.2, name="drop")(hg.ReLU(name="relu")(hg.Dense(8, name="dense")(hg.Flatten(name="flatten")(y))))
    target = hg.Input((1,), name="target", dtype="int32")
    logits = hg.Dense(4, name="logits")(y)
    loss = hg.SoftmaxCrossEntropy(normalization="weights", name="ce")(logits, target)
    return hg.Network({"prediction": logits, "loss": loss}, name="zoo")


def dice():
    """Return a network with a layer that the loss does not depend on, whose gradients are not summed."""
    x = hg.Input((8, 6, 2), name="x")
    y = hg.Conv(2, 3, padding=1, name="conv")(x)
    outputs = {"prediction": y, "aside": hg.Conv(5, 1, name="aside")(y)}
    return hg.Network({**outputs, "loss": hg.Dice(name="dice")(y, hg.Input(y.shape, name="target"))}, name="dice")


def frozen():
    """Return a U-Net with frozen layers, at its beginning and in the middle."""
    return NETWORKS["unet"]().freeze("down0*", "up1", "bottom_*_a", "predict")


CASES = {**NETWORKS, "zoo": zoo, "dice": dice, "frozen": frozen, "embedded": embedded}


#: Random strategies per network.
DRAWS = 4


def strategies(network, size):
    """Yield the same cut for all layers, then random cuts, with fewer ranks for some layers."""
    for grid in grids_in_turn(size, ("sample", "height", "width"), len(network.layers)):
        yield Strategy(grid, bucket_bytes=4096)
    draw = random.Random(f"{network.name} {size}")
    for _ in range(DRAWS):
        layers = {}
        for name, node in network.layers.items():
            some = candidates(node.layer, [n.shape for n in node.inputs], node.shape, BATCH, size)
            if draw.random() < 0.6:
                layers[name] = {axis: n for axis, n in zip(AXES, draw.choice(some)) if n > 1} or {"sample": 1}
                layers[name] = {axis: shares(draw, axis, n) for axis, n in layers[name].items()}
            if network.owners[name] != name:  # blocks of parameters are those of the first call
                layers[name] = layers.get(network.owners[name], {})
        yield Strategy({"sample": size}, layers, bucket_bytes=2048)


def shares(draw, axis, parts):
    """Return the parts of an axis, or random uneven shares in place of them."""
    even = parts == 1 or "channel" in axis or draw.random() < 0.7
    return parts if even else [draw.randint(1, 3) for _ in range(parts)]


def differing(found, want, rank):
    """Return a text for each kind whose predicted messages or bytes differ from the counted ones."""
    faults = []
    for kind in sorted(set(found) | set(want)):
        have = (found[kind].messages, found[kind].bytes) if kind in found else (0, 0)
        expected = (int(want[kind].messages[rank]), int(want[kind].bytes[rank])) if kind in want else (0, 0)
        if have != expected:
            faults.append(f"{kind}: predicted {expected}, counted {have}")
    return faults


def differing_layers(found, ledger, rank):
    """Return a text if the traffic of the layers, without gradients, differs from the count."""
    own = [traffic for kind, traffic in found.items() if kind != "allreduce"]
    have = sum(t.messages for t in own), sum(t.bytes for t in own)
    layers, several = ledger.layers.values(), ledger.ranks > 1
    expected = [sum(int(getattr(t, field)[rank]) for t in layers) for field in ("messages", "bytes")]
    expected = expected[0] + several, expected[1] + several * LOSS_BYTES
    return [] if have == expected else [f"layers: predicted {expected}, counted {have}"]
