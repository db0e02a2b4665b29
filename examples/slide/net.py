"""Network of the slide job: a tumor or not, for each 4 x 4 pixels."""

import halograd as hg


def build(resolution=(128, 128), width=8):
    rows, columns = resolution
    image = hg.Input((rows, columns, 3), name="image")
    tumor = hg.Input((rows // 4, columns // 4, 1), name="tumor")
    y = hg.Conv(width, 3, stride=2, padding=1, activation="relu")(image)
    y = hg.Conv(2 * width, 3, stride=2, padding=1, activation="relu")(y)
    y = hg.Conv(2 * width, 3, padding=1, activation="relu")(y)
    y = hg.Conv(1, 3, padding=1)(y)
    return hg.Network({"prediction": y, "loss": hg.BinaryCrossEntropyWithLogits()(y, tumor)}, name="tumor")
