"""Small versions of all models learn on one rank, and have the same losses on several."""

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.models import MODELS
from tests.models.small import SMALL, descend, executor_of, small

#: One small network per family, and what is special about it: groups and response norms; lines with dropout; branches
#: with auxiliary classifiers; kernels of 1 x 7 and 7 x 1 wider than a block. With it, how much larger than eps the
#: relative differences of losses and of gradients may be: sums of thousands of terms, in another order, and, where
#: there are many batch norms of few elements, each of them amplifies what came before.
FAMILIES = {
    "alexnet grouped": (16, 200),
    "vgg_a": (16, 200),
    "googlenet auxiliary": (16, 200),
    "inception_v3": (1e4, 1e5),
    "resnet152": (1e5, 1e7),
    "vit_b_16": (16, 1e3),
    "swin_t": (16, 1e3),
    "swin_unet": (16, 1e3),
    "swin_unet 3-D": (16, 1e3),
    "diffusion_unet": (64, 1e4),
}
EPS = float(np.finfo("float64").eps)
CUTS = {
    2: ({"sample": 2}, {"height": 2}, {"width": 2}),
    3: ({"height": 3}, {"width": 3}),
    4: ({"sample": 2, "height": 2}, {"height": 2, "width": 2}),
}


def test_every_model_has_a_small_version():
    assert {given["name"] for given in SMALL.values()} == set(MODELS) - {"mesh"}


@pytest.mark.parametrize("label", SMALL)
def test_loss_falls_as_its_gradient_says(label):
    """A short step along the gradient lowers the loss by the predicted amount; three longer ones lower it further."""
    with Communicator(MPI.COMM_SELF) as alone, executor_of(small(label), alone) as executor:
        first, second = descend(executor, 1e-6, 1)
        assert (first - second) / first == pytest.approx(1e-6, rel=0.02)
        losses = descend(executor, 1e-3, 3)
    assert np.isfinite(losses).all() and (np.diff(losses) < 0).all()


def compare(label, comm):
    """Compare losses of two steps and the last gradients under all cuts with those of one process. Collective."""
    network, allowed = small(label), FAMILIES[label]
    with Communicator(MPI.COMM_SELF) as alone, executor_of(network, alone) as executor:
        want = descend(executor, 1e-3, 2)
        gradients = {k: v.copy() for k, v in executor.store.grads.items()}
    for parts in CUTS[comm.size]:
        with executor_of(network, comm, parts) as executor:
            found = descend(executor, 1e-3, 2)
            # A dead unit has a gradient of zero, also under any cut.
            ours = executor.store.grads
            # The gradient of the bias of keys is zero, too: a softmax does not depend on it. It has only the rounding
            # of its terms, which are those of the gradient of the weights.
            scales = {k: largest(gradients[k.replace(".key/b", ".key/w")]) or EPS for k in gradients}
            errors = {k: largest(ours[k] - g[executor.store.box(k).slices()]) / scales[k] for k, g in gradients.items()}
        key = max(errors, key=errors.__getitem__)
        loss = largest(found / want - 1)
        with comm.agreement():
            assert loss <= allowed[0] * EPS and errors[key] <= allowed[1] * EPS, (
                f"{label} under {parts}: losses differ by {loss / EPS:.3g} eps, the gradient of {key} by "
                f"{errors[key] / EPS:.3g} eps, allowed are {allowed}"
            )


def largest(array):
    """Return the largest magnitude of an array."""
    return float(np.max(np.abs(array), initial=0))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("label", [label for label in FAMILIES if label != "resnet152"])
def test_learns_what_one_process_learns(label):
    with Communicator(MPI.COMM_WORLD) as comm:
        compare(label, comm)


@pytest.mark.ranks(2)
def test_learns_what_one_process_learns_in_152_layers():
    with Communicator(MPI.COMM_WORLD) as comm:
        compare("resnet152", comm)
