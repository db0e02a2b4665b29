"""Install each top-level folder X as ``halograd.X``; ``halograd/`` is the public face."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
FOLDERS = ("device", "comm", "kernels", "dtensor", "layers", "models", "data", "perfmodel", "training", "jobs")

packages = ["halograd"] + [f"halograd.{p}" for p in find_packages("halograd")]
package_dir = {"halograd": "halograd"}
for folder in FOLDERS:
    packages.append(f"halograd.{folder}")
    package_dir[f"halograd.{folder}"] = folder
    for sub in find_packages(str(ROOT / folder)):
        packages.append(f"halograd.{folder}.{sub}")
        package_dir[f"halograd.{folder}.{sub}"] = f"{folder}/{sub.replace('.', '/')}"

setup(
    packages=packages,
    package_dir=package_dir,
    package_data={
        "halograd.perfmodel": ["machines/*.toml"],
        "halograd.kernels": ["cuda/src/*.cu", "cuda/src/*.cuh"],
        "halograd.jobs": ["templates/*.j2", "templates/parts/*.j2"],
    },
)
