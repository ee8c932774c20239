"""Pages of the documentation: what is written from code is up to date, and links lead somewhere."""

import re
from operator import attrgetter
from pathlib import Path

import pytest

import fa3
import fa3.distributed
from docs.pages import gallery, headline, performance, site, start, support
from fa3.__main__ import main

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("module", [support, performance, headline])
def test_pages_are_up_to_date(module):
    name = module.__name__
    assert module.PAGE.read_text() == module.page(), f"run `python -m {name}`, and read the diff"


def test_readme_is_short_and_renders_on_a_package_index():
    """A package index has neither the files of this repository nor its pictures."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert re.findall(r"\]\((?!https?://)[^)]*\)", text) == []


def test_the_site_s_menu_has_every_page_and_leads_to_files():
    menu = re.findall(r'= "([^"]+[.]md)"', (ROOT / "zensical.toml").read_text())
    pages = {str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md")}
    assert pages and pages <= set(menu)
    assert [page for page in menu if not (ROOT / page).is_file()] == []


def test_links_lead_to_files():
    """A folder has no page of its own in the site."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
    wrong = []
    for page in pages:
        targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
        local = [target for target in targets if "://" not in target]
        wrong += [(page.name, target) for target in local if not (page.parent / target).is_file()]
    assert pages and wrong == []


def test_the_list_of_records_has_all_of_them():
    listed = (ROOT / "benchmarks/results/README.md").read_text()
    folders = [one.name for one in (ROOT / "benchmarks/results").iterdir() if one.is_dir()]
    assert folders and [name for name in folders if f"`{name}`" not in listed] == []


def anchor(title: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-")


def test_links_lead_to_headings():
    wrong = []
    for page in [*ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md"), ROOT / "CONTRIBUTING.md"]:
        for target, place in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text()):
            there = page.parent / target if target else page
            if there.suffix == ".md":
                titles = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
                wrong += [(page.name, target, place)] * (place not in map(anchor, titles))
    assert wrong == []


def test_the_plan_in_the_documentation_is_printed(capsys):
    shown = re.search(
        r"^\$ fa3 plan (.*) --png .*\n([\s\S]*?)^Picture",
        (ROOT / "docs/planning.md").read_text(),
        re.MULTILINE,
    )
    main(["plan", *shown[1].split()])
    assert capsys.readouterr().out == shown[2]


def test_the_api_reference_has_the_public_names_and_no_others():
    text = (ROOT / "docs/api.md").read_text()
    shown = re.findall(r"^::: fa3[.](.+)$", text, re.MULTILINE)
    libraries = [f"integrations.{name}.register" for name in ("torch", "transformers", "vllm")]
    over_ranks = [f"distributed.{name}" for name in fa3.distributed.__all__]
    assert sorted(shown) == sorted([*fa3.__all__, *libraries, *over_ranks])
    table = re.findall(r"^[|] (\[.*) [|] ", text, re.MULTILINE)
    assert sorted(re.findall(r"\]\[fa3[.](.+?)\]", "".join(table))) == sorted(fa3.__all__)


@pytest.mark.parametrize("module", [gallery, start], ids=["gallery", "start"])
def test_pictures_are_up_to_date(module):
    for name, drawn in module.pictures().items():
        text = (module.IMAGES / name).read_text()
        assert text == drawn, f"run `python -m {module.__name__}`, and look at {name}"


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


def test_the_start_page_has_pictures_and_links():
    page = site.start_page((ROOT / "README.md").read_text())
    linked = re.findall(r"\]\((docs/[^)]+)\)", page)
    assert {"docs/images/speed.svg", "docs/images/tile-order.svg", "docs/install.md"} <= set(linked)
    assert [path for path in linked if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("page", ["architecture", "backward", "extending", "kernels", "reading"])
def test_names_of_code_exist(page):
    files = [*ROOT.glob("fa3/**/*.*"), *ROOT.glob("*/*.py"), ROOT / "Makefile"]
    code = " ".join(file.name + file.read_text() for file in files if file.suffix != ".pyc")
    text = re.sub(r"^```.*?^```", "", (ROOT / f"docs/{page}.md").read_text(), flags=re.M | re.S)
    names = {name for one in re.findall("`([^`]+)`", text) for name in re.findall(r"\w{3,}", one)}
    assert sorted(names - set(re.findall(r"\w+", code))) == []


def test_the_members_in_the_api_reference_exist():
    text = (ROOT / "docs/api.md").read_text()
    found = re.findall(
        r"^::: fa3[.](.+)\n    options:\n      members: \[(.+)\]$", text, re.MULTILINE
    )
    assert found
    for name, members in found:
        attrgetter(*(f"{name}.{member}" for member in members.split(", ")))(fa3)
