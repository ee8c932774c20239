"""What a cell is to the planner: its problem, and the GPU that it is planned for."""

import functools

import torch

from benchmarks.shapes import Cell, window_size
from fa3.calls.devices import gpu_of
from fa3.calls.options import check_window
from fa3.calls.tuned_plans import plan_call
from fa3.planning.costs import H200, Gpu
from fa3.problem import AttentionSpec, Problem
from fa3.scores.masks import Band


def problem_of(cell: Cell) -> Problem:
    """What `fa3.flash_attn_func` makes of a call on this cell."""
    window = check_window(window_size(cell), cell.causal)
    window = window.tighten(cell.seqlen_q, cell.seqlen_k)
    spec = AttentionSpec(cell.dtype, cell.head_dim, cell.head_dim_v, Band.of(window))
    ratio = cell.heads_q // cell.heads_kv
    return Problem(spec, cell.batch, cell.seqlen_q, cell.seqlen_k, cell.heads_kv, ratio, window)


@functools.cache
def present_gpu() -> Gpu:
    """The GPU of this machine, or an H200 where there is none."""
    if not torch.cuda.is_available():
        return H200
    return gpu_of(torch.device("cuda", torch.cuda.current_device()))


def plan_name(cell: Cell) -> str:
    """The name of the plan by which a call on this cell runs."""
    return plan_call(problem_of(cell), present_gpu()).name
