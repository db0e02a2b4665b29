"""Description of a step for layers: views of memory, operations on them, and the context of a layer that lowers itself.
"""
