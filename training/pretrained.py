"""Pretrained weights: what a run begins with, from a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halograd.errors import UserError

from ..device import device_of
from ..interchange.weights import WeightsFile

if TYPE_CHECKING:
    from .session import Session

__all__ = ["begin_with"]


def begin_with(session: Session) -> None:
    """Fill this rank's parameters and states from the file ``training.init``. Collective.

    Every rank reads one whole array after the other and takes its block, so the values are the same under every cut.

    Raises
    ------
    UserError
        The file is not one of weights, it does not fit the network, or ranks have different ones.
    """
    comm, store, settings = session.comm, session.executor.store, session.config.training
    assert settings.init is not None
    with comm.agreement():
        file = WeightsFile(session.network, settings.init, settings.init_fresh)
        mark = file.checksum()
    first = comm.bcast(mark)
    with comm.agreement():
        if mark != first:
            raise UserError(
                f"training.init: expected the same file {settings.init} on all nodes, got another one than rank 0 has; "
                "name a file on a file system that the nodes share"
            )
        for name in file.names:
            target = store.params[name] if name in store.params else store.state[name]
            block = store.box(name)
            if block.size:
                device_of(target).assign(target, file.read(name)[block.slices()])
    store.refresh()
