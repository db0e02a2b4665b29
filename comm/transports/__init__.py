"""Links of transports between ranks: MPI messages, shared memory, and the emulated network.

`halograd.comm.transport` has the transports by name; :class:`halograd.comm.transports.host_links.HostLinks` makes
channels and sums by the links that a transport chooses.
"""
