"""Slides as pyramids of tiles, with coarse masks of their tumors: ``python data.py slides 3 8192``.

Tissue has a random texture; a tumor has the same colors in a finer texture. A mask has an element for 4 x 4 pixels.
"""

import sys
from pathlib import Path

import numpy as np
import tifffile


def write(folder: str, count: int, size: int, first: int = 0) -> None:
    for name in ("images", "masks"):
        Path(folder, name).mkdir(parents=True, exist_ok=True)
    for number in range(first, first + count):
        rng = np.random.default_rng(number)
        row, column = np.mgrid[: size // 4, : size // 4] * 4 / size
        tumor = np.zeros((size // 4, size // 4), bool)
        for y, x, radius in rng.uniform((0.1, 0.1, 0.05), (0.9, 0.9, 0.15), (4, 3)):
            tumor |= np.hypot(row - y, column - x) < radius
        coarse, fine = (np.repeat(np.repeat(rng.random((size // n, size // n)), n, 0), n, 1) for n in (8, 2))
        texture = np.where(np.repeat(np.repeat(tumor, 4, 0), 4, 1), fine, coarse).astype("f4")
        image = (np.array([200, 120, 170]) - 80 * texture[..., None]).astype("u1")
        with tifffile.TiffWriter(Path(folder, f"images/s{number}.tif"), bigtiff=True) as file:
            options = {"tile": (256, 256), "photometric": "rgb", "compression": "zlib"}
            file.write(image, subifds=1, **options)
            file.write(image[::4, ::4], subfiletype=1, **options)
        tifffile.imwrite(Path(folder, f"masks/s{number}.tif"), tumor.astype("u1"), tile=(256, 256), compression="zlib")


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
