"""Measurements of this machine: messages, collectives, the device, and the layers of a network."""
