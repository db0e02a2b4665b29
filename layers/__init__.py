"""halograd.layers"""
