"""What the demonstration does: sizes of the data and of the network, and how long it trains."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FULL", "QUICK", "DemoSettings"]


@dataclass(frozen=True)
class DemoSettings:
    """Sizes of one demonstration.

    Attributes
    ----------
    resolution
        Cells per axis of a sample; a multiple of ``2 ** len(widths)``.
    samples, seed
        Of the data set; two samples of each simulation.
    validation
        Share of the simulations held out.
    widths, convs
        Filters per block of the network, and convolutions per block.
    sample, height
        Parts of the batch and of the rows: their product is the number of ranks.
    epochs, batch, learning_rate, pos_weight
        Of the training. `pos_weight` is the weight of masked cells in the loss.
    """

    resolution: int
    samples: int
    widths: tuple[int, ...]
    convs: int
    epochs: int
    learning_rate: float
    batch: int = 4
    seed: int = 1
    validation: float = 0.2
    pos_weight: float = 1.5
    sample: int = 2
    height: int = 2

    @property
    def ranks(self) -> int:
        return self.sample * self.height


#: Less than three minutes on two idle cores, half of it training: turn `epochs` for longer or shorter.
FULL = DemoSettings(128, 192, (24, 32, 48, 64), 1, 18, 0.004)
#: Seconds, to see that everything works; the network learns little in them.
QUICK = DemoSettings(32, 12, (8, 12), 1, 3, 0.01)
