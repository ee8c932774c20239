"""fa3 behind `F.scaled_dot_product_attention` and `torch.nn.attention.varlen.varlen_attn`.

    fa3.integrations.torch.register()
    torch.nn.attention.activate_flash_attention_impl("fa3")
    ...
    torch.nn.attention.restore_flash_attention_impl()

Both functions end in operators of `aten` wherever torch chooses its flash backend, which it tries
first while fa3 is active. To activate fa3 puts kernels in their place at the dispatch key CUDA:
each takes what fa3 computes, and hands the rest to the kernel that was there (`stock`), which gives
what it always gave. What never comes to the flash backend, such as float32 and masks given as
tensors, does not come here either.

Shapes are aten's: `_scaled_dot_product_...` has (batch, heads, seqlen, head_dim), `_flash_...`
(batch, seqlen, heads, head_dim), or with cum_seq_q (total, heads, head_dim).

fa3 and torch draw dropout differently, and both passes must draw the same. What is kept of it for
the backward pass are two words: fa3's are int64 where torch's are uint64. So fa3 leaves what torch
drew to torch's kernel, and that kernel complains of what fa3 drew.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.attention

from fa3.calls.devices import gpu_of
from fa3.calls.dropout import draw_rng_state
from fa3.calls.forward import flash_attn_func
from fa3.calls.operands import ALIGNMENT, DTYPES
from fa3.calls.operator_backward import gradients_of_call, gradients_of_packed_call
from fa3.calls.varlen import flash_attn_varlen_func
from fa3.problem import HEAD_DIM_UNIT, LEAST_FLOAT, MAX_HEAD_DIM, MOST_FLOAT, NO_BOUND

FLASH = torch.nn.attention.SDPBackend.FLASH_ATTENTION.value

IMPLEMENTATION = "fa3"
"""What `activate_flash_attention_impl` takes."""


def register() -> None:
    """Make fa3 known to torch as a flash attention implementation; activates nothing.

    Raises:
        RuntimeError: torch is older than 2.11, which has no such implementations.
    """
    register_impl = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register_impl is None:
        raise RuntimeError(
            "scaled_dot_product_attention can be routed to fa3 from torch 2.11 on, this is "
            f"{torch.__version__}: call fa3.flash_attn_func, or pass attn_implementation='fa3' to "
            "Transformers (fa3.integrations.transformers)"
        )
    register_impl(IMPLEMENTATION, register_fn=activate)


def activate(key: str = "CUDA") -> "Activation":
    """Put fa3's kernels in place; torch calls this and keeps what it returns."""
    # Some versions of torch have fewer of these operators.
    kernels = {name: kernel for name, kernel in KERNELS.items() if hasattr(torch.ops.aten, name)}
    stock = {name: stock_kernel(f"aten::{name}", key) for name in kernels}
    library = torch.library.Library("aten", "IMPL")
    activation = Activation(library, order_of_backends())
    try:
        for name, kernel in kernels.items():
            library.impl(name, Routed(kernel, stock[name]), key, with_keyset=True)
        # On Hopper torch would rather take cuDNN.
        others = [backend for backend in activation.priority if backend != FLASH]
        torch._C._set_sdp_priority_order([FLASH, *others])
    except BaseException:
        activation.remove()
        raise
    return activation


def order_of_backends() -> list[int]:
    """The order in which torch tries its backends."""
    if torch.cuda.is_available():
        # Torch settles it when it chooses for the first time.
        probe = torch.empty(1, 1, 1, HEAD_DIM_UNIT, device="cuda", dtype=torch.float16)
        torch._fused_sdp_choice(probe, probe, probe)
    return torch._C._get_sdp_priority_order()


def stock_kernel(name: str, key: str) -> Callable:
    """What runs an operator at a dispatch key so far; takes the keys, then its arguments.

    Raises:
        RuntimeError: nothing does, as for CUDA in a torch that was built without it.
    """
    try:
        return torch.library.get_kernel(name, key).call_boxed
    except RuntimeError as error:
        raise RuntimeError(
            f"'fa3' takes the place of torch's flash attention for {key}, which this torch "
            f"({torch.__version__}) does not have: on CPU tensors call fa3.flash_attn_func"
        ) from error


@dataclass
class Activation:
    """The kernels in place; `remove` brings back those that were there.

    Fields:
        priority: the order in which torch tried its backends before.
    """

    library: torch.library.Library | None
    priority: list[int]

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()
            self.library = None
            torch._C._set_sdp_priority_order(self.priority)


class Refused(Exception):
    """A call is for the stock kernel."""


@dataclass(frozen=True)
class Routed:
    """A kernel of fa3 with the one that was in its place."""

    kernel: Callable
    stock: Callable = field(repr=False)

    def __call__(self, keys: torch._C.DispatchKeySet, *arguments, **named):
        try:
            # Autograd is above: it has noted what it needs.
            with torch.no_grad():
                return self.kernel(*arguments, **named)
        except Refused:
            return self.stock(keys, *arguments, **named)


# ----------------------------------------------------------------------------------- kernels


def sdpa_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple:
    """aten::_scaled_dot_product_flash_attention."""
    check_drawn(dropout_p, return_debug_mask)
    # In memory as the query is.
    out = torch.empty_like(query)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    lse, state = attend_into(
        q, k, v, out.transpose(1, 2), None, None, 0, 0, dropout_p, scale, is_causal
    )
    return out, lse, None, None, query.shape[2], key.shape[2], *drawn(query, state)


def sdpa_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_backward."""
    dropout = given_dropout(dropout_p, philox_seed)
    d_out, q, k, v, out = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    found = differentiate(
        d_out, q, k, v, out, logsumexp, None, None, 0, 0, dropout, scale, is_causal
    )
    return tuple(x.transpose(1, 2) for x in found)


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **options,
) -> tuple:
    """aten::_flash_attention_forward."""
    check_drawn(dropout_p, return_debug_mask)
    out = torch.empty_like(query)
    lse, state = flash_attend(
        out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, **options
    )
    return out, lse, *drawn(query, state)


def flash_forward_into(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **options,
) -> torch.Tensor:
    """aten::_flash_attention_forward_no_dropout_inplace: writes out, returns the log-sum-exp."""
    check_drawn(dropout_p, return_debug_mask)
    if dropout_p:
        raise Refused
    lse, _ = flash_attend(
        out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, **options
    )
    return lse


def flash_attend(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What both operators do; gives what `attend_into` gives."""
    if alibi_slopes is not None or block_table is not None or (num_splits or 0) > 1:
        raise Refused
    window = window_of(window_size_left, window_size_right)
    return attend_into(
        query, key, value, out, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, scale, is_causal,
        window, seqused_k,
    )  # fmt: skip


def flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """aten::_flash_attention_backward."""
    dropout = given_dropout(dropout_p, rng_state)
    return differentiate(
        grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout,
        scale, is_causal, window_of(window_size_left, window_size_right),
    )  # fmt: skip


KERNELS: dict[str, Callable] = {
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_into,
    "_flash_attention_backward": flash_backward,
}
"""Operators of aten, and what runs them."""


def attend_into(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    scale: float | None,
    is_causal: bool,
    window: tuple[int, int] = (NO_BOUND, NO_BOUND),
    seqused_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Write out; the shapes are fa3's.

    Returns:
        the log-sum-exp, and the seed that was drawn.
    """
    check_taken(q, k, v, out, scale)
    if cum_seq_q is not None:
        check_packing(cum_seq_q, cum_seq_k, seqused_k)
    elif seqused_k is not None:
        raise Refused
    state = draw_rng_state(q.device) if dropout_p else None
    options = {
        "window_size": window, "return_lse": True, "out": out, "dropout_p": dropout_p,
        "rng_state": state,
    }  # fmt: skip
    if cum_seq_q is None:
        _, lse = flash_attn_func(q, k, v, scale, is_causal, **options)
    else:
        lengths = cum_seq_q, cum_seq_k, max_q, max_k, None, seqused_k
        _, lse = flash_attn_varlen_func(q, k, v, *lengths, scale, is_causal, **options)
    return lse, state


def differentiate(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout: dict[str, Any],
    scale: float | None,
    is_causal: bool,
    window: tuple[int, int] = (NO_BOUND, NO_BOUND),
) -> tuple[torch.Tensor, ...]:
    """The gradients of q, k and v; the shapes are fa3's.

    Args:
        dropout: what `given_dropout` gave.
    """
    check_taken(q, k, v, out, scale)
    check_given(d_out, q, v, out, lse)
    call: dict[str, Any] = {
        "d_out": d_out, "d_lse": None, "q": q, "k": k, "v": v, "out": out, "lse": lse.contiguous(),
        "softmax_scale": scale, "causal": is_causal, "window_size": window, "softcap": 0.0,
        "alibi_slopes": None, "sinks": None, "mask": None,
        "deterministic": torch.are_deterministic_algorithms_enabled(), **dropout,
    }  # fmt: skip
    if cum_seq_q is None:
        *found, _ = gradients_of_call(**call)
    else:
        check_packing(cum_seq_q, cum_seq_k)
        lengths: dict[str, Any] = {
            "cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k, "max_seqlen_q": max_q,
            "max_seqlen_k": max_k, "seqused_q": None, "seqused_k": None,
        }  # fmt: skip
        *found, _ = gradients_of_packed_call(**call, **lengths)
    return tuple(map(laid_out_like, found, (q, k, v)))


def laid_out_like(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A gradient in the strides that torch gives it in graphs, those of `torch.empty_like`."""
    strides = torch.empty_like(tensor, device="meta").stride()
    return gradient if gradient.stride() == strides else torch.empty_like(tensor).copy_(gradient)


def drawn(query: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """rng_state, unused and debug_attn_mask, which torch keeps of a call.

    Args:
        state: the seed that was drawn, (1,) int64; None for a call without dropout.
    """
    unused = query.new_zeros((), dtype=torch.uint64)
    words = query.new_zeros(2, dtype=torch.uint64) if state is None else state.repeat(2)
    return words, unused, query.new_empty(0)


def given_dropout(dropout_p: float, words: torch.Tensor) -> dict[str, Any]:
    """Dropout as a backward pass takes it; raises `Refused` if torch's kernel drew it.

    Args:
        words: rng_state of `drawn`.
    """
    check_drawn(dropout_p)
    if not dropout_p:
        return {}
    if words.dtype != torch.int64:
        raise Refused
    return {"dropout_p": dropout_p, "rng_state": words[:1]}


def window_of(left: int | None, right: int | None) -> tuple[int, int]:
    left, right = (NO_BOUND if one is None or one < 0 else one for one in (left, right))
    return left, right


# ----------------------------------------------------------------------------- who takes a call


def check_drawn(dropout_p: float, return_debug_mask: bool = False) -> None:
    """Raise `Refused` unless fa3 draws dropout like this."""
    if return_debug_mask or not 0.0 <= dropout_p < 1.0:
        raise Refused


def check_taken(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: float | None
) -> None:
    """Raise `Refused` unless fa3 has kernels for these tensors, as they lie, and such a scale."""
    if scale is not None and not LEAST_FLOAT <= scale <= MOST_FLOAT:
        raise Refused
    head_dim = q.shape[-1]
    same = all((x.dtype, x.device, x.shape[-1]) == (q.dtype, q.device, head_dim) for x in (k, v))
    fits = q.dtype in DTYPES and head_dim % HEAD_DIM_UNIT == 0 and 0 < head_dim <= MAX_HEAD_DIM
    if not (same and fits and all(map(is_laid_out, (q, k, v, out)))):
        raise Refused
    if q.is_cuda:
        try:
            gpu_of(q.device)
        except ValueError:
            raise Refused from None


def check_given(
    d_out: torch.Tensor, q: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Raise `Refused` unless a forward pass left out and the log-sum-exp as fa3's leaves them.

    Another kernel's log-sum-exp may have room for a longest sequence or for a whole tile.
    """
    *rows, heads, _ = q.shape
    of_out = (*rows, heads, v.shape[-1]), q.dtype, q.device
    *batch, seqlen_q = rows
    of_lse = (*batch, heads, seqlen_q), torch.float32, q.device
    expected = ((d_out, of_out), (out, of_out), (lse, of_lse))
    if any((tuple(x.shape), x.dtype, x.device) != properties for x, properties in expected):
        raise Refused


def check_packing(
    cum_seq_q: torch.Tensor, cum_seq_k: torch.Tensor | None, seqused_k: torch.Tensor | None = None
) -> None:
    """Raise `Refused` unless fa3 reads lengths of packed sequences like these."""
    integers = cum_seq_q, cum_seq_k, seqused_k
    if cum_seq_k is None or any(x is not None and x.dtype != torch.int32 for x in integers):
        raise Refused


def is_laid_out(tensor: torch.Tensor) -> bool:
    """Whether TMA can walk a tensor where it lies."""
    unit = ALIGNMENT // tensor.element_size()
    strides = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return (
        tensor.stride(-1) == 1
        and tensor.data_ptr() % ALIGNMENT == 0
        and all(stride % unit == 0 for size, stride in strides if size > 1 or tensor.ndim == 3)
    )
