"""halograd.data"""
