"""Both ways to run a dense call with few queries, for `bench_forward --variant`.

    python -m benchmarks.bench_forward --shapes few-queries --providers fa3 fa3-cpp fa4-cute
        --variant fa3-packed=benchmarks.packing:packed
        --variant fa3-forward=benchmarks.packing:forward

`fa3` is the planner's choice. It has to be the faster of the two.
"""

import functools

import torch

import fa3
from benchmarks.peers import Call
from benchmarks.shapes import Cell, window_size


def packed(cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    """The call in the kernel of decoding."""
    return attend(cell, q, k, v, pack_gqa=True)


def forward(cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    """The call in the forward kernel."""
    return attend(cell, q, k, v, pack_gqa=False)


def attend(cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pack_gqa: bool) -> Call:
    return functools.partial(
        fa3.flash_attn_func,
        q,
        k,
        v,
        causal=cell.causal,
        window_size=window_size(cell),
        pack_gqa=pack_gqa,
    )
