"""One kernel of each kind, to test properties that all kernels have."""

import numpy as np
import pytest

from halograd.kernels import ACTIVATIONS, Geometry, Kernel, KernelError
from halograd.kernels.kernel import BatchNormArrays

from .conftest import Arrays
from .reference import RELU

G = Geometry.of((3, 3), 1, 1)


G2 = Geometry.of((2, 2), 2)


def norm(a: Arrays, shape=(2, 4, 4, 16), local=True, **changed):
    """Return the arguments of a batch norm; `changed` replaces some of them."""
    c = shape[-1]
    arrays = {k: a.draw(*shape) for k in ("x", "y", "dy", "dx")}
    arrays |= {k: a.draw(c) for k in ("gamma", "beta", "mean", "var")}
    arrays["var"][...] = 1
    arrays |= {k: a.draw(2, c, dtype=np.float64) for k in ("sums", "means")}
    return {**arrays, "eps": 1e-5, "activation": RELU, "local": local, **changed}


def every_kernel(a: Arrays, size: int = 8) -> list[Kernel]:
    """Return one kernel of each kind, on images of size x size."""
    b = a.backend
    whole, half = (2, size, size, 16), (2, size // 2, size // 2, 16)
    x, y, w, v = a.draw(*whole), a.draw(*whole), a.draw(16, 3, 3, 16), a.draw(16)
    small, dx = a.draw(*half), a.draw(*whole)
    m, n, k = a.draw(4, 16), a.draw(4, 8), a.draw(8, 16)
    kernels = [
        b.conv_forward(x, w, v, y, G, RELU),
        b.conv_backward_data(y, w, dx, G),
        b.conv_backward_filter(x, y, a.draw(16, 3, 3, 16), a.draw(16), G),
        *b.max_pool(x, small, a.draw(*half), dx, G2),
        *b.average_pool(x, small, a.draw(*half), dx, G2, False),
        b.add([x, y, dx], dx, RELU),
        b.bias(y, v),
        b.bias_gradient(y, a.draw(16)),
        b.dense_forward(m, k, a.draw(8), n),
        b.dense_backward_data(n, k, a.draw(4, 16)),
        b.dense_backward_filter(m, n, a.draw(8, 16), a.draw(8)),
    ]
    for kind in ACTIVATIONS:
        kernels += b.activation(kind, x, y, y, dx, 0.1)
        kernels += b.activation(kind, x[:, 1:], y[:, 1:], y[:, 1:], dx[:, 1:], 0.1)
    for local in (False, True):
        for channels in (16, 18):
            made = b.batch_norm(BatchNormArrays(**norm(a, (2, size, size, channels), local)))
            kernels += [made.statistics, made.forward, made.backward_sums, made.backward_data]
    return kernels


# ---------------------------------------------------------------------- errors
def text_of(call) -> str:
    with pytest.raises(KernelError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)
