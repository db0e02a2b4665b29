"""Patients in the folders of nnU-Net: ``python data.py patients 12``.

Volumes differ in size. Each has noise, an organ, in it a brighter lesion, and next to the organ a vessel that is as
bright as the lesion.
"""

import sys
from pathlib import Path

import nibabel
import numpy as np


def write(folder: str, count: int, first: int = 0, labels: bool = True) -> None:
    for name in ("imagesTr", "labelsTr"):
        Path(folder, name).mkdir(parents=True, exist_ok=True)
    for number in range(first, first + count):
        rng = np.random.default_rng(number)
        shape = rng.integers(24, 45, 3)
        grid = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1)
        organ_at, radius = rng.uniform(0.35, 0.65, 3) * shape, rng.uniform(0.25, 0.3) * shape
        organ = (((grid - organ_at) / radius) ** 2).sum(-1) < 1
        lesion_at, vessel_at = organ_at + rng.uniform(-0.4, 0.4, 3) * radius, rng.uniform(0, 1, 3) * shape
        lesion = np.linalg.norm(grid - lesion_at, axis=-1) < rng.uniform(3.5, 5.5)
        vessel = (np.linalg.norm((grid - vessel_at)[..., :2], axis=-1) < 3) & ~organ
        image = 100 * organ + 60 * lesion + 170 * vessel + 40 * rng.standard_normal(shape)
        affine = np.diag([0.8, 0.8, 2.0, 1.0])
        nibabel.save(nibabel.Nifti1Image(image.astype("i2"), affine), Path(folder, f"imagesTr/p{number}_0000.nii.gz"))
        if labels:
            nibabel.save(nibabel.Nifti1Image(lesion.astype("u1"), affine), Path(folder, f"labelsTr/p{number}.nii.gz"))


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]))
