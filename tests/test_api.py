"""`flash_attn_func` on CPU tensors: results, and the errors that a caller can fix."""

from pathlib import Path

import pytest
import torch
from problems import make_operands, make_problem
from reference import check_attention

import fa3
from fa3.problem import Window
from fa3.schedules import SingleTile


def operands(seqlen_q=70, seqlen_k=90, heads_kv=2, group=2, head_dim=64, batch=2, **kwargs):
    problem = make_problem(batch, seqlen_q, seqlen_k, heads_kv, group, head_dim, **kwargs)
    return make_operands(problem)


def test_the_output_is_contiguous_however_q_lies_in_memory():
    q, k, v = operands()
    expected = fa3.flash_attn_func(q, k, v)
    by_head = q.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.cat((q, q), dim=-1)[..., : q.shape[-1]]
    for same in (by_head, wide):
        out = fa3.flash_attn_func(same, k, v)
        assert out.is_contiguous() and torch.equal(out, expected)


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


def test_out_of_an_empty_problem_has_the_head_dim_of_v():
    q, k, v = operands(seqlen_k=0, head_dim_v=96)
    out = fa3.flash_attn_func(q, k, v)
    assert out.shape == (2, 70, 4, 96) and (out == 0).all()
    out.fill_(torch.nan)
    assert (fa3.flash_attn_func(q, k, v, out=out) == 0).all()


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
