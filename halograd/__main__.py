"""``python -m halograd``, the same as ``halograd``."""

from halograd.cli import main

if __name__ == "__main__":
    main()
