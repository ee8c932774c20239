"""Turns README into the start page of the site: adds pictures, and links to the pages it names.

    python -m docs.pages.site build/pages

README itself has neither, since a package index could not show them. The other pages of the site
are the files as they are.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

TILES = """![Which SMs work on which tile, and when](docs/images/tile-order.svg)

*Every call has a plan: which SMs work on which tile, and when. See [Planning](docs/planning.md).*
"""

SPEED = "![TFLOP/s of the forward pass, next to other libraries](docs/images/speed.svg)\n\n"


def start_page(readme: str) -> str:
    """The text of the start page.

    Raises:
        ValueError: README has no table of speed, or names a page that does not exist.
    """
    page = readme.replace("\n## ", f"\n{TILES}\n## ", 1)
    page, tables = re.subn(r"^(?=\| workload)", SPEED, page, flags=re.MULTILINE)
    if tables != 1:
        raise ValueError(f"README must have one table of speed, has {tables}")
    return re.sub(r"(?<!\[)`((?:docs/)?[\w-]+\.md)`", linked, page)


def linked(name: re.Match[str]) -> str:
    """A page's name as a link to it."""
    if not (ROOT / name[1]).is_file():
        raise ValueError(f"README names a page that does not exist: {name[1]}")
    return f"[{name[1]}]({name[1]})"


def main() -> None:
    (folder,) = sys.argv[1:]
    (Path(folder) / "README.md").write_text(start_page((ROOT / "README.md").read_text()))


if __name__ == "__main__":
    main()
