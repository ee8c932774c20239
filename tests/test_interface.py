"""The drop-in for `flash_attn_interface`: FlashAttention-3's parameters, in their order."""

import importlib
import inspect
import sys
import types
from functools import partial

import pytest
import torch
from problems import make_operands, make_problem

import fa3
from fa3 import interface

# FlashAttention-3, hopper/flash_attn_interface.py of Dao-AILab/flash-attention at commit
# c082294e0f6c01d46318694a6f3e0274225a9683.
FLASH_ATTENTION_3 = {
    "flash_attn_func": (
        "q k v softmax_scale=None causal=False qv=None q_descale=None k_descale=None "
        "v_descale=None window_size=(-1,-1) attention_chunk=0 softcap=0.0 num_splits=1 "
        "pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False"
    ),
    "flash_attn_varlen_func": (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q=None seqused_k=None "
        "softmax_scale=None causal=False qv=None q_descale=None k_descale=None v_descale=None "
        "window_size=(-1,-1) attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None "
        "deterministic=False sm_margin=0 return_attn_probs=False"
    ),
    "flash_attn_with_kvcache": (
        "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None "
        "cache_seqlens=None cache_batch_idx=None cache_leftpad=None page_table=None "
        "cu_seqlens_q=None cu_seqlens_k_new=None max_seqlen_q=None rotary_seqlens=None "
        "q_descale=None k_descale=None v_descale=None softmax_scale=None causal=False "
        "window_size=(-1,-1) attention_chunk=0 softcap=0.0 rotary_interleaved=True "
        "scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0 return_softmax_lse=False"
    ),
    "flash_attn_combine": "out_partial lse_partial out=None out_dtype=None",
    "get_scheduler_metadata": (
        "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens "
        "qkv_dtype=torch.bfloat16 headdim_v=None cu_seqlens_q=None cu_seqlens_k_new=None "
        "cache_leftpad=None page_size=None max_seqlen_k_new=0 causal=False window_size=(-1,-1) "
        "attention_chunk=0 has_softcap=False num_splits=0 pack_gqa=None sm_margin=0"
    ),
    # From here on as at commit 01afd16d248c4c7d0f9aed1914084f16c490eaed.
    "flash_attn_qkvpacked_func": (
        "qkv softmax_scale=None causal=False q_descale=None k_descale=None v_descale=None "
        "window_size=(-1,-1) attention_chunk=0 softcap=0.0 deterministic=False num_heads_q=None "
        "sm_margin=0 return_attn_probs=False"
    ),
    "_flash_attn_forward": (
        "q k v k_new=None v_new=None qv=None out_=None cu_seqlens_q=None cu_seqlens_k=None "
        "cu_seqlens_k_new=None seqused_q=None seqused_k=None max_seqlen_q=None max_seqlen_k=None "
        "page_table=None kv_batch_idx=None leftpad_k=None rotary_cos=None rotary_sin=None "
        "seqlens_rotary=None q_descale=None k_descale=None v_descale=None softmax_scale=None "
        "causal=False window_size_left=-1 window_size_right=-1 attention_chunk=0 softcap=0.0 "
        "rotary_interleaved=True scheduler_metadata=None num_splits=1 pack_gqa=None sm_margin=0"
    ),
    "_flash_attn_backward": (
        "dout q k v out softmax_lse cu_seqlens_q=None cu_seqlens_k=None sequed_q=None "
        "sequed_k=None max_seqlen_q=None max_seqlen_k=None dq=None dk=None dv=None "
        "softmax_scale=None is_causal=False window_size_left=-1 window_size_right=-1 softcap=0.0 "
        "deterministic=False sm_margin=0"
    ),
}


def written(parameter: inspect.Parameter) -> str:
    """A parameter as in the record."""
    if parameter.default is parameter.empty:
        return parameter.name
    return f"{parameter.name}={parameter.default!r}".replace(" ", "")


@pytest.mark.parametrize("name", FLASH_ATTENTION_3)
def test_positional_parameters_are_flash_attention_3_s(name):
    parameters = inspect.signature(getattr(interface, name)).parameters.values()
    positional = [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    expected = FLASH_ATTENTION_3[name]
    if name == "flash_attn_varlen_func":
        # Few tiles do not leave SMs idle unless a call says so.
        expected = expected.replace("num_splits=1", "num_splits=0")
    assert list(map(written, positional)) == expected.split()
    assert all(one.kind is one.KEYWORD_ONLY for one in parameters if one not in positional)


def test_wrong_numbers_of_arguments():
    q = torch.zeros(1, 5, 2, 64).bfloat16()
    with pytest.raises(TypeError, match="'v'"):
        interface._flash_attn_forward(q, q)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'q'"):
        interface._flash_attn_forward(q, q, q, q=q)
    with pytest.raises(TypeError, match="'nothing'"):
        interface._flash_attn_forward(q, q, q, nothing=1)
    with pytest.raises(TypeError, match=r"^flash_attn_qkvpacked_func takes 13 arguments by posit"):
        interface.flash_attn_qkvpacked_func(*[q] * 14)
    ends = torch.tensor([0, 5]).int()
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 5, "max_seqlen_k": 5}
    for function, name, others in (
        ("flash_attn_func", "seqused_q", {}),
        ("flash_attn_func", "max_seqlen_k", {}),
        ("flash_attn_with_kvcache", "seqused_q", {"seqused_k": ends[1:]}),
        ("flash_attn_varlen_func", "leftpad_k", packed),
    ):
        with pytest.raises(TypeError, match=rf"^{function}\(\) got an .* argument '{name}'"):
            interface._flash_attn_forward(q, q, q, **others, **{name: ends})


def test_the_functions_are_those_of_the_package():
    assert sorted(interface.__all__) == sorted([*FLASH_ATTENTION_3, "install"])
    for name in set(interface.__all__) & set(fa3.__all__):
        assert getattr(interface, name) is getattr(fa3, name)


def test_no_chunk_is_0_or_none():
    q, k, v = torch.randn(3, 1, 5, 2, 64).bfloat16()
    ends = torch.tensor([0, 5]).int()
    calls = {
        "flash_attn_func": (q, k, v),
        "flash_attn_varlen_func": (q[0], k[0], v[0], ends, ends, 5, 5),
        "flash_attn_with_kvcache": (q, k, v),
    }
    for name, arguments in calls.items():
        function = getattr(interface, name)
        assert torch.equal(function(*arguments, attention_chunk=None), function(*arguments))
    sizes = 1, 5, 5, 2, 2, 64, 5
    metadata = interface.get_scheduler_metadata(*sizes, attention_chunk=None)
    assert metadata == interface.get_scheduler_metadata(*sizes)


def test_names_of_the_log_sum_exp():
    q, k, v = torch.randn(3, 5, 2, 64).bfloat16()
    ends = torch.tensor([0, 5]).int()
    call = partial(interface.flash_attn_varlen_func, q, k, v, ends, ends, 5, 5)
    names = "return_lse", "return_attn_probs", "return_softmax_lse"
    (_, lse), *others = (call(**{name: True}) for name in names)
    assert all(torch.equal(lse, other) for _, other in others)


def test_what_is_returned():
    """A tensor, or with the log-sum-exp a pair: (batch, heads, seqlen), float32."""
    q, k, v = torch.randn(3, 2, 5, 4, 64).bfloat16()
    out = interface.flash_attn_func(q, k, v, None, True)
    assert isinstance(out, torch.Tensor) and out.shape == q.shape
    again, lse = interface.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.equal(out, again)
    assert (lse.shape, lse.dtype) == ((2, 4, 5), torch.float32)
    cached, of_cache = interface.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=5, causal=True, return_softmax_lse=True
    )
    assert cached.shape == q.shape and of_cache.shape == (2, 4, 5)
    parts = torch.stack((out, out)).float(), torch.stack((lse, lse)).transpose(2, 3)
    merged, merged_lse = interface.flash_attn_combine(*parts)
    assert merged.shape == q.shape and merged_lse.shape == (2, 5, 4)


# ------------------------------------------------------------------------------ q, k, v in one


def test_qkv_in_one_tensor():
    torch.manual_seed(0)
    qkv = torch.randn(2, 20, 3, 4, 64).bfloat16().requires_grad_()
    out, lse = interface.flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True)
    expected, expected_lse = fa3.flash_attn_func(*qkv.unbind(2), causal=True, return_lse=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    found, of_parts = (torch.autograd.grad(x.float().sum(), qkv)[0] for x in (out, expected))
    assert torch.equal(found, of_parts)


# --------------------------------------------------------------------------- passes by themselves

ENDS = torch.tensor([0, 7, 20], dtype=torch.int32)
LONGEST = {"max_seqlen_q": 13, "max_seqlen_k": 13}
PROBLEM = make_problem(2, 20, 20, 2, 2)


def forward_cases() -> dict:
    """Return calls of `_flash_attn_forward` and what they are the same as."""
    q, k, v = make_operands(PROBLEM)
    packed = tuple(x[0] for x in (q, k, v))
    lengths = torch.tensor([3, 9], dtype=torch.int32)
    new = {"k": k[:, :1], "v": v[:, :1]}
    table = torch.arange(2, dtype=torch.int32).view(2, 1)
    return {
        "dense": (
            ((q, k, v), {"causal": True, "window_size_left": 5, "softcap": 3.0}),
            partial(fa3.flash_attn_func, q, k, v, causal=True, window_size=(5, 0), softcap=3.0),
        ),
        "packed": (
            (packed, {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "seqused_k": lengths} | LONGEST),
            partial(
                fa3.flash_attn_varlen_func, *packed, ENDS, ENDS, 13, 13, None, lengths, num_splits=1
            ),
        ),
        "cache": (
            ((q[:, :2], k, v), {"seqused_k": lengths, "leftpad_k": table[:, 0], "causal": True}),
            partial(
                fa3.flash_attn_with_kvcache, q[:, :2], k, v, cache_seqlens=lengths,
                cache_leftpad=table[:, 0], causal=True, num_splits=1,
            ),
        ),
        "packed queries on pages": (
            (
                (packed[0], k, v),
                {"cu_seqlens_q": ENDS, "max_seqlen_q": 13, "page_table": table,
                 "seqused_k": lengths},
            ),
            partial(
                fa3.flash_attn_with_kvcache, packed[0], k, v, cu_seqlens_q=ENDS, max_seqlen_q=13,
                page_table=table, cache_seqlens=lengths, num_splits=1,
            ),
        ),
        "appended": (
            (
                (q[:, :1], k.clone(), v.clone()),
                {"k_new": new["k"], "v_new": new["v"], "seqused_k": lengths, "causal": True},
            ),
            partial(
                fa3.flash_attn_with_kvcache, q[:, :1], k.clone(), v.clone(), **new,
                cache_seqlens=lengths, causal=True, num_splits=1,
            ),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("case", forward_cases())
@pytest.mark.parametrize("has_out", [False, True])
def test_the_forward_pass_by_itself(case, has_out):
    (given, options), same = forward_cases()[case]
    expected, expected_lse = same(return_lse=True)
    buffer = torch.empty_like(given[0]) if has_out else None
    out, lse, *rest = interface._flash_attn_forward(*given, **options, out_=buffer)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert not has_out or out is buffer
    assert [x.numel() for x in rest] == [0, 0]


def test_the_backward_pass_of_packed_sequences():
    q, k, v = (x[0].requires_grad_() for x in make_operands(PROBLEM))
    used = torch.tensor([5, 13], dtype=torch.int32)
    out, lse = fa3.flash_attn_varlen_func(
        q, k, v, ENDS, ENDS, 13, 13, seqused_k=used, causal=True, softcap=3.0, return_lse=True
    )
    d_out = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), d_out)
    # Gradients into views of one tensor, as of packed q, k and v.
    packed = torch.empty(20, 8, 64).bfloat16()
    dq, dk, dv = packed.split([4, 2, 2], dim=1)
    interface._flash_attn_backward(
        d_out, q, k, v, out, lse, ENDS, ENDS, None, used, 13, 13, dq, dk, dv, is_causal=True,
        softcap=3.0,
    )  # fmt: skip
    assert all(map(torch.equal, (dq, dk, dv), expected))


# ---------------------------------------------------------------------------------------- install


def test_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    interface.install()
    interface.install()
    assert importlib.import_module("flash_attn_interface") is interface
    assert importlib.util.find_spec("flash_attn_interface") is not None


def test_another_module_is_replaced_only_by_force(monkeypatch):
    other = types.ModuleType("flash_attn_interface")
    other.__file__ = "/elsewhere.py"
    monkeypatch.setitem(sys.modules, "flash_attn_interface", other)
    with pytest.raises(RuntimeError, match=r"^flash_attn_interface is imported .*/elsewhere\.py"):
        interface.install()
    assert sys.modules["flash_attn_interface"] is other
    with pytest.raises(TypeError, match=r"^force must be a bool, got 'x'"):
        interface.install("x")
    interface.install(force=True)
    assert sys.modules["flash_attn_interface"] is interface
