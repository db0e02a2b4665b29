"""Tests of the page about a run: its content for runs of every kind, and the escaping of HTML."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.cli.run import run
from halograd.data.disk import DataError
from halograd.errors import UserError
from halograd.report.page import read_masks, write_page
from halograd.report.pictures import Masks, best_to_worst, draw_masks, iou
from halograd.report.status import read_record
from halograd.training.metrics import Confusion, by_class
from halograd.training.run import train
from halograd.training.trained import evaluate
from tests.harness.limits import LIMIT
from tests.training.runs import write_config

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return the directory of a run with a timeline and predictions."""
    folder = tmp_path_factory.mktemp("runs")
    config = write_config(folder)
    train(config, ["output.timeline=true"], comm=MPI.COMM_SELF)
    out = folder / "out"
    evaluate(out, predictions=out / "predictions.h5", details=out / "evaluation.json", comm=MPI.COMM_SELF)
    return folder / "out"


@pytest.fixture
def begun(trained, tmp_path) -> Path:
    """Return the directory of a run just after its start."""
    log = tmp_path / "begun" / "log.jsonl"
    log.parent.mkdir()
    log.write_text((trained / "log.jsonl").read_text().splitlines()[0] + "\n")
    os.utime(log, (2e9, 2e9))  # set to now, for any duration of this test
    return log.parent


def page_of(directory: Path, out: Path, **options) -> tuple[str, list[str]]:
    """Return the text of the page, which must be complete and load nothing, and the list of missing parts."""
    left_out = write_page(read_record(directory), out, **options)
    text = out.read_text()
    assert not re.search(r"<script|<link|src=\"(?!data:)|url\(|@import", text)
    body = re.sub(r"<!doctype html>|<meta[^>]*>", "", re.sub(r"(<img [^>]*)>", r"\1/>", text))
    assert ElementTree.fromstring(body).tag == "html"  # every tag is closed
    for data in re.findall(r'src="data:image/png;base64,([^"]*)"', text):
        assert base64.b64decode(data, validate=True).startswith(PNG)
    assert not [p for p in out.parent.iterdir() if p.name.endswith(".partial")]
    return text, left_out


def test_everything_of_a_run(trained, tmp_path):
    text, left_out = page_of(trained, tmp_path / "page.html")
    assert [line.partition(":")[0] for line in left_out] == ["predicted against measured"]
    assert "Quality by class" in text and "Expected calibration error" in text
    assert text.count("<img ") == 6  # loss, speed, timeline, confusion, reliability, masks
    for part in ("<b>finished</b>, step 9 of 9, epoch 3 of 3", "mesh, ", "<h2>Events</h2>", "<td>finished</td>"):
        assert part in text
    assert "No messages." in text and "warmup_epochs = 1" in text  # on one rank


def test_predicted_and_measured(trained, tmp_path):
    entry = {
        "event": "prediction",
        "step": 9,
        "steps": 7,
        "predicted_step_seconds": 0.004,
        "measured_step_seconds": 0.005,
        "data_seconds": 0.001,
        "waits": {"halo": 0.0005},
        "layers": {"conv1": {"predicted": 0.002, "measured": 0.001}, "bn1": {"predicted": 0.001, "measured": 0.0}},
    }
    (tmp_path / "log.jsonl").write_text((trained / "log.jsonl").read_text() + json.dumps(entry) + "\n")
    text, left_out = page_of(tmp_path, tmp_path / "page.html")
    rows = re.findall(r"<tr><td>(.*?)</td></tr>", text)
    assert "conv1</td><td></td><td>2.000</td><td>1.000</td><td>+100%" in rows
    assert "bn1</td><td></td><td>1.000</td><td>0.000</td><td>-" in rows
    assert "layers together</td><td></td><td>3.000</td><td>1.000</td><td>+200%" in rows
    assert "<b>step</b></td><td></td><td>4.000</td><td>5.000</td><td>-20%" in rows
    assert [line.partition(":")[0] for line in left_out] == ["picture of the timeline", "classes", "masks"]


def test_a_run_that_has_just_begun(begun, tmp_path):
    text, left_out = page_of(begun, tmp_path / "page.html")
    assert "<img" not in text and "No step was logged yet" in text
    assert {line.partition(":")[0] for line in left_out} >= {"curves", "timeline", "masks"}
    (masks,) = (line for line in left_out if line.startswith("masks:"))
    assert f"halograd evaluate {begun} --predictions" in masks and "for several sizes, `halograd apply`" in masks


def test_one_step_without_validation(trained, tmp_path):
    lines = (trained / "log.jsonl").read_text().splitlines()
    (tmp_path / "log.jsonl").write_text("\n".join([lines[0], *[x for x in lines if '"step", ' in x][:1]]) + "\n")
    text, _ = page_of(tmp_path, tmp_path / "page.html")
    assert text.count("<img ") == 2


def test_long_logs_are_thinned(trained, tmp_path):
    step = next(e for e in map(json.loads, (trained / "log.jsonl").read_text().splitlines()) if e["event"] == "step")
    lines = [json.dumps({**step, "step": k, "epoch": (k - 1) // 3}) for k in range(1, 9000)]
    (tmp_path / "log.jsonl").write_text((trained / "log.jsonl").read_text().splitlines()[0] + "\n" + "\n".join(lines))
    page_of(tmp_path, tmp_path / "page.html")


def test_nothing_of_a_run_is_taken_for_html(trained, tmp_path):
    evil = '<script>alert("1")</script>'
    begin = json.loads((trained / "log.jsonl").read_text().splitlines()[0])
    begin |= {"network": evil, "hosts": {evil: 1}, "job": evil, "kernels": evil, "cut": evil}
    begin["config"]["data"]["path"] = evil
    failed = {"event": "failed", "rank": 0, "host": evil, "cause": evil, "at_step": 0}
    folder = tmp_path / "a<b>&"
    folder.mkdir()
    (folder / "log.jsonl").write_text(json.dumps(begin) + "\n" + json.dumps(failed) + "\n")
    text, _ = page_of(folder, tmp_path / "page.html")
    assert "<title>halograd: a&lt;b&gt;&amp;</title>" in text and text.count("&lt;script&gt;") >= 6


def test_masks_show_the_scores_of_the_run(trained):
    config = read_record(trained).begin["config"]
    masks = read_masks(trained / "predictions.h5", config["data"])
    assert masks is not None and masks.image is not None and masks.image_title == "channel 0"
    with h5py.File(trained / "predictions.h5") as file:
        truth, guess = file["target"][..., 0] > 0.5, file["prediction"][..., 0] > 0
        order = file["sample"][...].tolist()
    wanted = [(g & t).sum() / max(1, (g | t).sum()) for g, t in zip(guess, truth)]
    assert [iou(*pair) for pair in zip(guess, truth)] == pytest.approx(wanted)
    shown = [order.index(k) for k in masks.samples]
    assert np.array_equal(masks.truth, truth[shown]) and np.array_equal(masks.predicted["prediction"], guess[shown])
    assert wanted[shown[0]] == max(wanted) and wanted[shown[-1]] == min(wanted)
    with h5py.File(config["data"]["path"]) as file:
        assert np.array_equal(masks.image, file["inputs"][...][masks.samples][..., 0])


@pytest.mark.parametrize("gone", ["source_file", "file"])
def test_masks_without_the_data(trained, tmp_path, gone):
    """If the file of the samples is not known, or gone, only masks are shown."""
    shutil.copy(trained / "predictions.h5", tmp_path / "p.h5")
    with h5py.File(tmp_path / "p.h5", "r+") as file:
        names = [name.replace(b".h5", b"-gone.h5") for name in file["source_file"][...]]
        del file["source_file"]
        if gone == "file":
            file["source_file"] = names
    assert read_masks(tmp_path / "p.h5", read_record(trained).begin["config"]["data"]).image is None


@pytest.mark.parametrize("factor", [1, 2])
def test_the_image_is_that_of_the_masks(tmp_path, factor):
    """Next to masks of windows in the middle of samples of several sizes is the input of these windows.

    The samples are those of the evaluated files, whatever files the run was trained on.
    """
    rng, windows, images, sources = np.random.default_rng(3), [], [], []
    for name, shape in (("a", (12, 20)), ("b", (4, 24))):  # the second one ends within its window
        x = rng.random((2, *shape, 1), np.float32)
        mask = rng.integers(0, 2, (2, *(n // factor for n in shape)))
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file.create_dataset("inputs", data=x).attrs["layout"] = "NHWC"
            file["mask"] = mask
        wide = np.pad(x[1, ..., 0], 8, constant_values=np.nan)
        fine = np.pad(mask[1], 8, constant_values=-1)
        rows, columns = (slice(8 + (n - 8) // 2, 16 + (n - 8) // 2) for n in shape)
        images.append(wide[rows, columns])
        rows, columns = (
            slice(8 + (n // factor - 8 // factor) // 2, 8 + (n // factor + 8 // factor) // 2) for n in shape
        )
        windows.append(fine[rows, columns])
        sources.append((str(tmp_path / f"{name}.h5"), 1))
    target = np.array(windows)[..., None].astype(float)
    path = write_predictions(tmp_path / "p.h5", np.where(target > 0, 1.0, -1.0), target)
    with h5py.File(path, "r+") as file:
        file["source_file"], file["source_sample"] = zip(*sources)
    data = {"path": "trained_on.h5", "patches": 4}
    masks = read_masks(path, data)
    assert masks is not None and masks.image is not None and masks.image.shape == (2, 8, 8)
    assert np.array_equal(masks.image, np.array(images)[masks.samples], equal_nan=True)
    draw_masks(tmp_path / "p.png", masks)
    assert read_masks(path, {**data, "rule": "any"}).image is None


def write_predictions(path: Path, prediction: np.ndarray, target: np.ndarray) -> Path:
    with h5py.File(path, "w") as file:
        file["prediction"], file["target"], file["sample"] = prediction, target, np.arange(len(target))
    return path


def test_classes_and_volumes(tmp_path):
    rng = np.random.default_rng(3)
    truth = rng.integers(0, 3, (5, 4, 6, 7))
    guess = np.where(rng.random(truth.shape) < 0.3, rng.integers(0, 3, truth.shape), truth)
    path = write_predictions(tmp_path / "p.h5", np.eye(3)[guess], truth[..., None].astype(float))
    masks = read_masks(path, {})
    assert masks is not None and masks.classes == 3 and masks.truth.shape == (4, 6, 7)
    assert np.array_equal(masks.truth, truth[masks.samples, 2])
    counted = Confusion(3)
    counted.add(np.eye(3)[guess[:1]], truth[:1, ..., None])
    assert iou(guess[0], truth[0], 3) == pytest.approx(counted.scores()["iou"])


@pytest.mark.parametrize(("channels", "ignored"), [(1, -1), (1, 7), (2, 7), (3, -1)])
def test_ignored_positions_are_not_shown(tmp_path, channels, ignored):
    rng = np.random.default_rng(3)
    classes = max(2, channels)
    truth, there = rng.integers(0, classes, (4, 6, 7)), rng.random((4, 6, 7)) < 0.7
    there[0, 0] = False
    guess = rng.random((4, 6, 7, channels)) - 0.5
    target = np.where(there, truth, ignored)[..., None].astype(float)
    masks = read_masks(write_predictions(tmp_path / "p.h5", guess, target), {})
    assert masks is not None and masks.classes == classes
    chosen = guess[0, ..., 0] > 0 if channels == 1 else guess[0].argmax(-1)
    counted = Confusion(classes, ignored=ignored)
    counted.add(np.eye(classes)[chosen.astype(int)], target[0].astype(int))
    assert iou(chosen, target[0, ..., 0], classes) == pytest.approx(counted.scores()["iou"])
    draw_masks(tmp_path / "p.png", masks)
    assert (tmp_path / "p.png").stat().st_size > 1000


@pytest.mark.parametrize("classes", [2, 3])
def test_ignored_positions_are_blank_in_predictions(tmp_path, monkeypatch, classes):
    shown = []
    monkeypatch.setattr("halograd.report.pictures._show", lambda axes, mask, *_: shown.append(np.ma.getmaskarray(mask)))
    truth, guess = np.zeros((1, 4, 5), int), np.ones((1, 4, 5), int)
    truth[0, 1, 2:] = -1
    draw_masks(tmp_path / "p.png", Masks(np.array([0]), truth, {"network": guess}, classes))
    assert len(shown) == 2 and all(np.array_equal(mask, truth[0] < 0) for mask in shown)


def test_masks_of_which_one_is_ignored(tmp_path):
    target = np.random.default_rng(3).integers(0, 2, (3, 6, 7, 1))
    target[0] = -1
    masks = read_masks(write_predictions(tmp_path / "p.h5", target - 0.5, target.astype(float)), {})
    assert masks is not None and masks.classes == 2 and masks.samples.tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    "prediction, target",
    [
        (np.zeros((3, 10)), np.zeros((3, 1))),  # a label per sample
        (np.zeros((3, 4, 4, 1)), np.full((3, 4, 4, 1), 0.3)),  # a field
        (np.zeros((3, 4, 4, 1)), np.arange(3.0).reshape(3, 1, 1, 1) * np.ones((4, 4, 1)) / 4),  # one that begins with 0
        (np.zeros((3, 4, 4, 1)), np.full((3, 4, 4, 1), -1.0)),  # all of it is ignored
    ],
)
def test_what_is_no_mask(tmp_path, prediction, target):
    assert read_masks(write_predictions(tmp_path / "p.h5", prediction, target), {}) is None


def test_what_is_no_file_of_predictions(begun, tmp_path):
    (tmp_path / "p.h5").write_text("no HDF5")
    for path, message in (
        (tmp_path / "p.h5", "expected predictions of `halograd evaluate`"),
        (Path(read_record(begun).begin["config"]["data"]["path"]), "got no .*prediction"),
        (tmp_path / "none.h5", "--predictions: expected a file that `halograd evaluate --predictions` wrote, got no "),
    ):
        with pytest.raises(UserError, match=message):
            write_page(read_record(begun), tmp_path / "page.html", path)
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_written(begun, tmp_path):
    with pytest.raises(DataError, match="it is a folder"):
        write_page(read_record(begun), tmp_path)


def test_rows_go_from_the_best_to_the_worst():
    assert best_to_worst(np.array([0.1, 0.9, 0.5])).tolist() == [1, 2, 0]
    assert best_to_worst(np.linspace(0, 1, 10)).tolist() == [9, 6, 3, 0]


def halograd(capsys, *arguments: object) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a command."""
    code = run([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def test_the_commands(begun, trained, tmp_path, capsys):
    code, out, _ = halograd(capsys, "status", trained, begun, "--json")
    assert code == 0 and [json.loads(line)["state"] for line in out.splitlines()] == ["finished", "running"]
    code, out, complaint = halograd(capsys, "status", tmp_path, trained, "--json")  # for example a queued run
    assert code == 2 and json.loads(out)["state"] == "finished" and len(complaint.splitlines()) == 1
    code, out, _ = halograd(capsys, "status", trained)
    assert code == 0 and out.startswith(f"{trained}: finished, step 9 of 9 (100 %), epoch 3 of 3\n")
    code, out, _ = halograd(capsys, "report", begun, "--out", tmp_path / "new" / "page.html")
    assert code == 0 and out.endswith(f"wrote {tmp_path / 'new' / 'page.html'}\n")
    assert out.startswith("without curves: ")
    for command in ("status", "report"):
        code, _, complaint = halograd(capsys, command, tmp_path)
        assert code == 2 and len(complaint.splitlines()) == 1 and "expected the directory of a run" in complaint


def test_status_needs_no_mpi(trained):
    """`halograd status` loads no MPI, which login nodes may lack."""
    code = (
        "import sys; sys.argv = ['halograd', 'status', sys.argv[1]]\n"
        "from halograd.cli.run import run\n"
        "assert run(sys.argv[1:]) == 0 and not {'mpi4py', 'h5py', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, trained], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr


def test_a_further_metric_does_not_repeat_the_table_of_classes(trained, tmp_path):
    details = json.loads((trained / "evaluation.json").read_text())
    (own,) = [p for p in details["predictions"] if p["kind"] == "classes"]
    details["predictions"].append({**own, "name": "prediction by Other", "scores": {"other": 0.25}})
    (tmp_path / "evaluation.json").write_text(json.dumps(details))
    text, _ = page_of(trained, tmp_path / "page.html", details=tmp_path / "evaluation.json")
    once, _ = page_of(trained, tmp_path / "once.html")
    assert "prediction by Other" in text and text.count("<table") == once.count("<table") + 1  # that of its score


def test_details_that_are_none(trained, begun, tmp_path):
    """A missing, changed or foreign file of details is an error; without one the page shows how to create it."""
    record = read_record(begun)
    other, changed = tmp_path / "other.json", tmp_path / "changed.json"
    other.write_text('{"a": 1}')
    found = json.loads((trained / "evaluation.json").read_text())
    found["predictions"][0]["by_class"] = 3
    changed.write_text(json.dumps(found))
    for path, message in (
        (other, "expected a file that `halograd evaluate --details` wrote, got another"),
        (changed, "got a file that was changed; write it again"),
        (tmp_path / "none.json", "--details: expected a file that `halograd evaluate --details` wrote, got no "),
    ):
        with pytest.raises(UserError, match=message):
            write_page(record, tmp_path / "page.html", details=path)
    _, left_out = page_of(begun, tmp_path / "page.html")
    assert any(f"halograd evaluate {begun} --details" in line for line in left_out)
    with pytest.raises(UserError, match="wrote, got another; give another path"):
        evaluate(trained, details=other, comm=MPI.COMM_SELF)


def test_many_classes(trained, tmp_path):
    """The table of classes ends after 50 classes, and a picture with too small text is left out."""
    found, classes = json.loads((trained / "evaluation.json").read_text()), 60
    counts = np.arange(classes**2).reshape(classes, classes)
    found["predictions"][0] |= {"confusion": counts.tolist(), "by_class": by_class(counts)}
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps(found))
    text, _ = page_of(trained, tmp_path / "page.html", details=path)
    assert "10 more classes are not shown." in text and text.count("<img ") == 5
