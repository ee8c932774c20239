"""`flash_attn_func` on CPU tensors: results, and the errors that a caller can fix."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import make_operands, make_problem
from reference import check_attention

import fa3
from fa3.planning.planner import plan_forward
from fa3.problem import Window
from fa3.schedules import SingleTile


def operands(seqlen_q=70, seqlen_k=90, heads_kv=2, group=2, head_dim=64, batch=2, **kwargs):
    problem = make_problem(batch, seqlen_q, seqlen_k, heads_kv, group, head_dim, **kwargs)
    return make_operands(problem)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 96, 128, 192, 256])
def test_defaults(dtype, head_dim):
    q, k, v = operands(head_dim=head_dim, dtype=dtype)
    out = fa3.flash_attn_func(q, k, v)
    assert isinstance(out, torch.Tensor) and out.is_contiguous()
    check_attention(out, None, q, k, v)


def test_the_output_is_contiguous_however_q_lies_in_memory():
    q, k, v = operands()
    expected = fa3.flash_attn_func(q, k, v)
    by_head = q.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.cat((q, q), dim=-1)[..., : q.shape[-1]]
    for same in (by_head, wide):
        out = fa3.flash_attn_func(same, k, v)
        assert out.is_contiguous() and torch.equal(out, expected)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (64, 256), (96, 80), (256, 8)])
def test_v_may_have_its_own_head_dim(head_dim, head_dim_v):
    q, k, v = operands(head_dim=head_dim, head_dim_v=head_dim_v)
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert out.shape == (2, 70, 4, head_dim_v) and out.is_contiguous()
    check_attention(out, lse, q, k, v, window=Window(right=0))
    given = torch.full_like(out, torch.nan)
    assert fa3.flash_attn_func(q, k, v, causal=True, out=given) is given
    assert torch.equal(given, out)
    with pytest.raises(ValueError, match=r"^out must have shape"):
        fa3.flash_attn_func(q, k, v, out=torch.empty_like(q))


@pytest.mark.parametrize(
    ("arguments", "window"),
    [
        ({"causal": True}, Window(right=0)),
        ({"window_size": (10, 3)}, Window(10, 3)),
        ({"window_size": [10, -1]}, Window(left=10)),
        ({"window_size": (10, -1), "causal": True}, Window(10, 0)),
        ({"window_size": (10, 0), "causal": True}, Window(10, 0)),
        ({"window_size": (10, 10), "causal": True}, Window(10, 0)),
        ({"window_size": (0, 0)}, Window(0, 0)),
        ({"window_size": (1 << 40, 1 << 40)}, Window()),
        ({"window_size": (1 << 40, 0)}, Window(right=0)),
    ],
)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(70, 90), (90, 70), (1, 70)])
def test_masks(arguments, window, seqlen_q, seqlen_k):
    q, k, v = operands(seqlen_q, seqlen_k)
    out, lse = fa3.flash_attn_func(q, k, v, return_lse=True, **arguments)
    check_attention(out, lse, q, k, v, window=window)


def test_softmax_scale():
    q, k, v = operands()
    out, lse = fa3.flash_attn_func(q, k, v, 0.7, return_lse=True)
    check_attention(out, lse, q, k, v, softmax_scale=0.7)


@pytest.mark.parametrize(
    "sizes", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads_kv": 0}], ids=str
)
@pytest.mark.parametrize("causal", [False, True])
def test_empty_tensors(sizes, causal, poisoned_memory):
    q, k, v = operands(**sizes)
    out, lse = fa3.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    assert out.shape == q.shape and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert (out == 0).all() and (lse == -math.inf).all()


def test_out_of_an_empty_problem_has_the_head_dim_of_v():
    q, k, v = operands(seqlen_k=0, head_dim_v=96)
    out = fa3.flash_attn_func(q, k, v)
    assert out.shape == (2, 70, 4, 96) and (out == 0).all()


def test_out_is_written_in_place():
    q, k, v = operands()
    wide = torch.full((2, 70, 4, 128), torch.nan, dtype=q.dtype)
    out = wide[..., 64:]
    returned = fa3.flash_attn_func(q, k, v, out=out)
    assert returned is out
    assert torch.equal(out, fa3.flash_attn_func(q, k, v))
    assert wide[..., :64].isnan().all()


def test_out_of_an_empty_problem_is_zeroed():
    q, k, v = operands(seqlen_k=0)
    out = torch.full_like(q, torch.nan)
    assert (fa3.flash_attn_func(q, k, v, out=out) == 0).all()


def test_a_given_plan_is_followed():
    problem = make_problem(2, 70, 90, 2, 2)
    q, k, v = make_operands(problem)
    plan = plan_forward(problem, schedule=SingleTile)
    out, lse = fa3.flash_attn_func(q, k, v, plan=plan, return_lse=True)
    check_attention(out, lse, q, k, v)


def test_size_one_dimensions_may_have_any_stride():
    q, k, v = (tensor[:1, :, :1] for tensor in operands())
    q, k, v = (tensor.as_strided(tensor.shape, (3, tensor.stride(1), 5, 1)) for tensor in (q, k, v))
    check_attention(fa3.flash_attn_func(q, k, v), None, q, k, v)


def test_views():
    packed = torch.randn(2, 80, 3, 4, 64).to(torch.float16)
    q, k, v = packed.unbind(2)
    check_attention(fa3.flash_attn_func(q, k, v, causal=True), None, q, k, v, None, Window(right=0))
    heads_first = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v))
    assert torch.equal(fa3.flash_attn_func(*heads_first), fa3.flash_attn_func(q, k, v))
    shared = [tensor[:1].expand(2, -1, -1, -1) for tensor in (k, v)]
    check_attention(fa3.flash_attn_func(q, *shared), None, q, *shared)


def test_gradients_may_be_on_if_they_are_not_asked_for():
    q, k, v = operands()
    q.requires_grad_()
    with torch.no_grad():
        out = fa3.flash_attn_func(q, k, v)
    assert not out.requires_grad


# --------------------------------------------------------------------------------- schedules


def backwards(tiles):
    return tiles[::-1]


@pytest.mark.parametrize("schedule", ["single", "static", "list", SingleTile, backwards])
def test_the_schedule_never_changes_the_output(schedule):
    q, k, v = operands()
    out = fa3.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(fa3.flash_attn_func(q, k, v, causal=True, schedule=schedule), out)


def test_a_window_of_numpy_s_integers():
    q, k, v = make_operands(make_problem(1, 70, 70, 2))
    out = fa3.flash_attn_func(q, k, v, window_size=(np.int64(3), 0))
    assert torch.equal(out, fa3.flash_attn_func(q, k, v, window_size=(3, 0)))


@pytest.mark.compiles
def test_type_checkers_see_the_arguments(tmp_path, monkeypatch):
    """Decorators leave the signatures of the public functions as they are."""
    checker = pytest.importorskip("mypy.api")
    monkeypatch.setenv("MYPYPATH", str(Path(fa3.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    names = [name for name in fa3.__all__ if name.startswith("flash_attn_")]
    Path("calls.py").write_text("\n".join(["import fa3", *(f"fa3.{n}(no=1)" for n in names)]))
    # Only fa3 is read: others' decorators would make a signature anything, and the test fail.
    options = "--config-file=", "--follow-imports=silent", "--ignore-missing-imports"
    options += ("--no-site-packages",)
    printed, _, _ = checker.run([*options, "calls.py"])
    for number, name in enumerate(names, 2):
        assert f'calls.py:{number}: error: Unexpected keyword argument "no" for "{name}"' in printed
