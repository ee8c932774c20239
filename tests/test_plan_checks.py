"""Problems, GPUs and configs made by hand: what nothing can run is refused by its name."""

from dataclasses import replace

import pytest
import torch
from problems import make_problem

import fa3
from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.gpu import H200
from fa3.planning.planner import plan_forward
from fa3.problem import Window
from fa3.scores.masks import Band

PROBLEM = make_problem(1, 300, 300, 2, 2, 64, Window(right=0))
CONFIG = ForwardConfig(128, 64)


def with_spec(**changes):
    return replace(PROBLEM, spec=replace(PROBLEM.spec, **changes))


@pytest.mark.parametrize(
    ("arguments", "error", "complaint"),
    [
        ((3,), TypeError, "problem must be a Problem"),
        ((replace(PROBLEM, seqlen_q=300.0),), TypeError, "problem.seqlen_q must be of type int"),
        ((replace(PROBLEM, batch=True),), TypeError, "problem.batch must be of type int"),
        ((replace(PROBLEM, batch=-1),), ValueError, "problem.batch must be 0 or more"),
        ((replace(PROBLEM, seqlen_k=-1),), ValueError, "problem.seqlen_k must be 0 or more"),
        ((replace(PROBLEM, window=(-1, 0)),), TypeError, "problem.window must be of type Window"),
        ((replace(PROBLEM, window=Window(-5, 0)),), ValueError, "problem.window.left must be -1"),
        (
            (replace(PROBLEM, window=Window()),),
            ValueError,
            "problem.spec.mask must have the bounds",
        ),
        ((with_spec(mask=None),), TypeError, "problem.spec.mask must be of type Band"),
        ((with_spec(mask=Band()),), ValueError, "problem.spec.mask must have the bounds"),
        ((with_spec(dtype="float32"),), ValueError, "problem.spec.dtype must be one of"),
        ((with_spec(head_dim=7),), ValueError, "problem.spec.head_dim must be a multiple of 8"),
        ((with_spec(head_dim_v=512),), ValueError, "problem.spec.head_dim_v must be a multiple"),
        ((replace(PROBLEM, qhead_per_kvhead=0),), ValueError, "qhead_per_kvhead must be 1 or more"),
        ((PROBLEM, None), TypeError, "gpu must be a Gpu"),
        ((PROBLEM, replace(H200, num_sms=0)), ValueError, "gpu.num_sms must be 1 or more"),
        ((PROBLEM, replace(H200, num_sms=132.0)), TypeError, "gpu.num_sms must be of type int"),
        ((PROBLEM, replace(H200, name=None)), TypeError, "gpu.name must be of type str"),
        ((PROBLEM, H200, "wide"), TypeError, "config must be a ForwardConfig or None"),
        ((PROBLEM, H200, replace(CONFIG, q_stages=0)), ValueError, "q_stages must be 1 or more"),
        ((PROBLEM, H200, replace(CONFIG, kv_stages=-3)), ValueError, "kv_stages must be 1 or more"),
        ((PROBLEM, H200, replace(CONFIG, tile_n=64.0)), TypeError, "tile_n must be of type int"),
        ((PROBLEM, H200, replace(CONFIG, own_o="x")), TypeError, "own_o must be of type bool"),
        ((PROBLEM, H200, replace(CONFIG, cluster_m=True)), TypeError, "cluster_m must be of type"),
        ((PROBLEM, H200, replace(CONFIG, fixed_reference=1)), TypeError, "fixed_reference must be"),
    ],
)
def test_what_nothing_can_run_is_refused(arguments, error, complaint):
    with pytest.raises(error, match=complaint):
        plan_forward(*arguments)


def test_a_refused_problem_leaves_nothing_behind():
    """300.0 == 300: what was worked out for one was taken for the other."""
    with pytest.raises(TypeError):
        plan_forward(replace(PROBLEM, seqlen_q=300.0))
    q = torch.randn(1, 300, 4, 64).bfloat16()
    k = q[:, :, :2]
    expected = fa3.flash_attn_func(q, k, k, causal=True, schedule="list")
    found = fa3.flash_attn_func(q, k, k, causal=True, schedule="split")
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("field", ["problem", "gpu", "config", "schedule"])
def test_a_plan_that_lacks_something_is_refused(field):
    q = torch.zeros(1, 300, 4, 64, dtype=torch.bfloat16)
    plan = replace(plan_forward(PROBLEM), **{field: None})
    with pytest.raises(TypeError, match=field):
        fa3.flash_attn_func(q, q[:, :, :2], q[:, :, :2], causal=True, return_lse=True, plan=plan)


@pytest.mark.parametrize("value", [1e-46, 1e39, 2.0**-127])
def test_factors_that_float32_does_not_hold_are_refused(value):
    q = torch.ones(1, 4, 1, 8, dtype=torch.bfloat16)
    for name in ("softmax_scale", "softcap"):
        with pytest.raises(ValueError, match=f"{name} must be"):
            fa3.flash_attn_func(q, q, q, **{name: value})
