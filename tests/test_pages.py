"""Pages of the documentation that are written from code and records are as they would be now."""

import pytest

from docs.pages import performance, support


@pytest.mark.parametrize("module", [support, performance], ids=["support", "performance"])
def test_pages_are_up_to_date(module):
    name = module.__name__
    assert module.PAGE.read_text() == module.page(), f"run `python -m {name}`, and read the diff"
