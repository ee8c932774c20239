"""The documentation uses plain words and short sentences: what CONTRIBUTING.md asks for."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

NOT_READ = {"CONTRIBUTING.md", "api.md"}
"""Quotes the words; is made of docstrings."""

PAGES = [
    page
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    if page.name not in NOT_READ and not page.name.startswith("experiments")
]
GUIDES = [
    "README", "install", "first-calls", "migration", "training", "decoding", "packed", "pytorch",
    "transformers", "engines", "planning", "gallery", "scores-and-masks", "kernels", "environment",
]  # fmt: skip

WORDS = {
    "behind": "after, past the end (for latency: hidden)",
    "beside": "next to, with, compared with",
    "those of": "repeat the noun",
    "that of": "repeat the noun",
    "nobody": "name the role: no CTA, no warp",
    "whoever": "name the role: the CTA that",
    "(?<!people )who": "name the role",
    "kernel of decoding": "decode kernel",
    "sections of heads": "head groups",
    "joined sequences": "sequences that share a tile",
    "heads of a group": "query heads of a key/value head",
    "a reference that follows": "online softmax",
    "sums of dQ": "dQ accumulator",
}
"""A regular expression -> what to write instead."""

MOST_WORDS = 35


def prose(page: Path) -> str:
    """Return a page without code, addresses and names in code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`]*`", "x", re.sub(r"\]\([^)]*\)", "]", text))


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of prose: of paragraphs, items of lists and cells of tables."""
    for block in re.split(r"\n\s*\n|\n(?=\s*[-|#*]|\s*\d+\. )", text):
        for piece in block.split("|"):
            yield from re.split(r"(?<=[.!?:])\s+", " ".join(piece.split()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_words_are_plain(page):
    found = [
        f"{word!r}: write {better}"
        for word, better in WORDS.items()
        if re.search(rf"\b{word}\b", prose(page), re.IGNORECASE) and page.name != "glossary.md"
    ]
    assert found == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem in GUIDES], ids=lambda page: page.name
)
def test_sentences_are_short(page):
    long = [one for one in sentences(prose(page)) if len(one.split()) > MOST_WORDS]
    assert long == []


def test_long_sentences_and_words_are_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Who waits\nbehind `beside`.\n\n```\nnobody\n```\n" + "word " * 36 + "\n")
    text = prose(page)
    seen = [word for word in WORDS if re.search(rf"\b{word}\b", text, re.IGNORECASE)]
    assert seen == ["behind", "(?<!people )who"]
    assert [len(one.split()) for one in sentences(text) if len(one.split()) > MOST_WORDS] == [36]
