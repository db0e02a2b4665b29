"""halograd.kernels"""
