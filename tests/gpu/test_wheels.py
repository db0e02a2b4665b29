"""Tests of wheels for a machine without a package index: the unpacked packages, their folder, and the errors."""

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.gpu import wheels
from tests.gpu.wheels import WheelError, collect, unpack
from tests.harness.mpi import LAUNCHER


@pytest.fixture
def wheel(tmp_path):
    """Return a function that writes a wheel with these files."""

    def make(name, files):
        folder = tmp_path / "wheels"
        folder.mkdir(exist_ok=True)
        with zipfile.ZipFile(folder / name, "w") as archive:
            for path, (text, mode) in files.items():
                entry = zipfile.ZipInfo(path)
                entry.external_attr = (0o100000 | mode) << 16
                archive.writestr(entry, text)
        return folder

    return make


def test_what_is_missing_or_older_is_unpacked_beside_the_interpreter(wheel, tmp_path, monkeypatch):
    """Missing or older packages, programs and libraries are unpacked, including data that ``pip --target`` omits."""
    wheel("new_thing-1.0-py3-none-any.whl", {"new_thing/__init__.py": ("x = 5\n", 0o644), "../evil": ("", 0o644)})
    data = "libthing-2.0.data/data"
    program = f"#!{sys.executable}\nimport new_thing, sys; sys.exit(new_thing.x)\n"
    files = {f"{data}/bin/thing": (program, 0o755), f"{data}/lib/libthing.so.1": ("ELF", 0o644)}
    wheel("libthing-2.0-py3-none-manylinux_2_28_x86_64.whl", files)
    old, new = importlib.metadata.version("pytest"), "9999.1"
    wheel(f"pytest-{old}-py3-none-any.whl", {"pytest.py": ("", 0o644)})
    folder = wheel(f"pluggy-{new}-py3-none-any.whl", {"pluggy_new.py": ("", 0o644)})
    monkeypatch.delenv("PYTHONPATH", raising=False)
    said, environment = unpack(folder, tmp_path / "there")
    assert f"libthing 2.0, new-thing 1.0, pluggy {new}; 1 are installed already" in said
    there = tmp_path / "there"
    assert (there / "lib" / "libthing.so.1").exists() and not (there / "site" / "pytest.py").exists()
    assert not (tmp_path / "evil").exists() and not (there / "evil").exists()
    assert environment["PYTHONPATH"] == str(there / "site") and environment["PATH"].startswith(str(there / "bin"))
    assert environment["LD_LIBRARY_PATH"].split(os.pathsep)[0] == str(there / "lib")
    assert subprocess.run(["thing"], env={**os.environ, **environment}, check=False).returncode == 5
    (there / "site" / "mark").touch()
    unpack(folder, there)
    assert (there / "site" / "mark").exists(), "what is there is used again"


def test_wheels_of_another_python_are_refused_unless_they_are_not_needed(wheel, tmp_path):
    other = f"cp3{sys.version_info.minor + 1}"
    version = importlib.metadata.version("numpy")
    unpack(wheel(f"numpy-{version}-{other}-{other}-manylinux_2_28_x86_64.whl", {}), tmp_path / "there")
    folder = wheel(f"new_thing-1.0-{other}-{other}-manylinux_2_28_x86_64.whl", {})
    with pytest.raises(WheelError, match=rf"expected some for cp3{sys.version_info.minor}, got new_thing.*--python"):
        unpack(folder, tmp_path / "elsewhere")
    with pytest.raises(WheelError, match=r"wheels: expected some in .*, got none; make gpu-wheels where"):
        unpack(tmp_path)


def test_mpi_comes_with_its_bindings_and_its_launcher(wheel, tmp_path):
    """A present mpi4py may belong to another MPI, and a launcher beside the interpreter too."""
    bindings = importlib.metadata.version("mpi4py")
    wheel("mpich-9999.1-py3-none-any.whl", {"mpich-9999.1.data/data/bin/mpiexec": ("", 0o755)})
    folder = wheel(f"mpi4py-{bindings}-py3-none-any.whl", {"mpi4py/__init__.py": ("", 0o644)})
    said, environment = unpack(folder, tmp_path / "there")
    assert f"mpi4py {bindings}, mpich 9999.1; 0 are" in said
    assert environment[LAUNCHER] == str(tmp_path / "there" / "bin" / "mpiexec")
    (folder / "mpich-9999.1-py3-none-any.whl").unlink()
    said, environment = unpack(folder, tmp_path / "elsewhere")
    assert "nothing; 1 are installed" in said and LAUNCHER not in environment


def pip(monkeypatch, sizes, code=0):
    """Install a stub of pip that downloads wheels of these sizes; return the list of its calls."""
    asked = []

    def run(arguments, **options):
        asked.append(arguments)
        folder = Path(arguments[arguments.index("--dest") + 1])
        folder.mkdir(parents=True)
        for name, nbytes in sizes.items():
            with (folder / name).open("wb") as file:
                file.truncate(nbytes)
        return subprocess.CompletedProcess(arguments, code, "", "ERROR: No matching\n distribution found for mpich")

    monkeypatch.setattr(wheels.subprocess, "run", run)
    return asked


def test_what_the_machine_has_of_its_own_is_not_collected(monkeypatch, tmp_path):
    asked = pip(monkeypatch, {"numpy-2.4-cp312-cp312-linux.whl": 1 << 24, "mpich-5.0.2-py3-none-linux.whl": 5})
    assert [path.name for path in collect(tmp_path / "w")] == ["mpich-5.0.2-py3-none-linux.whl"]
    assert asked[0][asked[0].index("--python-version") + 1] == "3.12" and "manylinux2014_x86_64" in asked[0]
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert all(f'"{requirement}"' in project for requirement in wheels.REQUIREMENTS)


def test_wheels_that_are_too_large_or_cannot_be_had(monkeypatch, tmp_path):
    pip(monkeypatch, {"mpich-5.0.2-py3-none-linux.whl": 61 << 20})
    with pytest.raises(WheelError, match="expected at most 60 MiB, got 61 MiB"):
        collect(tmp_path / "w")
    pip(monkeypatch, {}, code=1)
    with pytest.raises(WheelError, match="wheels: pip failed: ERROR: No matching distribution found for mpich"):
        collect(tmp_path / "v")
