"""Documentation, docstrings and messages use plain words: what CONTRIBUTING.md asks for."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

NOT_READ = {"CONTRIBUTING.md", "api.md"}
"""Quotes the words; is made of docstrings."""

PAGES = [
    page
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    if page.name not in NOT_READ and not page.name.startswith("experiments")
]

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

MOST_WORDS = 30
MOST_FIRST_WORDS = 12

MODULES = sorted((ROOT / "fa3").rglob("*.py"))


def prose(page: Path) -> str:
    """Return a page without code, addresses and names in code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return without_names(re.sub(r"\]\([^)]*\)", "]", text))


def without_names(text: str) -> str:
    """Return a text without what is in backquotes."""
    return re.sub(r"`[^`]*`", "x", text)


def words_in(text: str) -> list[str]:
    """Return the words of a text that are to be replaced, each with its replacement."""
    text = " ".join(text.split())
    return [
        f"{word!r}: write {better}"
        for word, better in WORDS.items()
        if re.search(rf"\b{word}\b", text, re.IGNORECASE)
    ]


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of prose: of paragraphs, items of lists and cells of tables."""
    for block in re.split(r"\n\s*\n|\n(?=\s*[-|#*]|\s*\d+\. )", text):
        for piece in block.split("|"):
            yield from re.split(r"(?<=[.!?:;])\s+", " ".join(piece.split()))


def texts_of(module: Path) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Return line and text of a module's docstrings, and of all its other strings.

    An f-string is one text with "x" for its values. Strings after constants count as docstrings.
    """
    docstrings, strings = [], []
    nodes: list[Any] = [ast.parse(module.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Expr) and is_text(node.value):
            docstrings.append((node.lineno, without_names(node.value.value)))
        elif isinstance(node, ast.JoinedStr):
            pieces = [part.value if is_text(part) else "x" for part in node.values]
            strings.append((node.lineno, without_names("".join(pieces))))
            nodes += [part for part in node.values if not is_text(part)]
        elif is_text(node):
            strings.append((node.lineno, without_names(node.value)))
        else:
            nodes += ast.iter_child_nodes(node)
    return docstrings, strings


def comments_of(module: Path) -> list[tuple[int, str]]:
    """Return line and text of a module's comments; lines one below the other are one text."""
    text = module.read_text()
    found = re.finditer(r"(?:^ *# .*\n)+|  # .*$", text, re.MULTILINE)
    lines = ((text.count("\n", 0, one.start()) + 1, one[0]) for one in found)
    return [(line, without_names(re.sub("^ *# ", "", one, flags=re.M))) for line, one in lines]


def is_text(node: ast.AST) -> bool:
    """Whether a node is a string without values in it."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_words_are_plain(page):
    assert page.name == "glossary.md" or words_in(prose(page)) == []


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        (0, "Compute softmax(score(softmax_scale"),
        (1, "must be a torch.Tensor, got"),
        (2, "Counters do not go back if anything was raised"),
    ],
)
def test_words_of_docstrings_messages_and_comments_are_plain(kind, known):
    """Messages are all strings in code: not only those where an error is raised."""
    texts = [
        (f"{module.relative_to(ROOT)}:{line}", text)
        for module in MODULES
        for line, text in (*texts_of(module), comments_of(module))[kind]
    ]
    assert any(known in text for _, text in texts)
    assert [(place, words) for place, text in texts if (words := words_in(text))] == []


def test_first_lines_of_docstrings_are_short():
    """What is in brackets counts as one word."""
    first = [
        (f"{module.relative_to(ROOT)}:{node.body[0].lineno}", text.splitlines()[0])
        for module in MODULES
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and (text := ast.get_docstring(node))
    ]
    assert len(first) > 1000
    long = [
        (place, line)
        for place, line in first
        if len(re.sub(r"`[^`]*`|\([^()]*\)", "x", line).split()) > MOST_FIRST_WORDS
    ]
    assert long == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_are_short(page):
    long = [one for one in sentences(prose(page)) if len(one.split()) > MOST_WORDS]
    assert long == []


def test_long_sentences_and_words_are_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Who waits\nbehind `beside`.\n\n```\nnobody\n```\n" + "word " * 31 + "\n")
    text = prose(page)
    assert [one.split(":")[0] for one in words_in(text)] == ["'behind'", "'(?<!people )who'"]
    assert [len(one.split()) for one in sentences(text) if len(one.split()) > MOST_WORDS] == [31]


def test_words_are_seen_in_code(tmp_path):
    module = tmp_path / "module.py"
    module.write_text(
        '"""Those\nof `behind`."""\nX = 1\n"""Beside."""\n'
        'raise ValueError(f"{X} waits be" f"hind {f(\'nobody\')}")\n'
        "x = 1\n# Those\n# of `behind`.\n"
    )
    docstrings, strings = texts_of(module)
    assert sorted(docstrings) == [(1, "Those\nof x."), (4, "Beside.")]
    assert sorted(strings) == [(5, "nobody"), (5, "x waits behind x")]
    assert comments_of(module) == [(7, "Those\nof x.\n")]
    seen = [len(words_in(text)) for _, text in docstrings + strings + comments_of(module)]
    assert seen == [1, 1, 1, 1, 1]
