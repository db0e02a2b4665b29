"""Network of the climate job: the change of the sea surface temperature in a month."""

import halograd as hg


def build(rows=32, columns=64, width=16):
    state = hg.Input((rows, columns, 2), name="state")  # temperature and current
    depth = hg.Input((rows, columns, 1), name="depth")
    target, area = (hg.Input((rows, columns, 1), name=name) for name in ("target", "area"))
    y = hg.Concat()(state, depth)
    for _ in range(3):
        y = hg.Pad([(0, 0), (2, 2)], "circular")(y)  # the first and the last longitude are neighbors
        y = hg.Conv(width, 5, padding=(2, 0), activation="relu")(y)
    y = hg.Add()(hg.Slice(0, 1)(state), hg.Conv(1, 1)(y))
    return hg.Network({"prediction": y, "loss": hg.MeanSquaredError()(y, target, area)}, name="ocean")
