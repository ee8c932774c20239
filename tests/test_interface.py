"""The drop-in for `flash_attn_interface`: FlashAttention-3's parameters, in their order."""

import inspect
from functools import partial

import pytest
import torch

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


def test_the_functions_are_those_of_the_package():
    assert sorted(interface.__all__) == sorted(FLASH_ATTENTION_3)
    for name in interface.__all__:
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
