"""One name, one thing: no module-level name means two things in the package."""

import ast
from collections import defaultdict
from pathlib import Path

import fa3

ROOT = Path(fa3.__file__).parent
OF_EVERY_INTEGRATION = ("register",)
OVER_RANKS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
"""Public functions that `fa3.distributed` has, too, for sequences that are split among ranks."""


def defined(path: Path) -> set[str]:
    """Return the names that a module itself gives to classes, functions and constants."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    repeated = OVER_RANKS if path.parent.name == "distributed" else ()
    return names - {"__all__", *OF_EVERY_INTEGRATION, *repeated}


def test_no_name_means_two_things():
    places = defaultdict(list)
    for path in ROOT.rglob("*.py"):
        for name in defined(path):
            places[name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
