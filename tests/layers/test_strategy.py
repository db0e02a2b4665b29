"""Tests of strategies: plain data that is saved and compared; invalid strategies are rejected."""

import re

import pytest

from halograd.errors import UserError
from halograd.layers import BatchNorm, Conv, Dense, Flatten, GlobalAveragePool, GroupNorm, Input, Network, Softmax
from halograd.layers.strategy import AXES, PartsTable, Strategy, _warn_once, layout_of
from halograd.models import mesh
from halograd.testing import check_layer
from tests.support.refusals import refusals

NETWORK = mesh(resolution=16, channels=2, widths=(4,), convs=1)


def test_saved_and_loaded_strategies_are_equal(tmp_path):
    strategy = Strategy({"sample": 2, "height": 2}, {"conv1_1": {"width": 4, "halo": "pad"}}, {"halo": "overlap"}, 1000)
    strategy.save(tmp_path / "s.json")
    assert Strategy.load(tmp_path / "s.json") == strategy
    uneven = Strategy({"height": [3, 1]}, {"conv1_1": {"width": [1, 2]}})
    uneven.save(tmp_path / "u.json")
    assert Strategy.load(tmp_path / "u.json") == uneven == Strategy({"height": (3, 1)}, {"conv1_1": {"width": (1, 2)}})
    assert strategy.parts_of("conv1_1") == {**dict.fromkeys(AXES, 1), "width": 4}
    assert strategy.options_of("conv1_1") == {"halo": "pad"} and strategy.options_of("predict") == {"halo": "overlap"}


def test_arrays_without_space_are_spread_over_all_ranks():
    layout = layout_of((6, 10), {"sample": 2, "height": 2}, 4)
    assert [b.shape[0] for b in layout.boxes] == [2, 2, 1, 1]
    assert [b.shape[0] for b in layout_of((2, 10), {"sample": 2, "height": 2}, 4).boxes] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("strategy", "size", "message"),
    [
        (Strategy({"height": 2}), 3, "needs 2 ranks, the run has 3; start 2 ranks.* or choose parts"),
        (Strategy({}, {"conv9": {"height": 1}}), 1, "layer 'conv9' is not in network 'mesh'.*another network"),
        (
            Strategy({"hight": 2}),
            1,
            "parts.hight: unknown key; expected one of sample, .*, input_channel; did you mean height",
        ),
        (Strategy({"height": 0}), 1, "strategy: parts.height: expected a whole number >= 1 or a list, got 0"),
        (Strategy({}, options={"halo": "fast"}), 1, "options.halo: expected one of .*, got 'fast'"),
        (Strategy({}, {"conv1_1": {"height": 2}}), 1, "2 height of layer 'conv1_1' needs 2 ranks, the run has 1"),
    ],
)
def test_what_is_refused(strategy, size, message):
    with pytest.raises(UserError, match=message):
        strategy.validate(NETWORK, size)


def small():
    y = BatchNorm(name="norm")(Conv(6, 3, name="conv")(Input((8, 8, 4), "x")))
    y = GroupNorm(2, name="group")(Conv(6, 3, groups=2, name="grouped")(y))
    y = Dense(3, name="dense")(Flatten(name="flat")(y))
    return Network(Softmax(name="softmax")(y))


test_cuts_of_channels_that_are_refused = refusals(
    ({"norm": {"input_channel": 4}}, r"'norm' .BatchNorm. cannot be cut along 'input_channel'"),
    ({"group": {"channel": 4}}, r"'group' \(GroupNorm\) cannot be cut along 'channel'"),
    ({"grouped": {"channel": 4}}, r"'grouped' \(Conv\) cannot be cut along 'channel'"),
    ({"flat": {"channel": 4}}, r"'flat' \(Flatten\) cannot be cut along 'channel'"),
    ({"softmax": {"channel": 4}}, r"'softmax' \(Softmax\) cannot be cut along 'channel'"),
    ({"dense": {"channel": 4}}, "layer 'dense': 4 blocks of 3 channels"),
    ({"dense": {"channel": 2, "input_channel": 2}}, "layer 'dense': 4 blocks of 3 channels"),
    ({"conv": {"channel": 2, "input_channel": 3}}, "2 channel x 3 input_channel of layer 'conv' needs 6 ranks"),
    ({"conv": {"input_channel": 4, "channel": 0}}, "conv.channel: expected a whole number >= 1, got 0"),
    ({"conv": {"height": 8}}, "8 height of layer 'conv' needs 8 ranks, the run has 4"),
    call=lambda layers: Strategy({"sample": 4}, layers).validate(small(), 4),
    error=UserError,
)


def test_more_parts_of_the_sum_than_channels_are_refused():
    with pytest.raises(UserError, match="layer 'conv': 6 parts of 4 input channels"):
        Strategy({"sample": 6}, {"conv": {"input_channel": 6}}).validate(small(), 6)


def test_cuts_of_channels_and_fewer_ranks_that_are_allowed():
    layers = {
        "conv": {"height": 2, "channel": 2, "input_channel": 2},
        "norm": {"channel": 6},
        "group": {"sample": 3},
        "dense": {"input_channel": 3},
        "softmax": {"sample": 1},
    }
    strategy = Strategy({"sample": 4, "height": 2}, layers)
    strategy.validate(small(), 8)
    assert strategy.ranks == 8
    assert Strategy({"sample": 2}, {"conv": {"channel": 3}}).ranks == 3, "the layer that needs the most"


def test_layouts_of_cut_channels():
    parts = {"height": 2, "channel": 2, "input_channel": 2}
    image = layout_of((1, 4, 5, 6), parts, 9)
    assert [box.ranges[-1] for box in image.boxes[:4]] == [(0, 2), (2, 4), (4, 5), (5, 6)]
    assert [box.ranges[1] for box in image.boxes[:8]] == [(0, 2)] * 4 + [(2, 4)] * 4 and not image.boxes[8].size
    vector = layout_of((3, 6), parts, 9)
    assert [box.ranges[0] for box in vector.boxes[:8]] == [(0, 2)] * 4 + [(2, 3)] * 4
    assert [box.ranges[1] for box in vector.boxes[:4]] == [box.ranges[-1] for box in image.boxes[:4]]


def test_parts_along_axes_that_an_array_lacks_cut_its_first_axis():
    """Tokens, and volumes with fewer axes, have one block per rank, in the row-major order of the ranks."""
    tokens = layout_of((2, 10, 3), {"sample": 2, "height": 2, "width": 2}, 8).boxes
    assert [box.ranges[1] for box in tokens] == [(0, 3), (3, 6), (6, 8), (8, 10)] * 2
    assert [box.ranges[0] for box in tokens[3:5]] == [(0, 1), (1, 2)]
    images = layout_of((1, 9, 4, 3), {"depth": 2, "height": 2, "width": 2}, 8).boxes
    assert [box.ranges[1:3] for box in images[:3]] == [((0, 3), (0, 2)), ((0, 3), (2, 4)), ((3, 5), (0, 2))]
    uneven = layout_of((1, 12, 3), {"height": (2, 1), "width": (3, 1)}, 4).boxes
    assert [box.ranges[1] for box in uneven] == [(0, 6), (6, 8), (8, 11), (11, 12)], "shares 6, 2, 3, 1"
    mixed = layout_of((1, 12, 3), {"height": 2, "width": (2, 1)}, 4).boxes
    assert [box.ranges[1] for box in mixed] == [(0, 4), (4, 6), (6, 10), (10, 12)], "shares 2, 1, 2, 1"
    assert layout_of((2, 8, 3), {"height": 2, "width": 2}, 4) == layout_of((2, 8, 3), {"width": 4}, 4)


def mixed():
    """Return a network of an image and of tokens."""
    x, t = Input((6, 5, 2), "x"), Input((9, 2), "t")
    image = GlobalAveragePool(name="pool_x")(Conv(3, 3, padding=1, name="image")(x))
    tokens = GlobalAveragePool(name="pool_t")(Conv(3, 3, padding=1, name="tokens")(t))
    return Network(Dense(2, name="dense")(image + tokens))


def test_layers_with_fewer_axes_have_the_cuts_of_the_others():
    Strategy({"height": 2, "width": 2}).validate(mixed(), 4)
    Strategy({"sample": 4}, {"tokens": {"height": 4}}).validate(mixed(), 4)
    with pytest.raises(UserError, match=r"'image' \(Conv\) cannot be cut along 'depth'"):
        Strategy({"depth": 2}).validate(mixed(), 2)
    Strategy({"height": 3, "width": 3}).refuse_empty_blocks(mixed())
    with pytest.raises(UserError, match="10 parts along 'height x width', but input 't' has an extent of 9"):
        Strategy({"height": 5, "width": 2}).refuse_empty_blocks(mixed())


@pytest.mark.many_ranks
def test_exact_with_layers_of_different_numbers_of_axes():
    def joined():
        pooled = GlobalAveragePool(name="pool_x"), GlobalAveragePool(name="pool_t")
        made = Conv(3, 3, padding=1, name="image"), BatchNorm(name="norm"), Conv(3, 3, padding=1, name="tokens")
        return lambda x, t: pooled[0](made[1](made[0](x))) + pooled[1](made[2](t))

    check_layer(joined, ((6, 5, 2), (9, 2)), axes=("sample", "height", "width"), gradient=False)


def test_parts_may_have_shares():
    strategy = Strategy({"sample": 2, "height": [2, 1, 1]}, {"conv1_1": {"width": [1, 1]}})
    assert strategy.parts_of("") == {**dict.fromkeys(AXES, 1), "sample": 2, "height": 3} and strategy.ranks == 6
    assert strategy.cuts_of("conv1_1")["width"] == 2, "equal shares are an even cut"
    layout = layout_of((3, 16, 4, 2), strategy.cuts_of(""), 6)
    assert [box.ranges[1] for box in layout.boxes[:3]] == [(0, 8), (8, 12), (12, 16)]
    assert [box.ranges[0] for box in layout.boxes[::3]] == [(0, 2), (2, 3)]
    vectors = layout_of((12, 5), strategy.cuts_of(""), 6)
    assert {box.shape for box in vectors.boxes} == {(2, 5)}, "vectors are spread evenly"
    with pytest.raises(UserError, match=r"2 sample x 2:1:1 height needs 6 ranks, the run has 4"):
        strategy.validate(NETWORK, 4)
    with pytest.raises(UserError, match=r"shares \[40, 1\] along 'height' leave a part of input 'x', which has an ext"):
        Strategy({"height": [40, 1]}).refuse_empty_blocks(NETWORK)
    for given in ([2, 0], [], [1.5, 1], "2"):
        with pytest.raises(UserError, match=r"parts.height.*: expected"):
            Strategy({"height": given}).validate(NETWORK, 2)
    with pytest.raises(UserError, match=r"parts.channel: expected a whole number"):
        Strategy({"channel": [2, 1]}).validate(NETWORK, 2)


def test_the_command_is_given_to_a_process_without_a_launcher(monkeypatch):
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=r"needs 4 ranks, the run has 1"):
        Strategy({"height": 4}).validate(NETWORK, 1)
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(UserError, match="needs 4 ranks, the run has 2"):
        Strategy({"height": 4}).validate(NETWORK, 2)


def test_more_parts_than_rows_are_refused_for_samples():
    with pytest.raises(UserError, match="32 parts along 'height', but input 'x' has an extent of 16"):
        Strategy({"height": 32}).refuse_empty_blocks(NETWORK)


def chain(*shape):
    """Return a network of a convolution, if the shape has spatial axes, and a dense layer."""
    x = Input(shape, "x")
    y = Conv(4, 3, padding=1, name="conv")(x) if len(shape) > 1 else x
    y = GlobalAveragePool(name="pool")(y) if len(shape) > 1 else y
    return Network(Dense(4, name="dense")(y))


@pytest.mark.parametrize(
    ("shape", "axis", "message"),
    [
        ((9, 2), "height", r"layer 'conv' \(Conv\) cannot be cut along 'height'; use sample or width or channel or "),
        ((9, 2), "depth", "cannot be cut along 'depth'; use sample or width or"),
        ((9, 8, 2), "depth", "cannot be cut along 'depth'; use sample or height or width or channel or input_channel$"),
        ((2,), "height", r"layer 'dense' \(Dense\) cannot be cut along 'height'; use sample or channel or input_ch"),
    ],
)
def test_axes_that_a_network_lacks_are_refused(shape, axis, message):
    """A cut along an axis that a network lacks is an error, because ranks would be idle or repeat work."""
    network = chain(*shape)
    first = next(iter(network.layers))
    for strategy in (Strategy({axis: 4}), Strategy({"sample": 4}, {first: {axis: 4}})):
        with pytest.raises(UserError, match=message):
            strategy.validate(network, 4)


def test_vectors_are_cut_by_the_axes_of_the_layers_before_them():
    Strategy({"height": 2, "width": 2}).validate(chain(9, 8, 2), 4)
    Strategy({"width": 4}, {"dense": {"width": 4}}).validate(chain(9, 2), 4)
    Strategy({"depth": 4}).validate(chain(9, 8, 7, 2), 4)


@pytest.mark.parametrize(
    ("strategy", "batch", "size", "ranks"),
    [
        (Strategy({"sample": 4}), 2, 4, "2 of 4 ranks .rank 2, 3. .* a batch of 2 .4 sample."),
        (Strategy({"sample": 8}), 1, 8, "7 of 8 ranks .rank 1, 2, 3, 4, ...."),
        (Strategy({"height": 20}), 1, 20, "12 of 20 ranks .rank 8, 9, 10, 11, .... .* .20 height."),
        (Strategy({}, {n: {"width": 2} for n in NETWORK.layers}), 1, 3, None),
        (Strategy({"sample": 4}, {"predict": {"height": 4}}), 2, 4, None),
        (Strategy({"height": 8}), 1, 8, None),
        (Strategy({"sample": 2, "height": 2}), 2, 4, None),
    ],
)
def test_ranks_that_are_idle_are_named_once(strategy, batch, size, ranks, caplog):
    _warn_once.cache_clear()
    strategy.validate(NETWORK, size)
    for _ in range(2):
        strategy.warn_of_idle_ranks(NETWORK, batch, size)
    if ranks is None:
        assert not caplog.records
    else:
        (record,) = caplog.records
        assert re.search(f"^strategy: {ranks}", record.getMessage()), record.getMessage()
        assert record.levelname == "WARNING"


@pytest.mark.parametrize("own", [{"halo": "pad"}, {"wide": True}, {"recompute": "block"}])
def test_options_of_one_layer_make_no_plan(own, caplog):
    """Options of single layers do not permit idle ranks, as their parts do."""
    strategy = Strategy(layers={"conv1_1": own})
    with pytest.raises(UserError, match="no cut needs 1 ranks, the run has 4"):
        strategy.validate(NETWORK, 4)
    _warn_once.cache_clear()
    strategy.warn_of_idle_ranks(NETWORK, 1, 4)
    assert "3 of 4 ranks" in caplog.text


def test_layers_behind_a_trunk_may_leave_ranks_idle(caplog):
    """Layers after a cut trunk may leave ranks idle without a warning."""
    Strategy({"height": 4}).warn_of_idle_ranks(small(), 1, 4)
    assert not caplog.records


def test_tables_have_the_axes():
    assert tuple(PartsTable.model_fields) == AXES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"bucket_bytes": "4096"}', "bucket_bytes: expected a whole number, got '4096'"),
        ('{"bucket_bytes": 0}', "bucket_bytes: expected a whole number >= 1, got 0"),
        ('{"options": "pad"}', "options: expected a table, got 'pad'"),
        ('{"options": {"halo": ["pad"]}}', r"options.halo: expected one of 'auto', 'pad' or 'overlap', got \['pad'\]"),
        ('{"parts": {"height": true}}', "parts.height: expected a whole number or a list, got true"),
        ('{"parts": {"height": 2147483648}}', "expected a whole number <= 2147483647 or a list, got 2147483648"),
        ('{"layers": {"conv": 2}}', "layers.conv: expected a table, got 2"),
        ('{"layers": {"conv": {"hieght": 2}}}', "layers.conv.hieght: unknown key; .*; did you mean height"),
        ('{"parts": {}, "parts": {"height": 2}}', "expected every key once, got 'parts' twice"),
        ('{"layers": ' * 5000, "tables or lists within one another more than 32 deep"),
        ('{"bucket_bytes": 1%s}' % ("0" * 5000), "expected whole numbers of at most 64 bits, got one of 5001 digits"),
        ("[]", r"expected a table, got \[\]"),
    ],
    ids=lambda text: text[:40],
)
def test_files_that_are_refused(tmp_path, text, message):
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(UserError, match=rf"strategy \S*s.json: .*{message}") as found:
        Strategy.load(tmp_path / "s.json")
    assert "\n" not in str(found.value)


def test_a_file_that_is_no_strategy_is_refused(tmp_path):
    (tmp_path / "s.json").write_text('{"parts": {"height": 2}, "colour": 1}')
    with pytest.raises(
        UserError, match=r"s.json: colour: unknown key"
    ):
        Strategy.load(tmp_path / "s.json")
