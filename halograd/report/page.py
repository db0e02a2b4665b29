"""`halograd report`: one self-contained page about a run."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from markupsafe import Markup

from ..data import Batch, DataError, open_dataset
from ..data.coordinates import SOURCES
from ..data.files import SAMPLE
from ..data.hdf5 import Hdf5File
from ..data.storage import Storage, dataset_of
from ..data.structure import looking_into
from ..data.windows import SampleWindows
from ..documents import to_toml
from ..dtensor.box import Box
from ..errors import UserError
from ..output import cut_text
from ..perfmodel.plans import Plan
from ..training.log import Entry
from .document import write_html
from .pictures import Masks, best_to_worst, draw_curves, draw_masks, draw_speed, iou
from .quality import quality
from .status import Record, Status, duration_text, status_of
from .timeline import draw_timeline, hidden_text, phase_rows

__all__ = ["read_masks", "write_page"]

#: Kinds of log lines in the table of events.
SHOWN = ("begin", "stopped", "interrupted", "failed", "checkpoint_failed", "early_stop", "no_best", "finished")
#: Keys of a line ``begin`` that are required to show it.
ABOUT = {
    *("network", "parameters", "samples", "held_out", "batch", "ranks"),
    *("hosts", "cut", "kernels", "transport", "version"),
}


def write_page(record: Record, path: Path, predictions: Path | None = None, details: Path | None = None) -> list[str]:
    """Write one self-contained HTML page; return lines about missing parts with their reasons. Local.

    Parameters
    ----------
    record
        Log of the run, with all its steps.
    path
        The page; written atomically.
    predictions
        File written by `halograd evaluate --predictions`; by default ``predictions.h5`` of the run, if it exists.
    details
        File written by `halograd evaluate --details`; by default ``evaluation.json`` of the run, if it exists.
    """
    left_out: list[str] = []
    status = status_of(record)
    # The page contains its pictures, so their files are temporary.
    with tempfile.TemporaryDirectory() as folder:
        pictures = Path(folder)
        write_html(
            "run.html.j2",
            path,
            name=record.directory.resolve().name,
            status=status,
            summary=_summary(status, record.begin),
            curves=_curves(record, pictures, left_out),
            predicted=_predicted(record, left_out),
            phases=_phases(record, pictures, left_out),
            quality=quality(record.directory, details, pictures, left_out),
            masks=_masks(record, predictions, pictures, left_out),
            reduction=_reduction(record),
            events=_events(record),
            configuration="\n".join(_toml(record.begin.get("config") or {})).strip(),
        )
    return left_out


def _summary(status: Status, begin: Entry) -> list[tuple[str, str]]:
    rows = []
    if status.loss is not None:
        rows.append(("loss of the last step", f"{status.loss:.5g}"))
    rows += [(f"validation: {k}", f"{v:.4g}") for k, v in status.validation.items() if isinstance(v, float)]
    if status.seconds_per_step:
        rows.append(("time of a step in the last two epochs, all included", f"{1e3 * status.seconds_per_step:.4g} ms"))
    if status.samples_per_second:
        rows.append(("samples per second in the last two epochs", f"{status.samples_per_second:.4g}"))
    if status.seconds_left is not None:
        rows.append(("time left", duration_text(status.seconds_left)))
    # Logs of old versions do not have all of these.
    if begin.keys() >= ABOUT:
        rows += [
            ("network", f"{begin['network']}, {begin['parameters']:,} parameters"),
            ("samples", f"{begin['samples']:,}, and {begin['held_out']:,} held out; batches of {begin['batch']}"),
            ("ranks", f"{begin['ranks']} on {', '.join(begin['hosts'])}; {begin['cut']}"),
            ("kernels, transport", f"{begin['kernels']}; {begin['transport']}"),
            ("halograd", begin["version"] + (f", job {begin['job']}" if begin.get("job") else "")),
        ]
    if status.checkpoint:
        rows.append(("newest checkpoint", Path(status.checkpoint).name))
    return rows


def _curves(record: Record, pictures: Path, left_out: list[str]) -> dict[str, Path] | None:
    if not record.steps:
        left_out.append("curves: no step was logged yet")
        return None
    paths = {"loss": pictures / "loss.png", "speed": pictures / "speed.png"}
    validations = record.all("validation")
    draw_curves(paths["loss"], record.steps, validations, record.epochs_of(record.steps), record.epochs_of(validations))
    draw_speed(paths["speed"], record.steps, record.epochs_of(record.steps))
    return paths


def _predicted(record: Record, left_out: list[str]) -> Entry | None:
    """Return the log entry ``prediction``, with its layers and waits as rows of tables; None if there is none."""
    entry = record.last("prediction")
    if entry is None:
        left_out.append('predicted against measured: the run was not planned by strategy = "auto", or has not ended')
        return None
    cuts = _cuts_of(record.directory / "plan.json")
    pairs = entry["layers"].values()
    sums = (sum(pair[key] for pair in pairs) for key in ("predicted", "measured"))
    rows = [
        *(_compared(n, cuts.get(n, ""), pair["predicted"], pair["measured"]) for n, pair in entry["layers"].items()),
        _compared("layers together", "", *sums),
        _compared(Markup("<b>step</b>"), "", entry["predicted_step_seconds"], entry["measured_step_seconds"]),
    ]
    waits = [(kind, f"{1e3 * seconds:.3f}") for kind, seconds in entry["waits"].items()]
    return {**entry, "layers": rows, "waits": waits}


def _phases(record: Record, pictures: Path, left_out: list[str]) -> dict[str, Any] | None:
    entry, trace = record.last("phases"), record.directory / "timeline.json"
    if entry is None:
        left_out.append("timeline: not measured, set output.timeline = true")
        return None
    path = pictures / "timeline.png"
    drawn = trace.exists() and draw_timeline(path, trace, f"Two training steps · {hidden_text(entry['phases'])}")
    if not drawn:
        left_out.append(f"picture of the timeline: {trace.name} is written at the end of a run of a few steps or more")
    return {"picture": path if drawn else None, **phase_rows(entry)}


def _masks(record: Record, predictions: Path | None, pictures: Path, left_out: list[str]) -> dict[str, Any] | None:
    path = predictions or record.directory / "predictions.h5"
    if not path.exists():
        if predictions is not None:
            raise UserError(
                f"--predictions: expected a file that `halograd evaluate --predictions` wrote, got no {path}"
            )
        ranks, run = record.begin.get("ranks", 1), record.directory
        left_out.append(
            f"masks: no {path}; `mpiexec -n {ranks} halograd evaluate {run} --predictions {path}` writes it for "
            "samples of one size; for several sizes, `halograd apply` writes files of predictions"
        )
        return None
    masks = read_masks(path, record.begin.get("config", {}).get("data", {}))
    if masks is None:
        left_out.append("masks: the network does not predict any")
        return None
    draw_masks(pictures / "masks.png", masks)
    return {"picture": pictures / "masks.png", "file": path.name}


def _reduction(record: Record) -> list[tuple[str, str]]:
    return [
        (f"{entry['scheme']}{' (chosen)' if entry.get('chosen') else ''}", f"{1e3 * entry['seconds']:.3f}")
        for entry in record.all("reduction")
        if "seconds" in entry and "scheme" in entry
    ]


def _events(record: Record) -> list[tuple[str, str, str]]:
    events = []
    for entry in record.events:
        if entry["event"] in SHOWN:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["time"])) if "time" in entry else "-"
            events.append((when, str(entry.get("step", entry.get("at_step", ""))), _what(entry)))
    return events


def _what(entry: Entry) -> str:
    if entry["event"] == "begin":
        job = f", job {entry['job']}" if entry.get("job") else ""
        return f"begins on {entry.get('ranks', '?')} rank(s), {entry.get('cut', '?')}{job}"
    if entry["event"] == "failed":
        return f"failed: rank {entry['rank']} on {entry['host']}: {entry['cause']}"
    reason = f": {entry['reason']}" if "reason" in entry else ""
    return f"{entry['event'].replace('_', ' ')}{reason}"


def _toml(tables: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a configuration as TOML."""
    for name, table in tables.items():
        yield f"\n[{name}]"
        for key, value in table.items():
            if value is not None:
                yield f"{key} = {to_toml(value)}"


def _compared(name: str, cut: str, predicted: float, measured: float) -> tuple[str, ...]:
    error = f"{predicted / measured - 1:+.0%}" if measured else "-"
    return name, cut, f"{1e3 * predicted:.3f}", f"{1e3 * measured:.3f}", error


def _cuts_of(path: Path) -> dict[str, str]:
    """Return the cut of each layer as a string; empty if the plan cannot be read."""
    try:
        plan = Plan.load(path)
    except (UserError, OSError):
        return {}
    return {record.name: cut_text(record.parts) for record in plan.prediction.layers}


def read_masks(path: Path, data: dict[str, Any]) -> Masks | None:
    """Return masks of some samples, from the best predicted to the worst; None if predictions are not masks. Local.

    The predictions of one sample are in memory at a time, and the masks of the samples that are shown. A 3-D sample is
    represented by its middle slice.

    Parameters
    ----------
    path
        File with ``prediction`` and ``target`` ``(n, *spatial, C)`` and ``sample``.
    data
        Table ``[data]`` of the configuration, to show the network's input; if the files of the samples are missing, or
        changed, only masks are shown.

    Raises
    ------
    UserError
        If the file is of another kind.
    """
    try:
        with Hdf5File(path, Storage(path)) as file, looking_into(path):
            missing = {"prediction", "target", "sample"} - set(file.file)
            if missing:
                raise DataError(f"{path}: got no {missing}")
            prediction, target, sample = (file.dataset(name) for name in ("prediction", "target", "sample"))
            return _shown_masks(file.file, prediction, target, sample, data)
    except DataError as error:
        raise UserError(f"expected predictions of `halograd evaluate`: {error}") from error


def _shown_masks(
    file: h5py.File, prediction: h5py.Dataset, target: h5py.Dataset, sample: h5py.Dataset, data: dict[str, Any]
) -> Masks | None:
    samples = sample[...]
    channels = prediction.shape[-1]
    # Masks are (n, H, W, C) or (n, D, H, W, C), with class indices as targets.
    if prediction.ndim not in (4, 5) or target.shape[:-1] != prediction.shape[:-1] or target.shape[-1] != 1:
        return None
    if channels == 1 and not _are_masks(target):
        return None  # a regression target
    # One channel is the logit of the second of two classes.
    classes = max(2, channels)

    def classes_of(k: int) -> tuple[np.ndarray, np.ndarray]:
        values = prediction[k]
        # A logit above 0 is a probability above 0.5.
        guess = values[..., 0] > 0 if channels == 1 else values.argmax(axis=-1)
        return guess, np.rint(target[k][..., 0]).astype(int)

    rows = best_to_worst(np.array([iou(*classes_of(k), classes) for k in range(len(samples))]))
    # Read again, so that only the masks that are shown stay in memory.
    guesses, truths = zip(*(classes_of(k) for k in rows))
    image, name = _image(file, rows, prediction.shape[1:-1], data)
    return Masks(
        samples[rows],
        np.stack([_slice(t) for t in truths]),
        {"prediction": np.stack([_slice(g) for g in guesses])},
        classes,
        "truth",
        image,
        name,
    )


def _are_masks(target: h5py.Dataset) -> bool:
    """Return whether targets have only the values 0 and 1, and possibly one ignored number."""
    known, others = False, np.empty(0)
    for k in range(len(target)):  # of all samples: the target of one may be 0 everywhere, or ignored everywhere
        values = np.unique(target[k])
        inside = np.isin(values, (0, 1))
        known, others = known or bool(inside.any()), np.union1d(others, values[~inside])
        if len(others) > 1:
            return False
    return known


def _slice(values: np.ndarray) -> np.ndarray:
    """Return an image ``(H, W)``: the middle slice of `values` ``(D, H, W)``, or `values` themselves."""
    return values[len(values) // 2] if values.ndim == 3 else values


def _image(
    file: h5py.File, rows: np.ndarray, spatial: tuple[int, ...], data: dict[str, Any]
) -> tuple[np.ndarray | None, str]:
    """Return one channel of the inputs and its name: the density of a mesh, else the first channel; None and an empty
    name if the samples cannot be read.

    Samples are found by their files, because their numbers may be those of other data: of an evaluation of other files,
    or of ``data.lag``. `spatial` are the extents of the masks, which may be those of windows in the middle of samples.
    """
    # With data.file a function of the user makes the data set, which no path opens.
    if "file" in data or any(name not in file for name in SOURCES):
        return None, ""
    paths, numbers = (dataset_of(file, name)[...] for name in SOURCES)
    images, title = [], ""
    try:
        with ExitStack() as stack:
            opened: dict[str, Any] = {}
            for k in rows:
                path = os.fsdecode(paths[k])
                # A sample of several files, named by {sample}, has no path to open: open the whole data set.
                given = data["path"] if SAMPLE in str(data.get("inputs")) else path
                if str(given) not in opened:
                    opened[str(given)] = stack.enter_context(_open(given, data))
                # ValueError, which is caught below, if the data set does not have this file any more.
                (part,) = (part for part in opened[str(given)].parts if str(part.path) == path)
                image, title = _image_of(part, int(numbers[k]), spatial, data)
                images.append(_slice(image))
            return np.stack(images), title
    except (DataError, KeyError, ValueError):  # ValueError: moved or changed files, samples of other sizes
        return None, ""


def _open(given: Any, data: dict[str, Any]) -> Any:
    return open_dataset(
        given,
        data.get("inputs", "inputs"),
        data.get("targets", "mask"),
        data.get("layout"),
        several_sizes=True,
        allow_external=bool(data.get("allow_external", False)),
        unpack=data.get("unpack", True),
        format=data.get("format"),
    )


def _image_of(part: Any, index: int, spatial: tuple[int, ...], data: dict[str, Any]) -> tuple[np.ndarray, str]:
    """Return one channel of a sample's first input, at the positions of masks of extents `spatial`, and its name."""
    part.lenient = frozenset(part.fields)  # missing numbers are left blank
    (name, field), *_ = ((n, f) for n, f in part.fields.items() if len(f.shape) > 1 and not f.is_target)
    target, *_ = (f for f in part.fields.values() if f.is_target)
    window: tuple[int, ...] = field.shape[:-1]
    if data.get("patches") or (data.get("augment") or {}).get("crop"):
        if data.get("rule") is not None:
            raise DataError(f"{part.path}: the window of predictions that are reduced is not known")
        # Predictions of patches or crops: extents of the window, converted from targets to inputs, which may be finer.
        window = tuple(n * mine // n_target for n, mine, n_target in zip(spatial, window, target.shape))
    channel = field.channel_names.index("Density") if "Density" in field.channel_names else 0
    image = np.empty((*window, 1), np.float32)
    windows = SampleWindows(part, {name: (*window, field.shape[-1])})
    box = Box.of_ranges([*((0, n) for n in window), (channel, channel + 1)])
    windows.read(name, Batch((index,), 1, 0, 0), 0, box, image)
    return image[..., 0], field.channel_names[channel]
