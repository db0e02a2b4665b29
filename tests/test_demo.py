"""`halograd demo`: it generates everything up to a report, and changes no other files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from halograd.errors import UserError
from halograd.local import find_mpiexec, run_ranks
from halograd.report.timeline import Bar, step_begins, typical_steps, without
from tests.harness import jobs
from tests.launch import mpiexec

PICTURES = ("loss.png", "predictions.png", "timeline.png")
PNG = b"\x89PNG\r\n\x1a\n"


def demo(*arguments: object, seconds: float = 240) -> subprocess.CompletedProcess[str]:
    """Run ``halograd demo ARGUMENTS`` in a separate process, and check that it leaves no process."""
    mark = jobs.new_mark()
    command = [sys.executable, "-m", "halograd", "demo", *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=jobs.job_environment(mark))
        assert not jobs.await_end(mark), "expected no process to outlive the demonstration"
    finally:
        jobs.end(mark)
    return done


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """Return folder and output of a small demonstration."""
    out = tmp_path_factory.mktemp("demo") / "out"
    done = demo("--quick", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


@pytest.mark.nightly
def test_everything_is_there(finished):
    out, _ = finished
    names = {"mesh.h5", "config.toml", "predictions.h5", "report.html", "run", *PICTURES}
    assert {path.name for path in out.iterdir()} == names
    assert all((out / name).read_bytes().startswith(PNG) for name in PICTURES)
    assert {path.name for path in (out / "run").iterdir()} == {"checkpoints", "log.jsonl", "timeline.json"}


@pytest.mark.nightly
def test_report_compares_with_the_baseline(finished):
    out, printed = finished
    report = (out / "report.html").read_text()
    assert report.count("<img ") == report.count('src="data:image/png;base64,') == len(PICTURES)
    for name in ("network", "logistic regression per cell", "cells below the quality limit already"):
        iou = re.search(rf"^{name} +([01]\.\d{{3}}) ", printed, re.M)
        assert iou, printed
        assert re.search(rf"<td>{name}</td><td>[-.\d]+</td><td>{re.escape(iou[1])}</td>", report), report
    assert all(
        f"<td>{row}</td>" in report
        for row in ("forward", "halo exchange", "all-reduce of gradients", "train", "total", "processor")
    )


@pytest.mark.nightly
def test_scores_are_those_of_the_predictions(finished):
    out, _ = finished
    with h5py.File(out / "predictions.h5") as file, h5py.File(out / "mesh.h5") as data:
        order = np.argsort(file["sample"][:])
        assert file["sample"][:][order].tolist() == list(range(12))
        assert np.array_equal(file["target"][:][order][..., 0], data["mask"][:])


@pytest.mark.nightly
def test_configuration_is_one_to_start_from(finished, tmp_path):
    out, _ = finished
    sets = ("strategy.sample=1", "training.epochs=1", f"output.directory={tmp_path / 'mine'}")
    arguments = ["-m", "halograd", "train", out / "config.toml"]
    for text in sets:
        arguments += ["--set", text]
    done = mpiexec(2, arguments)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine" / "log.jsonl").exists()


@pytest.mark.nightly
def test_second_call_replaces_only_its_own(finished):
    out, first = finished
    assert "generated before" not in first
    before = (out / "mesh.h5").stat().st_mtime_ns
    (out / "run" / "notes.txt").write_text("mine")
    edited = (out / "config.toml").read_text().replace("epochs = 3", "epochs = 5")
    (out / "config.toml").write_text(edited)
    (out / "run.new").mkdir()
    (out / "run.new" / "log.jsonl").write_text('{"event": "step", "left": "by an interrupted run"}\n')
    done = demo("--quick", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "generated before" in done.stdout and (out / "mesh.h5").stat().st_mtime_ns == before
    assert (out / "run" / "notes.txt").read_text() == "mine"
    assert (out / "config.toml.old1").read_text() == edited and "epochs = 3" in (out / "config.toml").read_text()
    assert not (out / "run.new").exists() and "interrupted" not in (out / "run" / "log.jsonl").read_text()


def test_foreign_data_are_not_replaced(tmp_path):
    (tmp_path / "mesh.h5").write_text("somebody's")
    done = demo("--quick", "--out", tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert f"data set at {tmp_path / 'mesh.h5'}, got another file; move it away" in done.stderr
    assert (tmp_path / "mesh.h5").read_text() == "somebody's"


def test_out_must_be_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    done = demo("--quick", "--out", tmp_path / "file")
    assert done.returncode == 2
    assert done.stderr.startswith(f"halograd: error: --out {tmp_path / 'file'}: expected a path that can be written")


def test_it_wants_no_launcher(tmp_path):
    done = mpiexec(2, ["-m", "halograd", "demo", "--quick", "--out", tmp_path / "out"])
    assert done.returncode == 2
    assert done.stderr == (
        "halograd: error: demo: expected to be started alone, got a launcher; it starts its ranks itself\n"
    )


def test_missing_mpiexec_is_told_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"expected mpiexec in .* got none; pip install 'halograd\[mpich\]'"):
        find_mpiexec()


def test_job_that_fails_is_told_after_its_own_message(tmp_path):
    launcher = tmp_path / "mpiexec"
    launcher.write_text("#!/bin/sh\necho halograd: error: expected a moon >&2\nexit 3\n")
    launcher.chmod(0o755)
    said: list[str] = []
    with pytest.raises(UserError, match=r"`halograd train` on 4 ranks: expected exit code 0, got 3; see its message"):
        run_ranks(str(launcher), 4, ["train", "x.toml"], said.append)
    assert said == ["halograd: error: expected a moon"]


def test_compute_is_what_the_waits_leave():
    assert without([(0, 10), (12, 14)], [(1, 2), (9, 13)]) == [(0, 1), (2, 9), (13, 14)]
    assert without([(0, 4)], [(0, 4)]) == [] and without([(0, 4)], []) == [(0, 4)]


def test_shown_steps_are_of_median_length():
    begins = (-5.0, 0.0, 9.0, 11.0, 13.0, 15.0, 17.0, 18.0)
    bars = [Bar(0, "compute", "forward", begin + late, begin + late + 0.1) for begin in begins for late in (0.0, 0.2)]
    bars += [Bar(0, "compute", "update", begin + 0.1, begin + 0.2) for begin in begins]
    bars += [Bar(0, "compute", "backward", begin + 0.5, begin + 0.8) for begin in begins]
    assert step_begins(bars, 0) == list(begins) and step_begins(bars, 1) == []
    assert typical_steps(bars, 1) == (9.0, 11.0)
    assert typical_steps(bars, 2) == (9.0, 13.0)
    assert typical_steps([bar for bar in bars if bar.end < 10], 2) is None
