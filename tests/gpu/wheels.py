"""Wheels for a machine with a GPU and without a package index: one machine collects them, the other unpacks them.

::

    python -m tests.gpu.wheels .gpu-wheels --python 3.12      # with an index: at most 60 MiB
    python -m halograd.gpucheck --wheels .gpu-wheels          # without: unpacks what is missing there, and runs

Packages that such a machine already has (NumPy, CuPy, cuDNN, NCCL, torch) are not collected. A wheel is unpacked if its
distribution is missing or older, into a separate folder that the installed interpreter uses: CUDA's libraries are
found relative to that interpreter, so neither a virtual environment nor ``pip --target`` works (the latter also leaves
out the library of MPI). The module needs the standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from tests.harness.mpi import LAUNCHER

__all__ = ["MOST_BYTES", "WheelError", "collect", "lacking", "unpack"]

MOST_BYTES = 60 << 20
#: As pyproject.toml has them; matplotlib is needed for reports only.
REQUIREMENTS = (
    *("mpich==5.0.2", "mpi4py>=4.1,<5", "nvidia-cudnn-frontend>=1.23,<1.24"),
    *("h5py>=3.10", "ml_dtypes>=0.4", "pydantic>=2.6", "typer>=0.12", "rich>=13", "jinja2>=3.1", "threadpoolctl>=3.2"),
    *("pytest>=8", "pytest-mpi>=0.6", "pytest-timeout>=2.3", "hypothesis>=6.100"),
)
OF_ITS_OWN = ("numpy",)
#: Oldest C libraries that wheels are built for; pip matches each by its name only.
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux_2_5", "manylinux1")


class WheelError(Exception):
    """Error: wheels are missing, or are not for this machine; the message is one line."""


def collect(folder: Path, python: str = "3.12") -> list[Path]:
    """Download the wheels for Linux on x86-64, from the index that pip is set up for.

    Raises
    ------
    WheelError
        If pip fails, or they are larger than `MOST_BYTES` together.
    """
    shutil.rmtree(folder, ignore_errors=True)
    platforms = [part for name in PLATFORMS for part in ("--platform", f"{name}_x86_64")]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", python, *platforms, "--dest", str(folder), *REQUIREMENTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WheelError(f"wheels: pip failed: {' '.join(done.stderr.split())[-300:]}")
    for path in folder.glob("*.whl"):
        if _name(path)[0] in OF_ITS_OWN:
            path.unlink()
    found = sorted(folder.glob("*.whl"))
    nbytes = sum(path.stat().st_size for path in found)
    if nbytes > MOST_BYTES:
        raise WheelError(f"wheels: expected at most {MOST_BYTES >> 20} MiB, got {nbytes >> 20} MiB in {folder}")
    return found


def unpack(folder: Path, where: Path | None = None) -> tuple[str, dict[str, str]]:
    """Unpack the wheels that this machine lacks; return a line that names them, and the environment in which they are
    found.

    Parameters
    ----------
    where
        Folder to unpack into, by default below the folder for temporary files; it is used again if it exists.

    Raises
    ------
    WheelError
        If there are no wheels, or they are for another Python.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise WheelError(f"wheels: expected some in {folder}, got none; make gpu-wheels where there is a package index")
    needed = [path for path in wheels if _lacks(*_name(path))]
    if any(_name(path)[0] == "mpich" for path in needed):  # a present mpi4py may be linked with another MPI
        needed = [path for path in wheels if path in needed or _name(path)[0] == "mpi4py"]
    for path in needed:
        _check_python(path)
    key = hashlib.sha256("\n".join([sys.executable, *(path.name for path in needed)]).encode()).hexdigest()[:12]
    target = where or Path(tempfile.gettempdir()) / f"halograd-gpu-{os.getuid()}-{key}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=target.name, dir=target.parent))
        for path in needed:
            _unpack(path, fresh)
        fresh.rename(target)
    kept = len(wheels) - len(needed)
    names = ", ".join(f"{name} {version}" for name, version in map(_name, needed)) or "nothing"
    return f"unpacked into {target}: {names}; {kept} are installed already", _environment(target)


def lacking() -> list[str]:
    """Return the required packages that are not installed; tests/gpu/facts.py reports cuDNN's front end."""
    names = [re.split(r"[<>=]", requirement)[0] for requirement in REQUIREMENTS]
    return [name for name in names if _lacks(name, "") and name != "nvidia-cudnn-frontend"]


def _environment(target: Path) -> dict[str, str]:
    def before(name: str, path: Path) -> str:
        return os.pathsep.join([str(path), *filter(None, [os.environ.get(name, "")])])

    # The launcher of the unpacked MPI, not one next to the interpreter.
    launcher = target / "bin" / "mpiexec"
    return {
        "PYTHONPATH": before("PYTHONPATH", target / "site"),
        "PATH": before("PATH", target / "bin"),
        "LD_LIBRARY_PATH": before("LD_LIBRARY_PATH", target / "lib"),
        **({LAUNCHER: str(launcher)} if launcher.exists() else {}),
    }


def _name(path: Path) -> tuple[str, str]:
    """Return the distribution and version in the file name of a wheel."""
    name, version = path.name.split("-")[:2]
    return re.sub(r"[-_.]+", "-", name).lower(), version


def _lacks(name: str, version: str) -> bool:
    """Return whether the installed distribution is missing or older."""
    try:
        return _numbers(importlib.metadata.version(name)) < _numbers(version)
    except importlib.metadata.PackageNotFoundError:
        return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def _check_python(path: Path) -> None:
    tag, here = path.stem.split("-")[-3], f"cp{sys.version_info.major}{sys.version_info.minor}"
    if tag.startswith("cp") and tag != here and "abi3" not in path.name:
        raise WheelError(f"wheels: expected some for {here}, got {path.name}; collect them with --python for this one")


def _unpack(path: Path, target: Path) -> None:
    """Unpack the files of a wheel: packages into ``site``, programs and libraries into their folders below `target`."""
    schemes: Mapping[str, str] = {"purelib": "site", "platlib": "site", "data": "", "scripts": "bin"}
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            parts = PurePosixPath(member.filename).parts
            if member.is_dir() or ".." in parts or member.filename.startswith("/"):
                continue
            if parts[0].endswith(".data"):
                if parts[1] not in schemes:
                    continue
                place = target.joinpath(schemes[parts[1]], *parts[2:])
            else:
                place = target.joinpath("site", *parts)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(archive.read(member))
            place.chmod(0o644 | (member.external_attr >> 16 & 0o111))


def main() -> int:
    """Collect the wheels and print their size; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU (default: %(default)s)")
    given = parser.parse_args()
    try:
        found = collect(given.folder, given.python)
    except WheelError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(found)} wheels, {sum(path.stat().st_size for path in found) / 2**20:.1f} MiB in {given.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
