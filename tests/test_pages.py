"""Pages of the documentation: what is written from code is up to date, and links lead somewhere."""

import re
from pathlib import Path

import pytest

import fa3
from docs.pages import performance, support
from fa3.__main__ import main

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("module", [support, performance], ids=["support", "performance"])
def test_pages_are_up_to_date(module):
    name = module.__name__
    assert module.PAGE.read_text() == module.page(), f"run `python -m {name}`, and read the diff"


def test_every_page_is_in_the_site_s_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(ROOT) for path in ROOT.glob("docs/*.md")]
    assert pages and [page for page in pages if f": {page}\n" not in menu] == []


def test_links_lead_to_files():
    """A folder has no page of its own in the site."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
    wrong = []
    for page in pages:
        targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
        local = [target for target in targets if "://" not in target]
        wrong += [(page.name, target) for target in local if not (page.parent / target).is_file()]
    assert pages and wrong == []


def test_the_plan_in_the_documentation_is_printed(capsys):
    shown = re.search(
        r"^\$ fa3 plan (.*) --png .*\n([\s\S]*?)^Picture",
        (ROOT / "docs/planning.md").read_text(),
        re.MULTILINE,
    )
    main(["plan", *shown[1].split()])
    assert capsys.readouterr().out == shown[2]


def test_every_public_name_is_in_the_api_reference():
    shown = re.findall(
        r"^::: fa3\.[\w.]+\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE
    )
    assert set(fa3.__all__) <= set(shown)
