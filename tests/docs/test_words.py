"""Names in the text of pages become links to their entries."""

from __future__ import annotations

import pytest

pytest.importorskip("mkdocstrings_handlers.python", reason="needs MkDocs: pip install 'halograd[docs]'")
from docs.generator.hooks import from_above, with_source_links
from docs.generator.words import linked


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("`run.stall_minutes` is", "[`run.stall_minutes`](configuration.md#run.stall_minutes) is"),
        ("`output.timeline = true`", "[`output.timeline = true`](configuration.md#output.timeline)"),
        ("`halograd plan mesh_2k`", "[`halograd plan mesh_2k`](commands.md#halograd-plan)"),
        ("`hg.fit(...)`", "[`hg.fit(...)`][halograd.fitting.fit]"),
        ("`halograd.data.Dataset`", "[`halograd.data.Dataset`][halograd.data.source.Dataset]"),
        ("[`hg.fit`](networks.md)", "[`hg.fit`](networks.md)"),
        ("## What `run.stall_minutes` is", "## What `run.stall_minutes` is"),
        ("`run.no_such_key`, `hg.NoSuchName`, `halograd nothing`",) * 2,
    ],
)
def test_names_become_links(text: str, wanted: str):
    assert linked(text) == wanted


def test_links_to_sources_lead_to_the_host_or_nowhere():
    text = "see [the example](../examples/first_day.py#L3) and [how](../CONTRIBUTING.md#test)"
    assert with_source_links(text, None) == "see the example and [how](contributing.md#test)"
    there = with_source_links(text, "https://host.example/halograd/")
    assert there.startswith("see [the example](https://host.example/halograd/blob/main/examples/first_day.py#L3) and")
    broken = "[gone](../examples/second_day.py)"
    assert with_source_links(broken, None) == broken  # and the strict build fails


def test_pages_of_the_top_folder_keep_their_links():
    text = "[a](docs/running.md#in-a-script) [b](CHANGELOG.md) [c](#test) [d](https://x.example) [e](Makefile)"
    wanted = "[a](running.md#in-a-script) [b](changelog.md) [c](#test) [d](https://x.example) [e](../Makefile)"
    assert from_above(text) == wanted
