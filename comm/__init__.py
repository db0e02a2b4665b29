"""halograd.comm"""
