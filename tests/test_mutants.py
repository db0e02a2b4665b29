"""A few mutants of every kind of file, and some that were once accepted; ``python -m tests.mutants`` tries more."""

import pytest

from tests.mutants import KINDS, campaign

MUTANTS = 60


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutant_is_used_or_refused_in_one_line(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, faults = campaign(kind, range(MUTANTS), tmp_path)
    assert not faults, "\n".join(faults)
    assert found["accepted"] and found["refused"], "expected mutants of both sorts"
