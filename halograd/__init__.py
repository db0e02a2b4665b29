"""halograd: train convolutional networks on samples that have outgrown one device."""

__version__ = "0.1.0"
