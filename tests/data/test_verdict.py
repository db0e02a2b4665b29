"""Quad metrics: values known by hand, and VTK's Verdict cell by cell."""

from __future__ import annotations

import math

import numpy as np
import pytest

from halograd.data.verdict import HUGE, METRICS, Quads, quad_metrics, scaled_jacobian

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
