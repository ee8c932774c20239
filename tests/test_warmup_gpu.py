"""After warming up no call of a model compiles, in a process that begins with nothing loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fa3

pytestmark = pytest.mark.gpu

ROOT = Path(fa3.__file__).parent.parent

HEADS, HEAD_DIM = (8, 2), 128
"""Those of the usual sizes that have the fewest kernels."""

PROCESSES = 4
"""Enough for so few kernels: each of them takes seconds to begin, too."""

BEGIN = """
import torch
import fa3
from fa3.running import compiler


def refuse(kernel, options):
    raise AssertionError(f"compiles {kernel}")


compiler.compiled = refuse


def randn(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")
"""

CALLS = {
    "dense": """
for batch, seqlen_q, seqlen_k in ((1, 1, 1), (3, 100, 100), (4, 4096, 4096), (1, 128, 8192)):
    q, k, v = randn(batch, seqlen_q, 8, 128), *(randn(batch, seqlen_k, 2, 128) for _ in "kv")
    assert fa3.flash_attn_func(q, k, v, causal=True).isfinite().all()
""",
    "packed": """
for counts in ((1000, 3, 2000), (5,) * 400):
    ends, total = int32(0, *counts).cumsum(0, dtype=torch.int32), sum(counts)
    q, k, v = randn(total, 8, 128), randn(total, 2, 128), randn(total, 2, 128)
    out = fa3.flash_attn_varlen_func(q, k, v, ends, ends, max(counts), max(counts), causal=True)
    assert out.isfinite().all()
""",
    "cache": """
cos, sin = randn(1024, 64), randn(1024, 64)
for pages in (None, torch.arange(48, dtype=torch.int32, device="cuda").view(3, 16)):
    caches = [randn(*((3, 1024) if pages is None else (48, 64)), 2, 128) for _ in "kv"]
    for new in (1, 200):
        out = fa3.flash_attn_with_kvcache(
            randn(3, new, 8, 128), *caches, randn(3, new, 2, 128), randn(3, new, 2, 128),
            rotary_cos=cos, rotary_sin=sin, cache_seqlens=int32(0, 500, 800), page_table=pages,
            causal=True, rotary_interleaved=False,
        )
        assert out.isfinite().all()
""",
    "paged": """
pages = torch.arange(48, dtype=torch.int32, device="cuda").view(3, 16)
for counts in ((1, 1, 1), (1, 300, 7)):
    ends = int32(0, *counts).cumsum(0, dtype=torch.int32)
    out = fa3.flash_attn_varlen_func(
        randn(sum(counts), 8, 128), randn(48, 64, 2, 128), randn(48, 64, 2, 128), ends, None,
        max(counts), 1024, seqused_k=int32(700, 800, 900), causal=True, page_table=pages,
    )
    assert out.isfinite().all()
""",
}
"""What a server runs, for each kind of calls."""


@pytest.mark.parametrize("kind", CALLS)
def test_a_server_compiles_nothing_after_warming_up(kind, tmp_path, monkeypatch):
    """Not even if it warms up for this kind of calls alone, which has 8 to 19 kernels."""
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path))
    report = fa3.warmup(HEADS, HEAD_DIM, calls=(kind,), processes=PROCESSES)
    program = f"{BEGIN}{CALLS[kind]}print(len(compiler.LOADED))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert 2 <= int(done.stdout) <= int(report.split()[0]) <= 19
