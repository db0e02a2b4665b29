"""Test of damaged checkpoints: a run uses the previous one. `damage.py` tries more cases."""

from tests.training.damage import GOOD, campaign


def test_no_damage_is_accepted():
    """No damaged checkpoint is accepted; a child process executes the cases, so that a hang or a crash is detected."""
    counted = campaign(300)
    assert set(counted) <= GOOD and counted["detected"] > 250 and counted.total() == 300, counted
