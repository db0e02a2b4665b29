"""The test suite. `tests.launch` and `tests.harness` are its tools; the folders mirror those of the library."""
