"""``python -m halograd``, the same as ``halograd``."""

import signal
import sys


def main() -> None:
    """Run the command line. Signals count from the first line on: to import all of it may take seconds."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # An exception would not be raised in MPI_Init, which waits for the other ranks and holds Python's lock.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .training.signals import note_stop_signals

    if sys.argv[1:2] == ["train"]:
        note_stop_signals()
    from .cli import main as run

    run()


if __name__ == "__main__":
    main()
