"""Packages: a wheel contains every file of the package once, and so does a wheel made from an sdist."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.harness.limits import LIMIT

pytest.importorskip("setuptools", minversion="70.1", reason="needs setuptools 70.1, which makes wheels")

ROOT = Path(__file__).parent.parent
SHIPPED = (".py", ".toml", ".cu", ".cuh", ".j2")


def _copied(folder: Path) -> Path:
    """Copy the files of the package to a folder, with links as links; return the folder."""
    folder.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
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


def test_a_wheel_of_an_sdist_holds_the_same_files(tmp_path):
    source = _copied(tmp_path / "source")
    files = _files(_built("wheel", source, tmp_path / "wheel"))
    package = source / "halograd"
    links = [package, *(e.resolve() for e in package.iterdir() if e.is_symlink())]
    there = (p for top in links for p in top.rglob("*") if p.suffix in SHIPPED and not p.is_symlink())
    wanted = (p.relative_to(source) for p in there)
    named = (p if p.parts[0] == "halograd" else Path("halograd") / p for p in wanted)
    assert files == sorted(map(str, named)), "each of them once, under halograd/"
    with tarfile.open(_built("sdist", source, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert _files(_built("wheel", unpacked, tmp_path / "again")) == files
