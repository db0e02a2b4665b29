"""The generator of mesh tangling: masks, the flow that moves the mesh, and quad metrics against VTK's Verdict."""

from __future__ import annotations

import math
import subprocess
import sys
import tracemalloc
from pathlib import Path

import h5py
import numpy as np
import pytest

from halograd.data import mesh_tangling
from halograd.data.disk import DataError
from halograd.data.lagrangian import (
    CHANNELS,
    UNITS,
    Bubble,
    Flow,
    FrozenFlow,
    MeshBlock,
    VelocityField,
    bubble_fractions,
)
from halograd.data.mesh_tangling import MeshSimulation, Settings, generate
from halograd.data.verdict import HUGE, METRICS, Quads, quad_metrics, scaled_jacobian
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
    with pytest.raises(DataError, match=r"expected [\d.]+ KiB of free disk, got 1000 B; .* or request fewer or"):
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
    assert f"refused: cannot write {path}: a file of this size is not allowed, by the limit of" in done.stdout, done
    assert not list(tmp_path.iterdir())


def test_unwritable_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the folder .*nowhere does not exist; make it first"):
        generate(tmp_path / "nowhere" / "out.h5", 16, 1)
    with pytest.raises(DataError, match="it is a folder; give the name of a file in it"):
        generate(tmp_path, 16, 1)


DT, STEPS = 0.025, 12


def make_flow(seed: int = 3) -> Flow:
    rng = np.random.default_rng(seed)
    return Flow(rng, Bubble.draw(rng), DT, STEPS)


def velocity(frozen: FrozenFlow, at: np.ndarray) -> np.ndarray:
    out = np.empty_like(at)
    VelocityField(at.shape[1]).evaluate(frozen, at, out)
    return out


def test_nothing_crosses_the_walls() -> None:
    s = np.linspace(0, 1, 50)
    for half_step in (0, 7):
        frozen = make_flow().freeze(half_step)
        for wall in (0.0, 1.0):
            w = np.full_like(s, wall)
            assert np.abs(velocity(frozen, np.stack([w, s]))[0]).max() < 1e-13
            assert np.abs(velocity(frozen, np.stack([s, w]))[1]).max() < 1e-13


def test_divergence_is_that_of_the_sound_alone() -> None:
    flow = make_flow()
    frozen = flow.freeze(5)
    at = np.random.default_rng(0).uniform(0.05, 0.95, (2, 200))
    h = 1e-5
    step_x, step_y = np.array([[h], [0]]), np.array([[0], [h]])
    divergence = (velocity(frozen, at + step_x) - velocity(frozen, at - step_x))[0] / (2 * h)
    divergence += (velocity(frozen, at + step_y) - velocity(frozen, at - step_y))[1] / (2 * h)
    sounds, expected = flow._sounds, np.zeros(200)
    for m, n, b in zip(sounds.m, sounds.n, sounds.amplitude(5 * DT / 2)):
        expected -= b * np.pi**2 * (m**2 + n**2) * np.cos(m * np.pi * at[0]) * np.cos(n * np.pi * at[1])
    assert np.abs(expected).max() > 0.05
    np.testing.assert_allclose(divergence, expected, atol=1e-7)


def test_a_bubble_without_contrast_sheds_no_vortices() -> None:
    bubble = Bubble(0.5, 0.5, 0.2, density=1.0)
    assert bubble.atwood == 0
    assert np.all(Flow(np.random.default_rng(0), bubble, DT, STEPS).strength == 0)


def test_mesh_motion_is_of_fourth_order() -> None:
    def nodes(refine: int) -> np.ndarray:
        rng = np.random.default_rng(3)
        flow = Flow(rng, Bubble.draw(rng), 0.1 / refine, 4 * refine)
        mesh = MeshBlock(flow, 12, 0, 12, 0.1 / refine)
        for _ in range(4 * refine):
            mesh.advance()
        return mesh.nodes.copy()

    exact = nodes(16)
    coarse, fine = np.abs(nodes(1) - exact).max(), np.abs(nodes(2) - exact).max()
    assert coarse > 1e-6, "the comparison needs an error to speak of"
    assert coarse / fine > 8


def test_blocks_of_rows_equal_the_whole_mesh() -> None:
    flow, r = make_flow(), 37
    whole = MeshBlock(flow, r, 0, r, DT)
    parts = [MeshBlock(flow, r, a, b, DT) for a, b in ((0, 10), (10, 11), (11, 37))]
    for _ in range(5):
        for mesh in (whole, *parts):
            mesh.advance()
    expected = np.empty((r, r, 18), np.float32)
    whole.channels(expected)
    got = np.empty_like(expected)
    for mesh, (a, b) in zip(parts, ((0, 10), (10, 11), (11, 37))):
        mesh.channels(got[a:b])
    np.testing.assert_array_equal(got, expected)


def test_mass_is_conserved_and_pressure_follows_the_gamma_law() -> None:
    flow, r = make_flow(), 24
    mesh = MeshBlock(flow, r, 0, r, DT)
    state = np.empty((r, r, 18), np.float32)
    mesh.channels(state)
    assert np.all(state[..., 1] == 1)  # at rest: pressure equilibrium
    mass = state[..., 0] * state[..., CHANNELS.index("volume")]
    for _ in range(6):
        mesh.advance()
    mesh.channels(state)
    density, pressure, _, fraction = np.moveaxis(state[..., :4], -1, 0)
    volume = state[..., CHANNELS.index("volume")]
    assert np.abs(volume * r * r - 1).max() > 0.02, "the flow must compress"
    np.testing.assert_allclose(density * volume, mass, rtol=1e-5)
    outside = fraction == 0
    np.testing.assert_allclose(pressure[outside], density[outside] ** 1.4, rtol=1e-5)


def test_bubble_fractions() -> None:
    bubble = Bubble(0.45, 0.55, 0.2, density=4.0)
    fraction = bubble_fractions(bubble, 40, 0, 40)
    assert fraction.sum() / 1600 == pytest.approx(np.pi * 0.2**2, rel=2e-3)
    assert fraction[22, 18] == 1 and fraction[0, 0] == 0
    assert np.any((fraction > 0) & (fraction < 1))
    np.testing.assert_array_equal(bubble_fractions(bubble, 40, 13, 20), fraction[13:20])


def test_average_velocity_is_the_mean_of_the_corners() -> None:
    flow, r = make_flow(), 6
    mesh = MeshBlock(flow, r, 0, r, DT)
    mesh.advance()
    state = np.empty((r, r, 18), np.float32)
    mesh.channels(state)
    corners = mesh.nodes[2:4, 3:5].reshape(4, 2).T.copy()
    expected = velocity(flow.freeze(2), corners)[0].mean()
    assert state[2, 3, 2] == pytest.approx(expected, rel=1e-6)


def test_channels_are_those_of_the_papers() -> None:
    assert ", ".join(CHANNELS) == (
        "Density, Pressure, VectorComp_AvgVelocity_R, VolumeFractions_bubble, aspectRatio, conditionNumber, "
        "distortion, jacobian, largestAngle, oddy, scaledJacobian, shape, shear, skew, smallestAngle, stretch, taper, "
        "volume"
    )
    assert len(UNITS) == 18


VTK_NAMES = {
    "aspectRatio": "QuadAspectRatio",
    "conditionNumber": "QuadCondition",
    "distortion": "QuadDistortion",
    "jacobian": "QuadJacobian",
    "largestAngle": "QuadMaxAngle",
    "oddy": "QuadOddy",
    "scaledJacobian": "QuadScaledJacobian",
    "shape": "QuadShape",
    "shear": "QuadShear",
    "skew": "QuadSkew",
    "smallestAngle": "QuadMinAngle",
    "stretch": "QuadStretch",
    "taper": "QuadTaper",
    "volume": "QuadArea",
}

SPECIAL = {
    "square": [(0, 0), (1, 0), (1, 1), (0, 1)],
    "clockwise": [(0, 0), (0, 1), (1, 1), (1, 0)],
    "nodes 2 and 3 coincide": [(0, 0), (1, 0), (0.3, 1), (0.3, 1)],
    "clockwise, nodes 2 and 3 coincide": [(0, 0), (0.3, 1), (1, 0), (1, 0)],
    "nodes 0 and 1 coincide": [(0, 0), (0, 0), (1, 1), (0, 1)],
    "bow tie": [(0, 0), (1, 0), (0, 1), (1, 1)],
    "uneven bow tie": [(0, 0), (1, 0), (0, 1), (1.5, 1)],
    "line": [(0, 0), (1, 0), (2, 0), (3, 0)],
    "straight corner": [(0, 0), (1, 0), (2, 0), (0, 1)],
    "concave": [(0, 0), (1, 0), (0.2, 0.2), (0, 1)],
    "flat": [(0, 0), (1, 0), (1, 1e-9), (0, 1e-9)],
    "flatter": [(0, 0), (1, 0), (1, 1e-13), (0, 1e-13)],
    "tiny": [(0, 0), (1e-9, 0), (1e-9, 1e-9), (0, 1e-9)],
    "needle": [(0, 0), (1, 0), (1 + 1e-7, 1e-6), (0.5, 1e-6)],
}


def as_mesh(corners: np.ndarray) -> np.ndarray:
    """Return nodes (2, 2, 2) of the one-cell mesh with these corners in Verdict's order."""
    return np.array([[corners[0], corners[1]], [corners[3], corners[2]]], dtype=np.float64)


def metrics_of(corners) -> dict[str, float]:
    return {name: float(v[0, 0]) for name, v in quad_metrics(as_mesh(np.asarray(corners, float))).items()}


def random_quads(count: int = 300) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    square = np.array(SPECIAL["square"], float)
    quads = []
    for k in range(count):
        jitter = (0.15, 0.6, 1.5)[k % 3]  # convex, concave, tangled
        size = 10.0 ** rng.uniform(-4, 3)
        quads.append((square + rng.normal(0, jitter, (4, 2))) * size)
    return quads


def test_square_has_perfect_quality() -> None:
    got = metrics_of(SPECIAL["square"])
    ideal = dict.fromkeys(METRICS, 1.0) | {"oddy": 0, "skew": 0, "taper": 0}
    ideal |= {"largestAngle": 90, "smallestAngle": 90}
    assert got == pytest.approx(ideal, abs=1e-14)


def test_rectangle_two_by_one() -> None:
    got = metrics_of([(0, 0), (2, 0), (2, 1), (0, 1)])
    assert got["aspectRatio"] == pytest.approx(2 * 6 / (4 * 2))
    assert got["conditionNumber"] == pytest.approx((4 + 1) / (2 * 2))
    assert got["oddy"] == pytest.approx((4 - 1) ** 2 / (2 * 4))
    assert got["shape"] == pytest.approx(2 * 2 / 5)
    assert got["stretch"] == pytest.approx(math.sqrt(2 / 5))
    assert got["scaledJacobian"] == pytest.approx(1)


def test_rhombus_of_sixty_degrees() -> None:
    high = math.sqrt(3) / 2
    got = metrics_of([(0, 0), (1, 0), (1.5, high), (0.5, high)])
    assert got["scaledJacobian"] == pytest.approx(high)
    assert got["smallestAngle"] == pytest.approx(60)
    assert got["largestAngle"] == pytest.approx(120)
    assert got["skew"] == pytest.approx(0.5)
    assert got["conditionNumber"] == pytest.approx(1 / high)
    assert got["oddy"] == pytest.approx(4 * 0.25 / (2 * 0.75))
    assert got["taper"] == pytest.approx(0, abs=1e-15)


def test_trapezoid_taper_and_distortion() -> None:
    # Bottom 3, top 1, height 1: axes (4, 0) and (0, 2), cross derivative (-2, 0).
    got = metrics_of([(0, 0), (3, 0), (2, 1), (1, 1)])
    assert got["taper"] == pytest.approx(2 / 2)
    assert got["volume"] == pytest.approx(2)
    # Corner Jacobians 3, 3, 1, 1, divided by 4; the smallest times 4 over the area.
    assert got["distortion"] == pytest.approx(1 / 4 * 4 / 2)


def test_concave_cell_has_negative_jacobian() -> None:
    got = metrics_of(SPECIAL["concave"])
    assert got["jacobian"] == pytest.approx(-0.6)
    assert got["shear"] == got["shape"] == 0
    assert got["conditionNumber"] == HUGE
    assert got["largestAngle"] > 180


def test_normal_up_reveals_an_inverted_cell() -> None:
    mesh = as_mesh(np.array(SPECIAL["clockwise"], float))
    assert scaled_jacobian(Quads(mesh))[0, 0] == pytest.approx(1)
    assert scaled_jacobian(Quads(mesh, normal="up"))[0, 0] == pytest.approx(-1)


def test_a_point_stays_finite() -> None:
    got = metrics_of([(1, 1)] * 4)
    assert got["aspectRatio"] == -HUGE and got["distortion"] == 0
    for corners in ([(1, 1)] * 4, [(0, 0)] + [(1, 1)] * 3, [(1, 1)] * 3 + [(0, 0)]):
        assert all(math.isfinite(v) for v in metrics_of(corners).values())


def test_a_mesh_equals_its_cells_one_by_one() -> None:
    rng = np.random.default_rng(0)
    nodes = np.stack(np.meshgrid(np.arange(6.0), np.arange(5.0)), axis=-1) + rng.normal(0, 0.4, (5, 6, 2))
    whole = quad_metrics(nodes)
    for i in range(4):
        for j in range(5):
            one = quad_metrics(nodes[i : i + 2, j : j + 2])
            for name in METRICS:
                assert whole[name][i, j] == pytest.approx(one[name][0, 0], rel=1e-14), name


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"expected nodes of shape .* got \(3, 3\)"):
        quad_metrics(np.zeros((3, 3)))
    with pytest.raises(ValueError, match=r"expected metrics out of .*got \['warpage'\]"):
        quad_metrics(np.zeros((2, 2, 2)), ["warpage"])
    with pytest.raises(ValueError, match="expected normal 'center' or 'up', got 'down'"):
        Quads(np.zeros((2, 2, 2)), normal="down")  # type: ignore[arg-type]


def vtk_metrics(corners: np.ndarray) -> dict[str, float]:
    reason = "needs vtk as independent implementation: pip install 'halograd[oracle]'"
    common = pytest.importorskip("vtkmodules.vtkCommonDataModel", reason=reason)
    quality = pytest.importorskip("vtkmodules.vtkFiltersVerdict", reason=reason).vtkMeshQuality
    cell = common.vtkQuad()
    for k, (x, y) in enumerate(corners):
        cell.GetPoints().SetPoint(k, x, y, 0.0)
    return {name: getattr(quality, vtk)(cell) for name, vtk in VTK_NAMES.items()}


def assert_like_vtk(corners) -> None:
    """Check equality within 64 eps times the amplification of the formulas: position / edge, edge^2 / Jacobian."""
    corners = np.asarray(corners, dtype=np.float64)
    got, expected = metrics_of(corners), vtk_metrics(corners)
    edge = max(np.hypot(*(corners[k] - corners[k - 1])) for k in range(4))
    least = min(abs(np.linalg.det([corners[k] - corners[k - 1], corners[(k + 1) % 4] - corners[k]])) for k in range(4))
    eps = 64 * np.finfo(float).eps * max(1.0, np.abs(corners).max() / edge)
    for name in METRICS:
        amplified = edge**2 / max(least, 1e-300) if abs(expected[name]) < HUGE else 1.0
        # Verdict's Oddy subtracts g12^2 from g11 g22: it loses the square.
        relative = eps * (amplified**2 if name == "oddy" else amplified)
        absolute = eps * (edge**2 if name in ("jacobian", "volume") else 1.0)
        if name.endswith("Angle"):
            absolute = 1e-5  # the arc cosine has a vertical slope at straight angles
        assert got[name] == pytest.approx(expected[name], rel=relative, abs=absolute), (name, corners)


def test_random_cells_like_vtk() -> None:
    kinds = set()
    for corners in random_quads():
        assert_like_vtk(corners)
        kinds.add(np.sign(metrics_of(corners)["jacobian"]))
    assert kinds == {-1.0, 1.0}, "the draw must hold convex and tangled cells"


@pytest.mark.parametrize("name", SPECIAL)
def test_special_cells_like_vtk(name: str) -> None:
    assert_like_vtk(SPECIAL[name])
