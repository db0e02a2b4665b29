"""Tests of channels that are padded in memory: the rule, and the detection from an array."""

import numpy as np
import pytest

from halograd.kernels.geometry import channels_in_memory


@pytest.mark.parametrize("spatial", [(5,), (5, 4), (1, 4), (4, 1), (1, 1), (3, 1, 2)], ids=str)
@pytest.mark.parametrize("samples", [1, 3])
def test_channels_of_any_extents(samples, spatial):
    """Padded channels are detected for any extents; strides of axes with extent 1 are ignored."""
    whole = np.zeros((samples, *spatial, 24), np.float32)
    alone = samples == np.prod(spatial) == 1
    assert channels_in_memory(whole) == 24
    assert channels_in_memory(whole[..., :18]) == (18 if alone else 24)
    assert channels_in_memory(whole[..., :1]) == (1 if alone else 24)
    if spatial[0] > 1:
        assert channels_in_memory(whole[:, 1:, ..., :18]) == (
            None if samples > 1 else 24 if whole[0, 1:].size > 24 else 18
        )


def test_arrays_that_are_neither():
    a = np.zeros((2, 6, 5, 24), np.float32)
    for view in (a[..., ::2], a[:, ::2], a[:, :, ::2, :18], a.transpose(0, 2, 1, 3), a[::-1]):
        assert channels_in_memory(view) is None
