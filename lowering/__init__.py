"""What layers say of a step: views of memory, operations on them, and the context of a layer that lowers itself."""
