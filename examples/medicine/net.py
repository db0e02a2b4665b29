"""Network of the medicine job: a small U-Net that finds lesions in windows of volumes."""

import halograd as hg


def block(y, width):
    for _ in range(2):
        y = hg.InstanceNorm(activation="relu")(hg.Conv(width, 3, padding=1, bias=False)(y))
    return y


def build(resolution=(16, 16, 16), width=8):
    image = hg.Input((*resolution, 1), name="image")
    lesion, inside = (hg.Input((*resolution, 1), name=name) for name in ("lesion", "inside"))
    fine = block(image, width)
    coarse = block(hg.MaxPool(2, 2)(fine), 2 * width)
    coarse = block(hg.MaxPool(2, 2)(coarse), 4 * width)
    y = hg.ConvTranspose(width, 4, stride=4)(coarse)
    y = hg.Conv(1, 1)(block(hg.Concat()(fine, y), width))
    loss = hg.BinaryCrossEntropyWithLogits()(y, lesion, inside) + hg.Dice()(y, lesion, inside)
    return hg.Network({"prediction": y, "loss": loss}, name="lesions")
