"""The Python in README and in the guides runs: a page's blocks, in their order, are one program.

A comment before a block may limit where it runs: `<!-- needs a GPU -->`, `<!-- compiles a kernel
-->` or `<!-- not run here: why -->`. On a machine without a GPU, "cuda" becomes "cpu".
"""

import ast
import importlib.metadata
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import fa3.interface
from benchmarks import cubin

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
ON_GPU, COMPILES, NOT_HERE = "needs a GPU", "compiles a kernel", "not run here: "

PAGES = [
    "README.md",
    "docs/install.md",
    "docs/first-calls.md",
    "docs/migration.md",
    "docs/training.md",
    "docs/decoding.md",
    "docs/packed.md",
    "docs/fp8.md",
    "docs/distributed.md",
    "docs/planning.md",
    "docs/scores-and-masks.md",
    "docs/gallery.md",
    "docs/transformers.md",
]
COMPILING = ["docs/pytorch.md", "docs/planning.md"]
"""Pages whose program compiles kernels, or has torch compile."""


def program_of(page: str, device: str, compiles: bool) -> str:
    """Return a page's program for a device, with or without what compiles kernels."""
    blocks = []
    for note, code in BLOCK.findall((ROOT / page).read_text()):
        ast.parse(code)
        left_out = (note == ON_GPU and device == "cpu") or (note == COMPILES and not compiles)
        left_out |= cubin.__name__ in code and not has_disassembler()
        if left_out or note.startswith(NOT_HERE):
            continue
        blocks.append(code)
    return "\n\n".join(blocks).replace('"cuda"', f'"{device}"')


def has_disassembler() -> bool:
    """Whether machine code can be read here: a machine with a GPU may lack nvdisasm."""
    try:
        return cubin.nvdisasm().exists()
    except ModuleNotFoundError:
        return False


def test_who_lacks_the_disassembler_is_told(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "files", lambda package: None)
    with pytest.raises(ModuleNotFoundError, match=r"needs nvdisasm: pip install nvidia-cuda-nv"):
        cubin.nvdisasm.__wrapped__()


def small_model(name: str, attn_implementation: str, dtype: str) -> torch.nn.Module:
    """Return what `from_pretrained` stands for: a small Llama that attends as it is told."""
    transformers = pytest.importorskip("transformers", reason="needs Transformers")
    config = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attn_implementation, dtype=getattr(torch, dtype)
    )
    assert model(torch.ones(1, 8, dtype=torch.int64)).logits.isfinite().all()
    return model


def run(page: str, device: str, compiles: bool, folder: Path, monkeypatch) -> None:
    """Run a page's program from a file, as scores and masks need their source."""
    if page == "docs/transformers.md":
        transformers = pytest.importorskip("transformers", reason="needs Transformers")
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", small_model)
    program = program_of(page, device, compiles)
    assert program, f"{page} has no Python that runs"
    path = folder / "page.py"
    path.write_text(program)
    torch.manual_seed(0)
    # Undone after the test: the migration guide installs fa3.interface under this name.
    monkeypatch.setitem(sys.modules, fa3.interface.NAME, fa3.interface)
    monkeypatch.delitem(sys.modules, fa3.interface.NAME)
    runpy.run_path(str(path))


@pytest.mark.parametrize("page", PAGES)
def test_runs(page, tmp_path, monkeypatch):
    run(page, "cpu", False, tmp_path, monkeypatch)


@pytest.mark.compiles
@pytest.mark.parametrize("page", COMPILING)
def test_runs_and_compiles(page, tmp_path, monkeypatch):
    run(page, "cpu", True, tmp_path, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("page", sorted({*PAGES, *COMPILING}))
def test_runs_on_the_gpu(page, tmp_path, monkeypatch, device):
    run(page, "cuda", True, tmp_path, monkeypatch)


def test_notes_are_known():
    """A mistyped note would let a block run where it cannot, or nowhere."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    found = [(page.name, note) for page in pages for note, _ in BLOCK.findall(page.read_text())]
    assert found
    unknown = [one for one in found if one[1] not in ("", ON_GPU, COMPILES)]
    assert [one for one in unknown if not one[1].startswith(NOT_HERE)] == []


def test_every_guide_with_python_is_run():
    written = {
        str(page.relative_to(ROOT))
        for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
        if any(not note.startswith(NOT_HERE) for note, _ in BLOCK.findall(page.read_text()))
    }
    # test_examples.py runs the gallery.
    assert written <= {*PAGES, *COMPILING, "docs/gallery.md"}
