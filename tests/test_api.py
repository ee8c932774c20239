"""`flash_attn_func` on CPU tensors: results, and the errors that a caller can fix."""

import math
from dataclasses import replace
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


def test_lse_has_flash_attentions_other_name_too():
    q, k, v = operands()
    _, lse = fa3.flash_attn_func(q, k, v, return_lse=True)
    _, same = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    assert lse.dtype == torch.float32 and lse.shape == (2, 4, 70)
    assert torch.equal(lse, same)


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


def test_a_plan_of_another_problem_is_refused():
    q, k, v = operands()
    with pytest.raises(ValueError, match="plan"):
        fa3.flash_attn_func(q, k, v, plan=plan_forward(make_problem()), return_lse=True)


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


# ---------------------------------------------------------------------------------- bad input


def shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """Return a copy that starts `elements` after an aligned address."""
    memory = tensor.new_empty(tensor.numel() + elements)
    return memory[elements:].view(tensor.shape).copy_(tensor)


def widened(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """Return a view into rows that are `columns` longer."""
    return torch.nn.functional.pad(tensor, (0, columns))[..., : tensor.shape[3]]


BAD_OPERANDS = {
    "rank": ("q", lambda q, k, v: (q[0], k, v), ValueError, ["4 dim", "(70, 4, 64)"]),
    "rank of v": ("v", lambda q, k, v: (q, k, v[None]), ValueError, ["4 dim"]),
    "not a tensor": ("k", lambda q, k, v: (q, k.tolist(), v), TypeError, ["Tensor", "list"]),
    "float32": (
        "q",
        lambda q, k, v: (q.float(), k.float(), v.float()),
        TypeError,
        ["bfloat16", "float16", "float32"],
    ),
    "mixed dtypes": ("k", lambda q, k, v: (q, k.half(), v), TypeError, ["float16", "bfloat16"]),
    "mixed devices": (
        "v",
        lambda q, k, v: (q, k, v.to("meta")),
        ValueError,
        ["cpu", "meta"],
    ),
    "other device": (
        "q",
        lambda q, k, v: (q.to("meta"), k.to("meta"), v.to("meta")),
        ValueError,
        ["CPU or CUDA", "meta"],
    ),
    "heads": ("q", lambda q, k, v: (q[:, :, :3], k, v), ValueError, ["multiple", "3", "2"]),
    "no key heads": (
        "q",
        lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]),
        ValueError,
        ["multiple", "4", "0"],
    ),
    "heads of v": ("v", lambda q, k, v: (q, k, v[:, :, :1]), ValueError, ["shape", "(2, 90, 1"]),
    "head_dim": (
        "q",
        lambda q, k, v: (q[..., :60], k[..., :60], v),
        ValueError,
        ["head_dim 60", "multiples of 8", "256"],
    ),
    "head_dim of v": (
        "v",
        lambda q, k, v: (q, k, v[..., :60]),
        ValueError,
        ["head_dim 60", "multiples of 8", "256"],
    ),
    "head_dim of k": ("k", lambda q, k, v: (q, k[..., :32], v), ValueError, ["64", "32"]),
    "batch": ("k", lambda q, k, v: (q, k[:1], v), ValueError, ["(2, 90", "(1, 90"]),
    "length of v": ("v", lambda q, k, v: (q, k, v[:, :80]), ValueError, ["90", "80"]),
    "last dimension": (
        "q",
        lambda q, k, v: (q.transpose(1, 3).contiguous().transpose(1, 3), k, v),
        ValueError,
        ["contiguous", "last", "stride 280"],
    ),
    "alignment": ("k", lambda q, k, v: (q, shifted(k, 4), v), ValueError, ["16", "8 bytes"]),
    "strides": ("v", lambda q, k, v: (q, k, widened(v, 4)), ValueError, ["multiples of 8", "68"]),
}


@pytest.mark.parametrize("case", BAD_OPERANDS)
def test_bad_operands(case):
    argument, change, error, fragments = BAD_OPERANDS[case]
    with pytest.raises(error) as caught:
        fa3.flash_attn_func(*change(*operands()))
    message = str(caught.value)
    assert message.startswith(f"{argument} ")
    assert all(fragment in message for fragment in fragments), message


@pytest.mark.parametrize("head_dim", [0, 4, 12, 100, 250, 264, 512])
@pytest.mark.parametrize("argument", ["q", "v"])
def test_bad_head_dims(argument, head_dim):
    """The tensors are slices, so that nothing but the size is wrong."""
    q, k, v = operands(head_dim=512)
    sizes = {"q": 64, "v": 64, argument: head_dim}
    q, k, v = q[..., : sizes["q"]], k[..., : sizes["q"]], v[..., : sizes["v"]]
    with pytest.raises(ValueError, match=f"^{argument} has head_dim {head_dim}, .* 8 up to 256"):
        fa3.flash_attn_func(q, k, v)


BAD_ARGUMENTS = [
    ("softmax_scale", 0.0, ValueError),
    ("softmax_scale", -1.0, ValueError),
    ("softmax_scale", math.inf, ValueError),
    ("softmax_scale", math.nan, ValueError),
    ("softmax_scale", "1", TypeError),
    ("window_size", (-2, 0), ValueError),
    ("window_size", (1, 2, 3), ValueError),
    ("window_size", (1.5, 0), TypeError),
    ("window_size", 5, (TypeError, ValueError)),
    ("window_size", None, (TypeError, ValueError)),
    ("sm_margin", -1, ValueError),
    ("sm_margin", 132, ValueError),
    ("num_splits", 2, NotImplementedError),
    ("attention_chunk", 64, NotImplementedError),
    ("pack_gqa", 1, TypeError),
    ("qv", torch.zeros(2, 70, 4, 64), NotImplementedError),
    ("q_descale", torch.ones(2, 2), NotImplementedError),
    ("k_descale", torch.ones(2, 2), NotImplementedError),
    ("v_descale", torch.zeros(1), NotImplementedError),
]


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    BAD_ARGUMENTS,
    ids=lambda value: "tensor" if isinstance(value, torch.Tensor) else None,
)
def test_bad_arguments(argument, value, error):
    with pytest.raises(error, match=argument):
        fa3.flash_attn_func(*operands(), **{argument: value})


@pytest.mark.parametrize(
    ("change", "error", "fragment"),
    [
        (lambda out: out.tolist(), TypeError, "list"),
        (lambda out: out[:, :-1], ValueError, "shape"),
        (lambda out: out[0], ValueError, "4 dim"),
        (lambda out: out.half(), TypeError, "float16"),
        (lambda out: out.to("meta"), ValueError, "meta"),
        (lambda out: shifted(out, 2), ValueError, "aligned"),
        (lambda out: widened(out, 4), ValueError, "multiples of 8"),
        (lambda out: out.transpose(1, 3).contiguous().transpose(1, 3), ValueError, "last"),
        (lambda out: out[:1].expand(2, -1, -1, -1), ValueError, "overlap"),
    ],
)
def test_bad_out(change, error, fragment):
    q, k, v = operands()
    with pytest.raises(error, match=r"^out ") as caught:
        fa3.flash_attn_func(q, k, v, out=change(torch.empty_like(q)))
    assert fragment in str(caught.value)


def test_a_repeated_call_checks_what_may_have_changed():
    q, k, v = operands()
    fa3.flash_attn_func(q, k, v)
    with pytest.raises(ValueError, match="aligned"):
        fa3.flash_attn_func(q, shifted(k, 4), v)


# --------------------------------------------------------------------------------- schedules


def backwards(tiles):
    return tiles[::-1]


@pytest.mark.parametrize("schedule", ["single", "static", "list", SingleTile, backwards])
def test_the_schedule_never_changes_the_output(schedule):
    q, k, v = operands()
    out = fa3.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(fa3.flash_attn_func(q, k, v, causal=True, schedule=schedule), out)


@pytest.mark.parametrize(
    ("schedule", "error", "complaint"),
    [
        ("fastest", ValueError, "schedule must be one of .*'fastest'"),
        (3, TypeError, "schedule must be .*3"),
        (lambda tiles: tiles[1:], ValueError, "schedule leaves out Tile"),
        (lambda tiles: tiles + tiles[:1], ValueError, "schedule gives Tile.* twice"),
    ],
)
def test_bad_schedules(schedule, error, complaint):
    with pytest.raises(error, match=complaint):
        fa3.flash_attn_func(*operands(), causal=True, schedule=schedule)


def test_a_plan_has_its_own_schedule():
    q, k, v = operands()
    plan = fa3.plan_forward(make_problem(2, 70, 90, 2, 2, 64))
    with pytest.raises(ValueError, match="schedule must be None"):
        fa3.flash_attn_func(q, k, v, return_lse=True, plan=plan, schedule="list")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"schedule": lambda tiles: tiles.sort()}, "^schedule must return the tiles .* got None"),
        ({"schedule": [1]}, "^schedule must be hashable"),
        ({"plan": 5}, "^plan must come from fa3.plan_forward, got 5"),
        ({"sm_margin": 1.5}, "^sm_margin must be an integer, got 1.5"),
        ({"window_size": (3, 0.0)}, "^window_size must be two integers"),
        ({"window_size": ([1], 0)}, "^window_size must be two integers"),
    ],
)
def test_arguments_of_other_types_are_named(options, complaint):
    q, k, v = make_operands(make_problem(1, 70, 70, 2))
    fa3.flash_attn_func(q, k, v, window_size=(3, 0))
    with pytest.raises(TypeError, match=complaint):
        fa3.flash_attn_func(q, k, v, **options)


def test_a_window_of_numpy_s_integers():
    q, k, v = make_operands(make_problem(1, 70, 70, 2))
    out = fa3.flash_attn_func(q, k, v, window_size=(np.int64(3), 0))
    assert torch.equal(out, fa3.flash_attn_func(q, k, v, window_size=(3, 0)))


def test_an_unknown_schedule_is_refused_where_there_is_nothing_to_compute():
    q = torch.empty(0, 4, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^schedule must be one of"):
        fa3.flash_attn_func(q, q, q, schedule="foo")


@pytest.mark.parametrize("shape", [(0, 4, 2, 64), (1, 0, 2, 64), (1, 4, 0, 64)])
def test_the_sms_and_the_plan_are_checked_where_there_is_nothing_to_compute(shape):
    q = torch.empty(shape, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^sm_margin must be from 0 to 131, got -1"):
        fa3.flash_attn_func(q, q, q, sm_margin=-1)
    plan = fa3.plan_forward(make_problem(1, 4, 4, 2))
    with pytest.raises(ValueError, match=r"^plan was made for .*; the call has "):
        fa3.flash_attn_func(q, q, q, plan=plan)
    assert fa3.flash_attn_func(q, q, q, sm_margin=4).shape == shape


def test_a_head_size_that_is_not_supported_is_named():
    q = torch.zeros(1, 4, 2, 12, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^q has head_dim 12"):
        fa3.flash_attn_func(q, q, q)


HUGE = 2**31 - 1


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "heads", "complaint"),
    [
        (64, HUGE - 63, 1, "k must have at most"),
        (2048, HUGE - 1023, 1, "k must have at most"),
        (1, 2**32 + 5, 1, "k must have at most"),
        (2**32 + 1, 1, 1, "q must have at most 1073741311 queries, got 4294967297"),
        (2**24, 128, 256, "q must have at most 16777216 tiles"),
    ],
)
def test_what_32_bits_do_not_count_is_refused(seqlen_q, seqlen_k, heads, complaint):
    q = torch.zeros(8, dtype=torch.bfloat16).expand(1, seqlen_q, heads, 8)
    k = torch.zeros(8, dtype=torch.bfloat16).expand(1, seqlen_k, heads, 8)
    with pytest.raises(ValueError, match=complaint):
        fa3.flash_attn_func(q, k, k)


def broken_plans():
    plan = fa3.plan_forward(make_problem(1, 512, 512, 2, 1, 64), schedule="list")
    other = fa3.plan_forward(make_problem(1, 700, 512, 2, 1, 64), schedule="list")
    table = plan.schedule.table.copy()
    table[0] = table[1]
    yield replace(plan, schedule=other.schedule), ValueError, "tiles of another problem"
    yield replace(plan, config=replace(plan.config, tile_m=100)), ValueError, "tile_m must be"
    yield replace(plan, schedule=replace(plan.schedule, table=table)), ValueError, "schedule"
    yield replace(plan, schedule=None), TypeError, "plan must have a schedule"
    yield replace(plan, gpu=132), TypeError, "gpu must be a Gpu"
    one = replace(plan.gpu, num_sms=1)
    pairs = replace(plan.config, cluster_m=2)
    yield replace(plan, gpu=one, config=pairs), ValueError, "do not fit 1 SMs"


@pytest.mark.parametrize(("plan", "error", "complaint"), list(broken_plans()))
def test_a_plan_put_together_by_hand_is_checked(plan, error, complaint):
    q = torch.zeros(1, 512, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(error, match=complaint):
        fa3.flash_attn_func(q, q, q, plan=plan, return_lse=True)


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
