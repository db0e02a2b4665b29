"""Profile: measurements of this machine's messages, collectives and device, and of the layers of a network."""
