"""Tests of transposed convolution: adjoint of the convolution, rejected settings."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from halograd.dtensor import Box
from halograd.layers import ConvTranspose, Input
from halograd.testing import check_layer
from tests.layers.cases import TRANSPOSED, transposed
from tests.layers.geometries import brute_force_taps
from tests.support.refusals import refusals


@st.composite
def drawn(draw):
    columns = []
    for _ in range(2):
        kernel, stride, dilation = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
        pads = (draw(st.integers(0, 3)), draw(st.integers(0, 3)))
        more = draw(st.integers(0, max(stride, dilation) - 1))
        columns.append((draw(st.integers(6, 9)), kernel, stride, pads, more, dilation))
    return tuple(zip(*columns))


def output_shape(layer, shape):
    try:
        return layer.output_shape(shape)
    except ValueError:
        return None


@pytest.mark.mpi
@settings(max_examples=10)
@given(geometry=drawn())
def test_exact_on_drawn_geometries(geometry):
    spatial, *rest = geometry
    assume(output_shape(transposed(rest)(), (*spatial, 2)) is not None)
    check_layer(transposed(rest), (*spatial, 2), gradient=False, batch=1)


@pytest.mark.parametrize("name", TRANSPOSED)
def test_input_boxes_hold_every_input_that_reaches_an_output(name):
    spatial, *geometry = TRANSPOSED[name]
    layer = transposed(geometry)()
    shape = (*spatial, 2)
    out = layer.output_shape(shape)
    for axis, (w, n, m) in enumerate(zip(layer.windows(shape), spatial, out)):
        for a in range(m):
            for b in range(a + 1, m + 1):
                box = Box.of_shape((1, *out)).replace(axis + 1, a, b)
                start, stop = layer.input_boxes(box, shape)[0].ranges[axis + 1]
                taps = {i: brute_force_taps(w.kernel, w.stride, w.pad_lo, w.dilation, i) for i in range(n)}
                reaching = [i for i, reached in taps.items() if any(a <= o < b for o in reached)]
                assert not reaching or (start <= reaching[0] and reaching[-1] < stop)
                assert 0 <= start <= stop <= n


@settings(max_examples=300)
@given(st.data())
def test_a_block_of_any_outputs_can_be_timed(data):
    """The work of a block of any extents can be timed, also of one that the padding would leave empty."""
    kernel, stride, dilation = (
        data.draw(st.tuples(n, n)) for n in (st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
    )
    padding = data.draw(st.one_of(st.just("same"), st.tuples(*[st.tuples(st.integers(0, 3), st.integers(0, 3))] * 2)))
    more = [0 if padding == "same" else data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation)]
    layer = ConvTranspose(3, kernel, stride, padding, more, dilation)
    block = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    own = [(n - 1) * w.stride + w.extent - w.pad_lo - w.pad_hi for n, w in zip(block, layer.windows((*block, 2)))]
    wanted = tuple(max(1, m if data.draw(st.booleans()) else data.draw(st.integers(1, 12))) for m in own)
    local, shape = layer.of_outputs((*block, 2), wanted)
    assert local.output_shape(shape) == (*wanted, 3) and shape[-1] == 2
    assert all(n == m for n, m, have, want in zip(shape, block, own, wanted) if have == want)
    assert (local is layer) == (tuple(own) == wanted)


def test_shapes_parameters_and_flops():
    layer = ConvTranspose(6, 3, 2, 1, output_padding=1, groups=2)
    assert layer.output_shape((5, 4, 8)) == (10, 8, 6)
    assert ConvTranspose(6, 4, 3, "same").output_shape((5, 4, 8)) == (15, 12, 6)
    params = layer.parameters((5, 4, 8))
    assert params["w"].shape == (8, 3, 3, 3) and params["b"].shape == (6,)
    assert layer.flops((5, 4, 8)) == 2 * (8 * 9 * 3) * 20


test_errors_name_what_is_wrong = refusals(
    (lambda: ConvTranspose(4, 3, groups=3), r"filters \(4\) must be a positive multiple of groups \(3\)"),
    (lambda: ConvTranspose(4, 3, padding="full"), r"padding: expected 'same', numbers or .*'full'"),
    (lambda: ConvTranspose(4, 3, 2, output_padding=2)(Input((4, 4, 2))), r"output_padding: expected less than"),
    (lambda: ConvTranspose(4, 3, 2, "same", 1)(Input((4, 4, 2))), r"padding 'same' determines the output size"),
    (lambda: ConvTranspose(4, 2, padding=4)(Input((4, 4, 2))), r"leaves nothing of the output"),
    (lambda: ConvTranspose(4, 2, padding=-1)(Input((4, 4, 2))), r"padding: expected numbers >= 0"),
    (lambda: ConvTranspose(4, 2, padding=(1, 1, 1))(Input((4, 4, 2))), r"padding: expected one entry for each of 2"),
    (lambda: ConvTranspose(4, 2, groups=2)(Input((4, 4, 3))), r"3 input channels are not a multiple of groups"),
)
