"""Tests of the comparison of memory and time with and without recomputation."""

import re

import pytest

from benchmarks import recompute
from halograd.models import build

#: Memory [%] that the rules save at full size, at least.
SAVED = {"mesh_2k": (48, 57), "resnet50": (38, 66), "unet3d": (34, 52)}


@pytest.mark.parametrize("name", SAVED)
def test_memory_at_full_size(name):
    network = build(name, resolution=recompute.FULL[name])
    sizes = recompute.arenas(network, recompute.strategies(network))
    saved = [round(100 * (1 - sizes[rule] / sizes["none"])) for rule in ("pointwise", "block")]
    assert all(found >= least for found, least in zip(saved, SAVED[name], strict=True)), saved


def test_the_rules_run_in_turn_and_print_their_rows(capsys):
    recompute.compare("unet3d", 16, steps=2, threads=1, layers=True)
    text = capsys.readouterr().out
    found = {rule: [float(number) for number in re.findall(r"-?[\d.]+", text.split(f"\n{rule} ")[1].split("\n")[0])]
             for rule in recompute.RULES}
    arena, saved, *times = zip(*found.values())
    assert arena[0] > arena[1] > arena[2] and saved[0] == 0 > saved[1] > saved[2]
    assert all(seconds > 0 for seconds in times[0]) and found["none"][4] == 0
    assert re.search(r"^pointwise +BatchNorm +14 ", text, re.M)


def test_too_little_memory_is_refused(monkeypatch):
    monkeypatch.setattr(recompute, "available_bytes", lambda: 1 << 20)
    with pytest.raises(SystemExit, match=r"unet3d: expected .* GiB of free memory, got 0.0; use a smaller --sizes"):
        recompute.compare("unet3d", 16, steps=1, threads=1, layers=False)
