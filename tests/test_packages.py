"""Packages: a wheel contains every file of the package once, and so does a wheel made from an sdist; it runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.harness import mpi
from tests.harness.limits import LIMIT
from tests.launch import find_mpiexec, mpiexec

pytest.importorskip("setuptools", minversion="70.1", reason="needs setuptools 70.1, which makes wheels")

ROOT = Path(__file__).parent.parent
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE")
SHIPPED = (".py", ".toml", ".cu", ".cuh", ".j2")


def _copied(folder: Path) -> Path:
    """Copy the files of the package to a folder, with links as links; return the folder."""
    folder.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    left_out = shutil.ignore_patterns("__pycache__")
    for entry in ((ROOT / "halograd"), *(e.resolve() for e in (ROOT / "halograd").iterdir() if e.is_symlink())):
        shutil.copytree(entry, folder / entry.name, symlinks=True, ignore=left_out)
    return folder


def _built(what: str, source: Path, out: Path) -> Path:
    """Build a "wheel" or an "sdist" with setuptools; return the file."""
    out.mkdir()
    code = f"from setuptools import build_meta; build_meta.build_{what}({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    (made,) = out.iterdir()
    return made


def _files(wheel: Path) -> list[str]:
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    return sorted(name for name in names if ".dist-info/" not in name)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return _copied(tmp_path_factory.mktemp("packages") / "source")


@pytest.fixture(scope="module")
def wheel(source) -> Path:
    return _built("wheel", source, source.parent / "wheel")


def test_a_wheel_of_an_sdist_holds_the_same_files(source, wheel, tmp_path):
    files = _files(wheel)
    package = source / "halograd"
    links = [package, *(e.resolve() for e in package.iterdir() if e.is_symlink())]
    there = (p for top in links for p in top.rglob("*") if p.suffix in SHIPPED and not p.is_symlink())
    wanted = (p.relative_to(source) for p in there)
    named = (p if p.parts[0] == "halograd" else Path("halograd") / p for p in wanted)
    assert files == sorted(map(str, named)), "each of them once, under halograd/"
    with tarfile.open(_built("sdist", source, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert {"CHANGELOG.md", "CITATION.cff"} <= {path.name for path in unpacked.iterdir()}
    assert _files(_built("wheel", unpacked, tmp_path / "again")) == files


DEMO = """
from pathlib import Path
import halograd
from halograd.demo.files import QUICK, Files, make_dataset, prepare, write_config
files = Files(Path("demo"))
prepare(files)
make_dataset(files.data, QUICK)
write_config(files, QUICK)
print(halograd.__file__, halograd.__version__)
"""


def test_a_wheel_trains_outside_of_the_clone(wheel, tmp_path, monkeypatch):
    """A new environment with only the wheel, and the dependencies of this one, trains an epoch of the demonstration."""
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--no-compile", wheel]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    # After pip, which would remove the library of that folder. The folder's own .pth files are not read.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    for library in Path(sys.prefix, "lib").glob("*mpi*"):  # mpi4py looks for the wheel of MPICH there
        (tmp_path / "env" / "lib" / library.name).symlink_to(library)
    monkeypatch.setenv(mpi.LAUNCHER, find_mpiexec())
    monkeypatch.setattr(sys, "executable", str(python))
    made = mpiexec(1, ["-c", DEMO], cwd=tmp_path)
    path, version = made.stdout.split()
    assert Path(path).is_relative_to(packages) and wheel.name.startswith(f"halograd-{version}-"), made.stderr
    sets = [
        word for text in ("training.epochs=1", "strategy.sample=1", "output.directory=run") for word in ("--set", text)
    ]
    trained = mpiexec(2, ["-m", "halograd", "train", "demo/config.toml", *sets], cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    command = [tmp_path / "env" / "bin" / "halograd", "report", "run", "--out", "page.html"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert "<b>finished</b>, step " in (tmp_path / "page.html").read_text()
