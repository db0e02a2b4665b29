"""What `make docs` makes beside the pages that are written by hand: references, and links to the sources.

MkDocs calls `hooks`; mkdocstrings has griffe call `docstrings`. Nothing here is part of the library.
"""
