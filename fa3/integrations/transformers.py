"""fa3 as an attention implementation of Hugging Face Transformers.

    fa3.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa3", dtype="bfloat16")

A model asks twice: once in every forward pass for a mask (`describe_mask`), and in every layer for
attention with it (`attend_layer`). The mask goes through the model's code as a tensor, so it says
in its shape and dtype what it is:

| mask | says | the layers call |
|---|---|---|
| None | causal, or all keys | `flash_attn_func` |
| (batch, 1, 1, 1), int32 | where each sequence begins, after its padding | `flash_attn_func` |
| (batch, 1, 1, 2), int32 | the same, and where it ends in a cache | `flash_attn_with_kvcache` |
| (1, 1, n + 1, 1), int32 | where n packed sequences begin and end | `flash_attn_varlen_func` |
| (batch, 1, queries, keys), bool | all that is visible | `flash_attn_func` with this mask |

A single query without gradient or dropout goes to `flash_attn_with_kvcache` in the first two cases
too, which splits its keys over the GPU. The last one is for any mask that is none of the others. It
is right, but no key block is skipped. Packed sequences that come with `cu_seq_lens_q` are
`flash_attn_varlen_func`'s whatever the mask says.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
import torch
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask
from transformers.utils import is_tracing

from fa3.calls.attention import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from fa3.calls.backward import wants_gradient
from fa3.primitives.fragments import Position
from fa3.problem import NO_BOUND
from fa3.scores.masks import Mask

ATTENTION_NAME = "fa3"  # what `attn_implementation` takes


def register() -> None:
    """Make `attn_implementation="fa3"` known to Transformers."""
    AttentionInterface.register(ATTENTION_NAME, attend_layer)
    AttentionMaskInterface.register(ATTENTION_NAME, describe_mask)


# ------------------------------------------------------------------------------------- masks


@dataclass(frozen=True)
class AfterPadding(Mask):
    """Keys from each sequence's first token on."""

    begin: torch.Tensor  # (batch,), int32

    @cute.jit
    def visible(self, at: Position):
        return at.key >= self.begin[at.batch]

    def reference(self, at):
        return at.key >= self.begin[at.batch]

    def key_range(self, rows):
        return self.begin[rows.batch], rows.seqlen_k

    open_range = key_range


@dataclass(frozen=True)
class Listed(Mask):
    """What a tensor says."""

    keys: torch.Tensor  # (batch, queries, keys), uint8: not 0 where a query sees a key

    @cute.jit
    def visible(self, at: Position):
        return self.keys[at.batch, at.query, at.key] != 0

    def reference(self, at):
        return self.keys[at.batch, at.query, at.key] != 0


def describe_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function=causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config=None,
    device: torch.device | str = "cpu",
    **rest,
) -> torch.Tensor | None:
    """The mask of a forward pass; takes the arguments of `transformers.masking_utils`.

    Args:
        q_length, kv_length: queries, and keys that the cache will give.
        q_offset, kv_offset: positions of the first ones; on a static cache q_offset is a tensor.
        attention_mask: (batch, tokens so far), bool: False for padding.
        local_size: window, or chunk, of the layers that the mask is for.
        allow_is_causal_skip: nothing but causality, local_size and padding hides keys.
    """
    # Layers say their window themselves. Chunks are no windows.
    is_window = local_size is None or local_size == getattr(config, "sliding_window", None)
    is_causal = is_window and (allow_is_causal_skip or mask_function is causal_mask_function)
    if allow_is_bidirectional_skip and local_size is None and attention_mask is None:
        return None
    if is_causal:
        begin = padding_on_the_left(attention_mask, kv_length, kv_offset, q_length)
        is_static = isinstance(q_offset, torch.Tensor) or (
            q_offset + q_length != kv_offset + kv_length
        )
        if begin is not None and is_static:
            end = torch.as_tensor(q_offset, device=device) + (q_length - kv_offset)
            end = end.to(torch.int32).expand(batch_size)
            begin = begin if begin.numel() else torch.zeros_like(end)
            return torch.stack([begin, end], dim=1)[:, None, None]
        if begin is not None:
            return begin[:, None, None, None] if begin.numel() else None
    mask = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        device=device,
        **rest,
    )
    if is_window and batch_size == 1 and q_length == kv_length and not is_tracing(mask):
        ends = ends_of_packed(mask[0, 0], local_size)
        mask = mask if ends is None else ends[None, None, :, None]
    return mask


def ends_of_packed(mask: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """Return where packed sequences begin and end, (sequences + 1,), int32, or None.
    The mask, (tokens, tokens), may come from position ids that layers do not see; a query sees
    `window` keys of its sequence, its own included."""
    sees_the_one_before = mask.diagonal(-1)
    number = pad((~sees_the_one_before).cumsum(0), (1, 0))
    position = torch.arange(len(mask), device=mask.device)
    expected = (number[:, None] == number) & (position[:, None] >= position)
    if window is not None:
        expected &= position[:, None] < position + window
    if not torch.equal(mask, expected):
        return None
    return pad(number.bincount().cumsum(0), (1, 0)).int()


def padding_on_the_left(
    attention_mask: torch.Tensor | None, kv_length: int, kv_offset: int, q_length: int
) -> torch.Tensor | None:
    """Each sequence's first key, (batch,); empty if all begin at 0.
    The keys are int32. None if keys are hidden elsewhere too, or a graph is being traced.

    Without a cache padding on the right counts as visible: only padding sees it.
    """
    if attention_mask is None:
        return torch.empty(0, dtype=torch.int32)
    if torch.compiler.is_compiling():
        return None
    # Keys that a static cache has room for, but not yet tokens, are hidden by their number.
    tokens = attention_mask.shape[1] - kv_offset
    kept = prepare_padding_mask(attention_mask, kv_length, kv_offset)[:, kv_offset:]
    kept = kept[:, : min(tokens, kv_length)].bool()
    if kept.all():
        return torch.empty(0, dtype=torch.int32)
    begin = kept.int().argmax(dim=1)
    position = torch.arange(kept.shape[1], device=kept.device)
    if q_length == kv_length:
        last = kept.shape[1] - 1 - kept.flip(1).int().argmax(dim=1)
    else:
        last = torch.full_like(begin, kept.shape[1])
    expected = (position >= begin[:, None]) & (position <= last[:, None])
    if not torch.equal(kept, expected):
        return None
    return begin.int() if begin.any() else torch.empty(0, dtype=torch.int32)


# --------------------------------------------------------------------------------- attention


def attend_layer(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **rest,
) -> tuple[torch.Tensor, None]:
    """Attention of a layer.

    Args:
        query, key, value: (batch, heads, length, head_dim), bfloat16 or float16.
        attention_mask: from `describe_mask`, or a bool mask (batch, 1, queries, keys).
        dropout: the probability; models pass 0 unless they are trained.
        sliding_window: keys that a query sees, its own included.
        s_aux: (heads,): sinks.
        cu_seq_lens_q, ...: where packed sequences lie in the one row of the batch.
        rest: what other implementations take.

    Returns:
        the output, (batch, length, heads, head_dim), and no weights.

    Raises:
        NotImplementedError: the layer wants attention weights or a bias, or dropout on a static
            cache.
        TypeError, ValueError: see `flash_attn_func`.
    """
    refuse(rest)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    left = NO_BOUND if sliding_window is None else sliding_window - 1
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    band: dict[str, Any] = {
        "causal": is_causal,
        "window_size": (left, NO_BOUND if is_causal else left),
    }
    is_plain = not (dropout or wants_gradient(q, k, v, s_aux))
    trained = options | {"dropout_p": dropout}
    if cu_seq_lens_q is not None:
        lengths = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
        return attend_to_packed(q, k, v, lengths, **trained, **band), None
    if attention_mask is None:
        if q.shape[1] == 1 and is_plain:
            return flash_attn_with_kvcache(q, k, v, **options, **band), None
        return flash_attn_func(q, k, v, **trained, **band), None
    if attention_mask.dtype == torch.int32 and attention_mask.shape[2] > 1:
        ends = attention_mask[0, 0, :, 0].contiguous()
        lengths = ends, ends, q.shape[1], q.shape[1]
        band = {"causal": True, "window_size": (left, NO_BOUND)}
        return attend_to_packed(q, k, v, lengths, **trained, **band), None
    if attention_mask.dtype == torch.int32:
        bounds = attention_mask[:, 0, 0]
        return attend_to_bounds(q, k, v, bounds, dropout, is_plain, **options, **band), None
    if attention_mask.dtype != torch.bool:
        raise TypeError(
            f"attention_mask must be a bool mask of four dimensions, got {attention_mask.dtype}"
        )
    shape = q.shape[0], q.shape[1], k.shape[1]
    if attention_mask.shape[1] != 1:
        raise NotImplementedError("attention_mask must be the same for all heads")
    keys = attention_mask[:, 0, :, : k.shape[1]].expand(shape).to(torch.uint8)
    return flash_attn_func(q, k, v, **trained, mask=Listed(keys)), None


def attend_to_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: tuple,  # where they end in q and in k, and the lengths of the longest ones
    **options,
) -> torch.Tensor:
    """Attend inside of sequences packed into one row of the batch."""
    if q.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q needs a batch of one row, got {q.shape[0]}")
    ends_q, ends_k, *longest = lengths
    ends = ends_q.int(), ends_k.int()
    return flash_attn_varlen_func(q[0], k[0], v[0], *ends, *longest, **options)[None]


def attend_to_bounds(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    dropout: float,
    is_plain: bool,  # whether no gradient is wanted, nor dropout
    **options,
) -> torch.Tensor:
    """Attend to each sequence's keys between bounds.
    Raises an error if a gradient or dropout is wanted on a static cache."""
    begin = bounds[:, 0].contiguous()
    if bounds.shape[1] == 1 and (q.shape[1] > 1 or not is_plain):
        return flash_attn_func(q, k, v, **options, dropout_p=dropout, mask=AfterPadding(begin))
    if dropout:
        raise NotImplementedError(
            f"dropout of attention is not supported on a static cache, got {dropout}: leave out "
            "the cache, or set attention_dropout to 0 in the model's config"
        )
    end = bounds[:, 1].contiguous() if bounds.shape[1] == 2 else None
    return flash_attn_with_kvcache(q, k, v, cache_seqlens=end, cache_leftpad=begin, **options)


def refuse(rest: dict) -> None:
    """Raise for what a layer may ask and would not get."""
    if rest.get("output_attentions"):
        raise NotImplementedError("output_attentions is not supported: use 'eager' attention")
    for name in ("position_bias", "head_mask", "cache"):
        if rest.get(name) is not None:
            raise NotImplementedError(f"{name} is not supported in 'fa3' attention")
