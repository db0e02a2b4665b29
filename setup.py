"""Install each top-level folder X as ``halograd.X``: ``halograd/X`` is a link to it."""

from setuptools import find_packages, setup

setup(
    package_dir={"": "."},  # an editable install then consists of one plain path, which static tools understand
    packages=find_packages(include=["halograd", "halograd.*"]),
    package_data={
        "halograd.perfmodel": ["machines/*.toml"],
        "halograd.kernels": ["cuda/src/*.cu", "cuda/src/*.cuh"],
        "halograd.report": ["templates/*.j2"],
        "halograd.jobs": ["templates/*.j2", "templates/parts/*.j2"],
    },
)
