"""The tests that every backend passes, with the CUDA kernels on the CPU, in four dtypes."""

from ..test_batch_norm import (  # noqa: F401
    test_a_residual_in_evaluation,
    test_around_sums,
    test_forward_only,
    test_gradient_belongs_to_the_last_forward,
    test_local,
    test_statistics_of_others,
    test_training,
    test_training_of_a_rank_with_nothing,
    test_variance_of_data_far_from_zero,
    test_variance_where_a_block_is_constant,
)
from ..test_clipping import test_clip, test_squares_of_nothing, test_sum_of_squares  # noqa: F401
from ..test_elementwise import (  # noqa: F401
    test_activation,
    test_activation_forward_only,
    test_activation_in_place,
    test_activation_of_large_values,
    test_add,
    test_bias_and_its_gradient,
)
