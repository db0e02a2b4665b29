"""The flow is confined and has its prescribed divergence, and the mesh that moves with it keeps its mass."""

from __future__ import annotations

import numpy as np
import pytest

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
