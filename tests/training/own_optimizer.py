"""Optimizers of a user: the one in the documentation, and one that needs whole parameters."""

import numpy as np

from halograd.training import Optimizer
from tests.docs.pages import blocks

exec(next(block.text for block in blocks("python") if block.text.startswith("# rms.py")))  # defines RMSprop


class OwnLARS(Optimizer):
    """LARS with fixed settings."""

    state_names = ("momentum",)
    whole_parameters = True

    def rule(self, piece, numbers):
        (v,), (_, b) = piece.state, piece.scratch
        norms = [np.sqrt(np.dot(x, x)) for x in (piece.p, piece.g)]
        below = norms[1] * numbers.scale + 0.01 * norms[0]
        ratio = 0.02 * norms[0] / below if piece.decayed and norms[0] > 0 else 1.0
        np.multiply(v, 0.9, out=v)
        np.multiply(piece.gradient(numbers.scale, 0.01), numbers.rate * ratio, out=b)
        np.add(v, b, out=v)
        np.subtract(piece.p, v, out=piece.p)
