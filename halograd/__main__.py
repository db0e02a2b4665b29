"""``python -m halograd``, the same as ``halograd``."""

import gc
import signal
import sys


def main() -> None:
    """Run the command line. `train` records stop signals from its start, because further imports may take seconds."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # The default action ends the process also inside MPI_Init, which holds Python's lock while it waits for other
        # ranks.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # imports keep what they make, and scanning it takes a tenth of their time; `run` enables it again
    from .training.signals import note_stop_signals

    if sys.argv[1:2] == ["train"]:
        note_stop_signals()
    from .cli.run import main as run

    run()


if __name__ == "__main__":
    main()
