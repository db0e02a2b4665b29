"""Tests that every backend passes, run with the CUDA kernels on the CPU in four dtypes."""

import numpy as np
import pytest

from halograd.kernels import ClassTargets, FusedActivation, LossArrays, UpdateArrays
from halograd.kernels.kernel import BatchNormArrays

from ..conftest import BFLOAT16, Arrays
from ..test_attention import (  # noqa: F401
    CASES,
    run_blocks,
    run_whole,
    test_nan_reaches_the_queries_that_read_it,
)
from ..test_elementwise import (  # noqa: F401
    test_a_block_of_the_outputs,
    test_activation,
    test_activation_forward_only,
    test_activation_in_place,
    test_activation_of_large_values,
    test_add,
    test_an_infinite_element_that_is_dropped_is_zero,
    test_bias_and_its_gradient,
    test_resize,
    test_the_bits_of_a_block,
)
from ..test_losses import (  # noqa: F401
    test_a_divisor_that_is_known_when_the_kernel_runs,
    test_elementwise_losses,
    test_gradient_times_a_loss_scale,
    test_large_logits,
    test_prediction_and_target_that_are_not_packed,
    test_refused,
    test_softmax_cross_entropy,
    test_target_weight,
    test_target_weight_times_that_of_positions,
    test_targets_of_any_dtype,
    test_without_gradient_or_samples,
)
from ..test_norms import (  # noqa: F401
    test_a_residual_in_evaluation,
    test_channel_norm,
    test_channel_norm_without_gradients,
    test_forward_only,
    test_gradient_belongs_to_the_last_forward,
    test_group_norm,
    test_no_gradient_passes_where_the_relu_is_flat,
    test_on_its_statistics,
    test_statistics_of_others,
    test_training,
    test_training_of_a_rank_with_nothing,
    test_variance_of_data_far_from_zero,
    test_variance_where_a_block_is_constant,
)
from ..test_optimizers import (  # noqa: F401
    test_adam,
    test_any_length_and_address,
    test_by_rule,
    test_clip,
    test_dynamic_loss_scale,
    test_find_nonfinite,
    test_lars,
    test_nothing_is_updated_after_an_overflow,
    test_sgd,
    test_sum_of_squares,
    test_the_largest_finite_numbers_are_finite,
)
from ..test_saturation import (  # noqa: F401
    test_activation_near_saturation,
    test_activation_of_infinities,
    test_batch_norm_in_evaluation,
    test_batch_norm_in_training,
    test_losses_of_infinities,
    test_no_gradient_passes_where_an_activation_is_flat,
    test_saturated_binary_cross_entropy,
    test_saturated_softmax_cross_entropy,
    test_squared_error_of_small_differences,
)


@pytest.mark.parametrize("f", [None, FusedActivation("relu"), FusedActivation("silu")], ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 6, 16), (3, 1, 700, 3), (1, 2, 3, 40)], ids=str)
def test_local_statistics_of_many_rows(typed, shape, f, monkeypatch):
    """A norm of more rows than one block takes: chunks of rows, whose sums the block that ends last adds up."""
    monkeypatch.setattr("halograd.kernels.summed.MOST_ROWS", 0)
    launched = typed.backend.launcher.launched
    launched.clear()
    test_on_its_statistics(typed, shape, f, local=True)
    assert launched and not [name for name in launched if name.startswith("whole")]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_second_passes_over_the_rows_begin_at_the_end(cuda, direction):
    """An output 8 rows (one round of threads) behind an input: from the first row on, it would overwrite rows to read.
    """
    rows, channels, ahead = 64, 256, 8
    rng = np.random.default_rng(1)
    x, dy = rng.standard_normal((2, rows, channels), np.float32)
    memory = np.zeros((rows + ahead, channels), np.float32)
    memory[:rows] = x if direction == "forward" else dy
    found = []
    for source, target in ((memory[:rows].copy(), np.zeros_like(x)), (memory[:rows], memory[ahead:])):
        forward, vectors = direction == "forward", [np.full(channels, value, np.float32) for value in (1, 0.5, 0, 1)]
        tensors = (source, target, dy, np.zeros_like(x)) if forward else (x, np.zeros_like(x), source, target)
        sums, means = np.zeros((2, channels)), np.zeros((2, channels))
        kernels = cuda.batch_norm(BatchNormArrays(*tensors, *vectors, sums, means, 1e-3))
        (kernels.forward if forward else kernels.backward_data)()
        found.append(target.copy())
    np.testing.assert_array_equal(*found)
    assert found[0].any()


def test_targets_that_are_no_class_make_the_loss_nan(cuda, arrays):
    """A target that is no class makes the loss of this run NaN, because a kernel on a device cannot raise an error."""
    x, loss, dx = arrays.draw(5, 3), np.zeros(1), arrays.poisoned(5, 3)
    target = np.array([[0], [1], [-1], [2], [9]], np.int32)
    kernel = cuda.softmax_cross_entropy(LossArrays(x, target, dx, loss), ClassTargets(3))
    kernel.set(samples=2, scale=1.0)
    kernel()
    assert loss[0] > 0
    kernel.set(samples=5, scale=1.0)
    kernel()
    assert np.isnan(loss[0]) and not dx[2].any() and not np.isnan(dx).any()
    kernel.set(samples=2, scale=1.0)
    kernel()
    assert loss[0] > 0


@pytest.mark.parametrize("rule", ["sgd", "adam", "lars", "of one's own"])
@pytest.mark.parametrize("count", [224, 131])
def test_updates_read_gradients_of_16_bits_beside_others(cuda, rule, count):
    """Each range of gradients is read from its own array: the update is that of all gradients in float32."""
    rounds = [(0, 48), (64, 80), (96, count)]
    rng, isin = np.random.default_rng(1), np.zeros(count, bool)
    for start, stop in rounds:
        isin[start:stop] = True
    low = rng.standard_normal(count).astype(BFLOAT16)
    whole = np.where(isin, low.astype(np.float32), rng.standard_normal(count)).astype(np.float32)
    low[~isin] = np.nan
    found = []
    for given in ({}, {"rounded": low, "rounds": rounds}):
        g = np.where(isin, np.nan, whole).astype(np.float32) if given else whole
        p, state = np.ones(count, np.float32), [np.zeros(count, np.float32) for _ in range(2)]
        copy, scalars = p.astype(BFLOAT16), np.array([0.1, 2.0, 0.5, 0.7, 1.0])
        decays = [(0, 60, True), (60, count, False)]
        arrays = UpdateArrays(p, g, tuple(state[: 1 + (rule == "adam")]), scalars, decays, copy, **given)
        kernel = {
            "sgd": lambda a: cuda.sgd(a, 0.9, True, 0.01),
            "adam": lambda a: cuda.adam(a, (0.9, 0.99), 1e-6, 0.01, True),
            "lars": lambda a: cuda.lars(a, 0.9, 0.001, 0.01),
            "of one's own": lambda a: cuda.by_rule("own", a, lambda b, _: np.subtract(b.p, b.g, out=b.p)),
        }[rule](arrays)
        kernel()
        found.append((p, copy.astype(np.float32), *state))
    np.testing.assert_array_equal(*found)
    assert np.isfinite(found[1][0]).all() and not (found[1][0] == 1).any()


@pytest.mark.parametrize("name", ["global-2d-grouped", "global-3d-bias", "neighborhood-2d-dilated", "mixed"])
def test_attention(arrays, name):
    run_whole(arrays, CASES[name])


def test_attention_of_each_dtype(typed):
    run_whole(typed, CASES["dropout"])


def test_attention_in_blocks(backend):
    """Blocks of queries, heads and keys, merged one after the other."""
    run_blocks(Arrays(backend, np.float64), CASES["blocks"])
