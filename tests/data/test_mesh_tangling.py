"""The generator: deterministic, with sensible masks, bounded memory, and no partial file under the final name."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import h5py
import numpy as np
import pytest

from halograd.data import mesh_tangling
from halograd.data.disk import DataError
from halograd.data.lagrangian import CHANNELS
from halograd.data.mesh_tangling import MeshSimulation, Settings, generate
from tests.harness.limits import LIMIT
from tests.support.refusals import refusals


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "small.h5"
    generate(path, 70, 5, seed=4)
    return path


def content(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        return {name: file[name][()] for name in ("inputs", "mask", "simulation", "time")}


def test_file_format(small: Path) -> None:
    with h5py.File(small) as file:
        assert file["inputs"].shape == (5, 70, 70, 18) and file["inputs"].dtype == np.float32
        assert file["inputs"].chunks == (1, 64, 64, 18)
        assert file["mask"].shape == (5, 70, 70) and file["mask"].dtype == np.uint8
        assert list(file["simulation"]) == [0, 0, 1, 1, 2]
        assert file["inputs"].attrs["layout"] == "NHWC"
        assert list(file["inputs"].attrs["channel_names"]) == list(CHANNELS)
        assert len(file["inputs"].attrs["channel_units"]) == 18
        assert file.attrs["format"] == "halograd mesh-tangling" and file.attrs["format_version"] == 1
        assert file.attrs["seed"] == 4 and file.attrs["limit"] == 0.2 and file.attrs["resolution"] == 70


def test_masks_are_neither_empty_nor_full(small: Path) -> None:
    data = content(small)
    share = data["mask"].mean(axis=(1, 2))
    assert np.all((share > 0.005) & (share < 0.4)), share
    assert set(np.unique(data["mask"])) == {0, 1}
    assert np.isfinite(data["inputs"]).all()


def test_mask_holds_bad_cells_and_cells_that_are_still_good(small: Path) -> None:
    data = content(small)
    quality = data["inputs"][..., CHANNELS.index("scaledJacobian")]
    bad = quality < 0.2 - 1e-6
    assert np.all(data["mask"][bad] == 1)
    ahead = (data["mask"] == 1) & ~bad
    assert ahead.sum() > 0.2 * data["mask"].sum(), "the mask must look ahead, not only at the cell now"


def test_mask_is_the_quality_within_the_interval() -> None:
    settings = Settings(16, 1, seed=1)
    simulation = MeshSimulation(settings, 0)
    _, mask = simulation.sample_rows(0, 16, 1)
    mesh, worst = simulation.mesh(), np.full((16, 16), np.inf)
    for step in range(simulation.steps[0] + settings.interval_steps + 1):
        if step >= simulation.steps[0]:
            worst = np.minimum(worst, mesh.quality())
        mesh.advance()
    np.testing.assert_array_equal(mask[0], worst < settings.limit)


def test_the_seed_decides_everything(small: Path, tmp_path: Path) -> None:
    generate(tmp_path / "again.h5", 70, 5, seed=4)
    generate(tmp_path / "other.h5", 70, 5, seed=5)
    first, again, other = content(small), content(tmp_path / "again.h5"), content(tmp_path / "other.h5")
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
    assert not np.array_equal(first["inputs"], other["inputs"])


def test_a_sample_does_not_depend_on_the_others_nor_on_the_block(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_tangling, "BLOCK", 9)
    generate(tmp_path / "few.h5", 70, 3, seed=4)
    first, few = content(small), content(tmp_path / "few.h5")
    for name in first:
        np.testing.assert_array_equal(first[name][:3], few[name])


def test_instants_do_not_depend_on_the_resolution() -> None:
    assert MeshSimulation(Settings(16, 2, seed=9), 0).steps == MeshSimulation(Settings(500, 2, seed=9), 0).steps


def test_flow_that_hardly_tangles_still_gives_its_samples() -> None:
    # With so low a limit no instant has a share in range: the nearest ones are taken, none of them at rest.
    steps = MeshSimulation(Settings(16, 3, samples_per_simulation=3, limit=1e-6, most_steps=14), 0).steps
    assert len(steps) == 3 and min(steps) >= 1


def test_memory_does_not_grow_with_samples_and_stays_linear_in_resolution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_tangling, "BLOCK", 16)
    monkeypatch.setattr(mesh_tangling, "PILOT", 16)

    def peak(resolution: int, samples: int) -> int:
        tracemalloc.start()
        try:
            generate(tmp_path / "m.h5", resolution, samples)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(16, 2)  # caches of the libraries
    one, three = peak(64, 2), peak(64, 6)
    assert three < 1.1 * one
    # Four times the cells in blocks of equal rows need at most twice the memory.
    assert peak(128, 2) < 2.2 * one


def test_progress_is_reported(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    generate(tmp_path / "p.h5", 70, 3, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(k, 4) for k in range(1, 5)]


test_settings_out_of_range_are_named = refusals(
    ({"resolution": 4}, "resolution: expected at least 8, got 4"),
    ({"samples": 0}, "samples: expected at least 1, got 0"),
    ({"seed": -1}, "seed: expected 0 to 9223372036854775807, got -1"),
    ({"samples_per_simulation": 0}, "samples_per_simulation: expected at least 1, got 0"),
    ({"limit": 1.5}, "limit: expected between 0 and 1, got 1.5"),
    ({"time_step": 0.5}, "time_step: expected above 0 and at most 0.1 s, got 0.5"),
    ({"interval_steps": 0}, "interval_steps: expected at least 1, got 0"),
    ({"most_steps": 3}, "most_steps: expected at least 13, got 3"),
    ({"least_masked": 0.5}, "least_masked < most_masked: expected within"),
    call=lambda arguments: Settings(**{"resolution": 16, "samples": 1} | arguments),
    error=DataError,
)


def test_an_interrupted_run_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "out.h5"
    path.write_bytes(b"precious")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(path, 16, 4, progress=interrupt)
    assert path.read_bytes() == b"precious"
    assert [p.name for p in tmp_path.iterdir()] == ["out.h5"]


def test_too_little_space_is_refused_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("halograd.data.disk.shutil.disk_usage", lambda path: usage)
    with pytest.raises(DataError, match=r"expected [\d.]+ KiB of free disk, got 1000 B; free some space"):
        generate(tmp_path / "out.h5", 32, 1)
    assert not list(tmp_path.iterdir())


def test_disk_full_while_writing(tmp_path: Path) -> None:
    """Under a file size limit of 200 kB, writing fails with a disk error that names the file, as on a full disk."""
    pytest.importorskip("resource", reason="needs POSIX limits on the file size")
    script = (
        "import resource, sys\n"
        "from halograd.data import DataError, generate\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "try:\n"
        "    generate(sys.argv[1], 64, 4)\n"
        "except DataError as error:\n"
        "    print('refused:', error)\n"
    )
    path = tmp_path / "out.h5"
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert f"refused: cannot write {path}: the file system does not allow a file of this size" in done.stdout, done
    assert not list(tmp_path.iterdir())


def test_unwritable_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the folder .*nowhere does not exist; make it first"):
        generate(tmp_path / "nowhere" / "out.h5", 16, 1)
    with pytest.raises(DataError, match="it is a folder; give the name of a file in it"):
        generate(tmp_path, 16, 1)
