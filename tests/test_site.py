"""The site: its menu, start page, pictures, API reference and the index of experiments."""

import re
from pathlib import Path

import pytest

import fa3
from docs.pages import gallery, site, start

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("module", [gallery, start], ids=["gallery", "start"])
def test_pictures_are_up_to_date(module):
    for name, drawn in module.pictures().items():
        text = (module.IMAGES / name).read_text()
        assert text == drawn, f"run `python -m {module.__name__}`, and look at {name}"


def test_the_menu_leads_to_files():
    menu = re.findall(r'= "([^"]+[.]md)"', (ROOT / "zensical.toml").read_text())
    assert menu and [page for page in menu if not (ROOT / page).is_file()] == []


def test_the_index_of_experiments_links_to_every_entry():
    index = (ROOT / "docs/experiments.md").read_text()
    entries = []
    for week in sorted(ROOT.glob("docs/experiments-*.md")):
        titles = re.findall(r"^## (.+)$", week.read_text(), re.MULTILINE)
        entries += [(title, f"({week.name}#{anchor(title)})") for title in titles]
    listed = re.findall(r"^## (\d{4}-.+)\n\n.+ \[Full entry\](\(\S+\))", index, re.MULTILINE)
    assert sorted(listed) == sorted(entries)
    missing = [title for title, _ in entries if f"](#{anchor(title)})" not in index]
    assert missing == [], "each entry is also listed by its subject"


def anchor(title: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_the_start_page_has_pictures_and_links():
    page = site.start_page((ROOT / "README.md").read_text())
    linked = re.findall(r"\]\((docs/[^)]+)\)", page)
    assert {"docs/images/speed.svg", "docs/images/tile-order.svg", "docs/install.md"} <= set(linked)
    assert [path for path in linked if not (ROOT / path).is_file()] == []


def test_the_members_in_the_api_reference_exist():
    text = (ROOT / "docs/api.md").read_text()
    found = re.findall(
        r"^::: fa3[.](.+)\n    options:\n      members: \[(.+)\]$", text, re.MULTILINE
    )
    wrong = [
        f"{name}.{member}"
        for name, members in found
        for member in members.split(", ")
        if not hasattr(getattr(fa3, name), member)
    ]
    assert found and wrong == []
