"""``python -m halograd``, the same as ``halograd``."""

import signal


def main() -> None:
    """Run the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # An exception would not be raised in MPI_Init, which waits for the other ranks and holds Python's lock.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from halograd.cli import main as run

    run()


if __name__ == "__main__":
    main()
