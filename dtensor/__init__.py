"""halograd.dtensor"""
