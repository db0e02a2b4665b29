"""halograd.models"""
