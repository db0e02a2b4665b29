"""Tests of damaged checkpoints: a run takes the one before. See `damage.py` for more cases."""

from tests.training.damage import GOOD, campaign


def test_no_damage_is_accepted():
    """A child process executes the cases, so that a hang or a crash fails this test."""
    counted = campaign(300)
    assert set(counted) <= GOOD and counted["detected"] > 250 and counted.total() == 300, counted
