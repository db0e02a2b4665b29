"""A U-Net in torch: group norm, bilinear upsampling, skips; at the bottom spatial attention, response normalization."""

from tests.interchange.support import torch

CHANNELS, CLASSES, RESOLUTION = 3, 4, (16, 12)


def make():
    """Return the U-Net as a torch module."""
    lib = torch()
    nn = lib.nn

    def unit(channels, filters, stride=1):
        conv = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        return nn.Sequential(conv, nn.GroupNorm(2, filters), nn.ReLU())

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = unit(CHANNELS, 4)
            self.down = nn.ModuleList([unit(4, 6, 2), unit(6, 8, 2)])
            self.up = nn.ModuleList([unit(8 + 6, 6), unit(6 + 4, 4)])
            self.gate = nn.Conv2d(2, 1, 3, padding=1)
            self.head = nn.Conv2d(4, CLASSES, 1)

        def forward(self, x):
            skips = [self.first(x)]
            for block in self.down:
                skips.append(block(skips[-1]))
            y = skips.pop()
            largest = lib.max(y, 1, keepdim=True)[0]  # of equal maxima the first, as here
            y = y * lib.sigmoid(self.gate(lib.cat([y.mean(1, keepdim=True), largest.flip(3)], 1)))
            energy = lib.norm(y, dim=(2, 3), keepdim=True)
            y = y + y * energy / (energy.mean(1, keepdim=True) + 1e-3)
            for block in self.up:
                skip = skips.pop()
                y = nn.functional.interpolate(y, size=skip.shape[-2:], mode="bilinear", align_corners=False)
                y = block(lib.cat([y, skip], 1))
            return self.head(y)

    return UNet()
