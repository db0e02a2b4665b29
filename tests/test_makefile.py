"""`make` does not change an environment that it has not created."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.harness.limits import LIMIT

ROOT = Path(__file__).resolve().parents[1]
STAMPS = ("python", "base", "docs", "dist", "lint", "oracle", "oracle-zoo", "nvrtc", "peers")
#: Replacement of Python that records its arguments.
NOTES = '#!/bin/sh\necho "$@" >>"${0%/*}/../calls"\n'


@pytest.fixture
def clone(tmp_path):
    if shutil.which("make") is None:
        pytest.skip("needs make")
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, folder)
    return folder


def environment(path, made_by=None):
    """Return an environment whose packages are older than the sources, so that installing targets would install."""
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "python").write_text(NOTES)
    (path / "bin" / "python").chmod(0o755)
    for stamp in STAMPS if made_by is not None else ():
        (path / f".stamp-{stamp}").write_text(f"{made_by}\n" if stamp == "python" else "")
    return path


def make(clone, *words):
    done = subprocess.run(["make", *words], cwd=clone, capture_output=True, text=True, timeout=LIMIT)
    calls = [path / "calls" for path in (clone / ".venv", clone.parent / "other")]
    return done, "".join(path.read_text() for path in calls if path.exists())


@pytest.mark.parametrize("made_by", [None, "", "/another/clone"], ids=["make", "an older make", "another clone"])
@pytest.mark.parametrize("target", ["docs", "venv", "lint", "typecheck"])
def test_nothing_is_installed_into_another_environment(clone, target, made_by):
    other = environment(clone.parent / "other", made_by)
    done, calls = make(clone, target, f"VENV={other}")
    assert done.returncode == 0 and f"{other} was not made here" in done.stdout, done.stdout + done.stderr
    assert "pip" not in calls and "venv" not in calls
    assert ("mkdocs build" in calls) == (target == "docs")
    assert other.exists() and {p.name for p in other.iterdir()} - {"calls", "bin"} == (
        set() if made_by is None else {f".stamp-{stamp}" for stamp in STAMPS}
    )


@pytest.mark.parametrize(
    "target, options",
    [(name, f" --{name}") for name in ("nightly", "quick", "coverage")]
    + [("test", ""), ("test-openmpi", " --mpi openmpi")],
)
def test_what_runs_the_suite(clone, target, options):
    other = environment(clone.parent / "other")
    done, calls = make(clone, target, f"VENV={other}", "SUITE=-x")
    assert done.returncode == 0 and calls == f"tests/run_suite.py{options} -x\n", done.stdout + done.stderr


def test_tools_named_with_the_extras_are_installed_at_once(clone):
    """Tools among EXTRAS are installed by one call of pip, and not again by the targets that need them."""
    own = environment(clone / ".venv", "")
    for stamp in STAMPS[1:]:
        (own / f".stamp-{stamp}").unlink()
    done, calls = make(clone, "venv", "EXTRAS=mpich,test,lint,docs")
    installed = [call for call in calls.splitlines() if "install" in call]
    assert len(installed) == 1 and installed[0].endswith("install -e .[mpich,test,lint,docs]"), done.stderr
    done, calls = make(clone, "lint", "docs-tools")
    assert done.returncode == 0 and [call for call in calls.splitlines() if "install" in call] == installed
    assert "ruff check" in calls
    _, calls = make(clone, "nvrtc")
    assert calls.splitlines()[-1].endswith("install -e .[mpich,test,nvrtc]")


def test_another_environment_is_not_removed(clone):
    other = environment(clone.parent / "other", "/another/clone")
    done, _ = make(clone, "distclean", f"VENV={other}")
    assert done.returncode == 0 and (other / "bin" / "python").exists(), done.stderr


@pytest.mark.parametrize("place, made_by", [(".venv", ""), ("../other", "here")])
def test_its_own_environment_is_kept_up_to_date(clone, place, made_by):
    own = environment((clone / place).resolve(), clone if made_by == "here" else made_by)
    (own / ".stamp-base").unlink()
    done, calls = make(clone, "docs", f"VENV={place}")
    assert done.returncode == 0 and "was not made here" not in done.stdout, done.stdout + done.stderr
    assert "pip" in calls and "docs" in calls and "mkdocs build" in calls
