"""Generator of the site's references and source links, for `make docs`.

MkDocs calls `hooks`; mkdocstrings passes docstrings through `docstrings`. This package is no part of the library.
"""
