"""Strategies: plain data that is saved, compared, and refused where it cannot be meant."""

import pytest

from halograd.errors import UserError
from halograd.layers.strategy import AXES, Strategy, layout_of
from halograd.models import mesh

NETWORK = mesh(resolution=16, channels=2, widths=(4,), convs=1)


def test_saved_and_loaded_strategies_are_equal(tmp_path):
    strategy = Strategy({"sample": 2, "height": 2}, {"conv1_1": {"width": 4, "halo": "pad"}}, {"halo": "overlap"}, 1000)
    strategy.save(tmp_path / "s.json")
    assert Strategy.load(tmp_path / "s.json") == strategy
    assert strategy.parts_of("conv1_1") == {**dict.fromkeys(AXES, 1), "width": 4}
    assert strategy.options_of("conv1_1") == {"halo": "pad"} and strategy.options_of("predict") == {"halo": "overlap"}


def test_arrays_without_space_are_spread_over_all_ranks():
    layout = layout_of((6, 10), {"sample": 2, "height": 2}, 4)
    assert [b.shape[0] for b in layout.boxes] == [2, 2, 1, 1]
    assert [b.shape[0] for b in layout_of((2, 10), {"sample": 2, "height": 2}, 4).boxes] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("strategy", "size", "message"),
    [
        (Strategy({"height": 2}), 3, "needs 2 ranks, the run has 3; start 2 ranks or choose parts"),
        (Strategy({}, {"conv9": {"height": 1}}), 1, "layer 'conv9' is not in network 'mesh'.*another network"),
        (Strategy({"hight": 2}), 1, "parts: unknown key 'hight'; known are sample, depth, .*, input_channel, halo"),
        (Strategy({"height": 0}), 1, "parts.height: expected a whole number >= 1, got 0"),
        (Strategy({}, options={"halo": "fast"}), 1, "options.halo: expected one of .*, got 'fast'"),
        (Strategy({}, {"conv1_1": {"height": 2}}), 1, "2 height of layer 'conv1_1' needs 2 ranks, the run has 1"),
    ],
)
def test_what_is_refused(strategy, size, message):
    with pytest.raises(UserError, match=message):
        strategy.validate(NETWORK, size)


def test_more_parts_than_rows_are_refused_for_samples():
    with pytest.raises(UserError, match="32 parts along 'height', but input 'x' has an extent of 16"):
        Strategy({"height": 32}).refuse_empty_blocks(NETWORK)
    with pytest.raises(UserError, match="'depth' is cut, but input 'x' has only the axes"):
        Strategy({"depth": 2}).refuse_empty_blocks(NETWORK)


def test_a_file_that_is_no_strategy_is_refused(tmp_path):
    (tmp_path / "s.json").write_text('{"parts": {"height": 2}, "colour": 1}')
    with pytest.raises(UserError, match=r"s.json: cannot be read .*colour"):
        Strategy.load(tmp_path / "s.json")
