"""Pages of the documentation that are written from code and records are as they would be now."""

from pathlib import Path

import pytest

from docs.pages import performance, support

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("module", [support, performance], ids=["support", "performance"])
def test_pages_are_up_to_date(module):
    name = module.__name__
    assert module.PAGE.read_text() == module.page(), f"run `python -m {name}`, and read the diff"


def test_every_page_is_in_the_site_s_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(ROOT) for path in ROOT.glob("docs/*.md")]
    assert pages and [page for page in pages if f": {page}\n" not in menu] == []
