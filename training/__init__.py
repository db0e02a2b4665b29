"""halograd.training"""
