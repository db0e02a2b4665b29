"""The configuration reference in the repository agrees with the sources."""

import pytest

from halograd.training.config import Config

pytest.importorskip("griffe", reason="needs MkDocs: pip install 'halograd[docs]'")


def test_the_pages_of_a_clone_have_the_tables_of_the_sources():
    from docs.generator.__main__ import GENERATED, PAGES, renewed

    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        assert GENERATED.search(page), f"{path.name}: expected a generated table"
        assert page == renewed(page), f"{path.name}: expected other tables; write them by `make docs-pages`"


def test_the_page_of_a_clone_has_all_keys():
    from docs.generator import configuration
    from docs.generator.__main__ import PAGE

    page = PAGE.read_text(encoding="utf-8")
    tables = configuration.sections(Config)
    assert len(tables) > 10 and all(f"| `{key.name}` |" in page for table in tables for key in table.keys)
    assert not any(sign in page for sign in ("<autoref", "{#", "{ #", "Not in a clone"))


def test_the_site_has_its_own_version():
    """The site's version of the reference has anchors and links, and contains each part of the page once."""
    pytest.importorskip("mkdocs", reason="needs MkDocs: pip install 'halograd[docs]'")
    from docs.generator.__main__ import PAGE
    from docs.generator.hooks import MARK, REFERENCES

    page = PAGE.read_text(encoding="utf-8")
    made = MARK.sub(lambda match: REFERENCES[match[1]](), page)
    assert made.count("| `epochs`") == 1 and "<!-- " not in made and "{ #training.epochs }" in made
