"""fa3 in `F.scaled_dot_product_attention` and `torch.nn.attention.varlen.varlen_attn`.

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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.attention

from fa3.calls.attention import flash_attn_func, flash_attn_varlen_func
from fa3.calls.call import describe_tensors, prepare_without_lengths
from fa3.calls.devices import gpu_for_call
from fa3.calls.latest import FastPath, shapes_of
from fa3.calls.modifiers import draw_rng_state, dropout_of
from fa3.calls.operands import ALIGNMENT
from fa3.calls.operators import check_results, checked_problem, run_backward
from fa3.calls.options import DENSE, PACKED, Options, check_probability, check_scale
from fa3.problem import HEAD_DIM_UNIT, NO_BOUND, Problem

FLASH = torch.nn.attention.SDPBackend.FLASH_ATTENTION.value

NO_TENSOR: Any = None  # for a tensor that another operator has

IMPLEMENTATION = "fa3"  # what `activate_flash_attention_impl` takes


def register() -> None:
    """Make fa3 known to torch as a flash attention implementation; activates nothing.

    Raises:
        RuntimeError: torch is older than 2.11, which has no such implementations.
    """
    # 2.10 registers implementations too, but cannot take them back.
    register_impl = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register_impl is None or not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        raise RuntimeError(
            "scaled_dot_product_attention can be routed to fa3 from torch 2.11 on, this is "
            f"{torch.__version__}: call fa3.flash_attn_func, or pass attn_implementation='fa3' to "
            "Transformers (fa3.integrations.transformers)"
        )
    register_impl(IMPLEMENTATION, register_fn=activate)


def activate(key: str = "CUDA") -> "Activation":
    """Put fa3's kernels in place; torch calls this and keeps the result."""
    # Some versions of torch have fewer of these operators.
    names = [name for name in KERNELS if hasattr(torch.ops.aten, name)]
    stock = {name: stock_kernel(f"aten::{name}", key) for name in names}
    library = torch.library.Library("aten", "IMPL")
    activation = Activation(library, order_of_backends())
    try:
        for name in names:
            library.impl(name, Routed.of(name, stock[name]), key, with_keyset=True)
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
    """Return an operator's present kernel at a dispatch key, or raise."""
    try:
        return torch.library.get_kernel(name, key).call_boxed
    except RuntimeError as error:
        raise RuntimeError(
            f"'fa3' takes the place of torch's flash attention for {key}, which this torch "
            f"({torch.__version__}) does not have: on CPU tensors call fa3.flash_attn_func"
        ) from error


@dataclass
class Activation:
    """The kernels in place; `remove` brings back those that were there."""

    library: torch.library.Library | None
    priority: list[int]  # the order in which torch tried its backends before

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()
            self.library = None
            torch._C._set_sdp_priority_order(self.priority)


class Refused(Exception):
    """A call is for the stock kernel."""


# -------------------------------------------------------------------------------- arguments


class AtenArguments(NamedTuple):
    """An operator's arguments by aten's names, with defaults."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_out: torch.Tensor = NO_TENSOR
    out: torch.Tensor = NO_TENSOR
    cum_seq_q: torch.Tensor | None = None
    cum_seq_k: torch.Tensor | None = None
    logsumexp: torch.Tensor = NO_TENSOR
    max_q: int = 0
    max_k: int = 0
    dropout_p: float = 0.0
    is_causal: bool = False
    return_debug_mask: bool = False
    # rng_state, unused: what `dropout_results` gave in the forward pass; see `RENAMED`.
    rng_state: torch.Tensor = NO_TENSOR
    unused: torch.Tensor = NO_TENSOR
    scale: float | None = None
    window_size_left: int | None = None
    window_size_right: int | None = None
    seqused_k: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    num_splits: int | None = None

    def tokens_first(self) -> "AtenArguments":
        """A call of `_scaled_dot_product_...` in the shapes of `_flash_...`, which are fa3's."""
        query, key, value, grad_out, out, _, _, *others = self
        heads_first = query, key, value, grad_out, out
        turned = (None if x is None else x.transpose(1, 2) for x in heads_first)
        return AtenArguments._make((*turned, None, None, *others))

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        """What fa3 reads, by its names."""
        names = "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k"
        lengths = self.cum_seq_q, self.cum_seq_k, self.seqused_k
        return dict(zip(names, (self.query, self.key, self.value, *lengths), strict=True))

    @property
    def window(self) -> tuple[int, int]:
        bounds = self.window_size_left, self.window_size_right
        left, right = (NO_BOUND if one is None or one < 0 else one for one in bounds)
        return left, right


RENAMED = {"philox_seed": "rng_state", "philox_offset": "unused"}
"""Where one operator calls by another name what is the same."""


@dataclass(frozen=True)
class Routed:
    """A kernel of fa3 with the one that was in its place."""

    kernel: Callable[[AtenArguments], Any]
    stock: Callable = field(repr=False)
    names: tuple[str, ...]  # of the operator's arguments, in order

    @classmethod
    def of(cls, name: str, stock: Callable) -> "Routed":
        schema = getattr(torch.ops.aten, name).default._schema
        names = (RENAMED.get(one.name, one.name) for one in schema.arguments)
        return cls(KERNELS[name], stock, tuple(names))

    def __call__(self, keys: torch._C.DispatchKeySet, *arguments, **named):
        try:
            # Autograd is above: it has noted what it needs.
            with torch.no_grad():
                with refusing():  # for unknown arguments
                    call = AtenArguments(**dict(zip(self.names, arguments, strict=False)), **named)
                return self.kernel(call)
        except Refused:
            return self.stock(keys, *arguments, **named)


# ----------------------------------------------------------------------------------- kernels


def sdpa_forward(call: AtenArguments) -> tuple:
    """aten::_scaled_dot_product_flash_attention."""
    # In memory as the query is.
    out = torch.empty_like(call.query)
    lse, state = attend_into(call.tokens_first(), out.transpose(1, 2))
    lengths = call.query.shape[2], call.key.shape[2]
    return out, lse, None, None, *lengths, *dropout_results(call.query, state)


def sdpa_backward(call: AtenArguments) -> tuple[torch.Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_backward."""
    return tuple(x.transpose(1, 2) for x in differentiate(call.tokens_first()))


def flash_forward(call: AtenArguments) -> tuple:
    """aten::_flash_attention_forward."""
    out = torch.empty_like(call.query)
    lse, state = attend_into(call, out)
    return out, lse, *dropout_results(call.query, state)


def flash_forward_into(call: AtenArguments) -> torch.Tensor | None:
    """aten::_flash_attention_forward_no_dropout_inplace: writes out, returns the log-sum-exp."""
    if call.dropout_p:
        raise Refused
    lse, _ = attend_into(call, call.out)
    return lse


def attend_into(call: AtenArguments, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Write out; return log-sum-exp and seed, in fa3's shapes."""
    check_taken(call, out)
    state = draw_rng_state(call.query.device) if call.dropout_p else None
    options: dict[str, Any] = {
        "window_size": call.window, "return_lse": True, "out": out, "dropout_p": call.dropout_p,
        "rng_state": state,
    }  # fmt: skip
    q, k, v, scale, is_causal = call.query, call.key, call.value, call.scale, call.is_causal
    if call.cum_seq_q is None:
        _, lse = flash_attn_func(q, k, v, scale, is_causal, **options)
    else:
        lengths = call.cum_seq_q, call.cum_seq_k, call.max_q, call.max_k, None, call.seqused_k
        options["num_splits"] = call.num_splits or 0
        _, lse = flash_attn_varlen_func(q, k, v, *lengths, scale, is_causal, **options)
    return lse, state


def differentiate(call: AtenArguments) -> tuple[torch.Tensor, ...]:
    """The gradients of query, key and value; the shapes are fa3's."""
    check_taken(call, call.out)
    left, right = call.window
    given: dict[str, Any] = {
        "d_out": call.grad_out, "d_lse": None, "out": call.out,
        "lse": call.logsumexp.contiguous(),
        "rng_state": call.rng_state[:1] if call.dropout_p else None, **call.tensors,
    }  # fmt: skip
    with refusing():
        # Another kernel's log-sum-exp may have room for a longest sequence or for a whole tile.
        check_results(given)
        dropout_of(call.dropout_p, given["rng_state"], call.query)
    *grads, _ = run_backward(
        softmax_scale=call.scale, causal=call.is_causal, window_left=left, window_right=right,
        max_seqlen_q=call.max_q, max_seqlen_k=call.max_k, dropout_p=call.dropout_p,
        deterministic=torch.are_deterministic_algorithms_enabled(), **given,
    )  # fmt: skip
    return tuple(map(laid_out_like, grads, (call.query, call.key, call.value)))


def laid_out_like(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A gradient in strides of `torch.empty_like`, as torch has in graphs."""
    strides = torch.empty_like(tensor, device="meta").stride()
    return gradient if gradient.stride() == strides else torch.empty_like(tensor).copy_(gradient)


def dropout_results(query: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return what torch keeps of dropout: rng_state, unused and debug_attn_mask."""
    unused = query.new_empty((), dtype=torch.uint64)
    # What was not drawn is not read: like torch's own, it is not filled, which takes a launch.
    words = query.new_empty(2, dtype=torch.uint64) if state is None else state.repeat(2)
    return words, unused, query.new_empty(0)


KERNELS: dict[str, Callable[[AtenArguments], Any]] = {
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_into,
    "_flash_attention_backward": differentiate,
}
"""Operators of aten, and what runs them."""


@contextmanager
def refusing() -> Iterator[None]:
    """Raise `Refused` for what is no call of fa3's."""
    try:
        yield
    except (TypeError, ValueError):
        raise Refused from None


# A call like an earlier one is not described again, which takes 10 us.
LATEST_TAKEN: FastPath[Problem] = FastPath(shapes_of)
ALIGNMENTS_OF_TAKEN = dict.fromkeys(("q", "k", "v", "out"), ALIGNMENT) | dict.fromkeys(
    ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"), 1
)


def check_taken(call: AtenArguments, out: torch.Tensor) -> None:
    """Raise `Refused` unless fa3 computes this call on tensors as they lie."""
    is_plain = not call.return_debug_mask and call.alibi_slopes is call.block_table is None
    has_lengths = call.seqused_k is None or call.cum_seq_q is not None
    if not (is_plain and has_lengths and (call.num_splits or 0) <= 1):
        raise Refused
    values = call.tensors | {"out": out}
    with refusing():
        check_probability(call.dropout_p)
        check_scale(call.scale, call.query.shape[-1])
        if LATEST_TAKEN.find(values)[0] is None:
            options = Options(kind=DENSE if call.cum_seq_q is None else PACKED)
            gpu_for_call(call.query.device)
            described = describe_tensors(values, options)
            problem = prepare_without_lengths(checked_problem, described, options)
            LATEST_TAKEN.remember(values, ALIGNMENTS_OF_TAKEN, (), problem, ALIGNMENTS_OF_TAKEN)
