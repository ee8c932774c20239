"""SGLang 0.5.23 as far as it calls FlashAttention-3: functions, arguments and calls, for where it
is not installed.

`installed()` puts these modules in SGLang's place. What they say was read in sglang-0.5.23's
`kernels/ops/attention/flash_attention_v3.py`; where SGLang is installed a test compares the
arguments. The functions behind them make the calls of its attention layers
(`srt/layers/attention/flashattention_backend.py`, `dots_hybrid_backend.py`, `vision.py`), argument
by argument. What FlashAttention-3 has no arguments for goes to other kernels there.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch

ARGUMENTS = {
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
        "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
        "q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), attention_chunk=None, softcap=0.0, rotary_interleaved=True, "
        "scheduler_metadata=None, num_splits=0, pack_gqa=None, only_qv=False, sm_margin=0, "
        "return_softmax_lse=False, sinks=None, out=None"
    ),
    "flash_attn_varlen_func": (
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, "
        "seqused_q=None, seqused_k=None, page_table=None, softmax_scale=None, causal=False, "
        "qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), "
        "attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, only_qv=False, sm_margin=0, "
        "return_softmax_lse=False, sinks=None, out=None"
    ),
}
"""What SGLang's two functions take, with their defaults."""

LAST_BY_POSITION = {"flash_attn_with_kvcache": "pack_gqa", "flash_attn_varlen_func": None}
"""The last argument that they hand on by position; all others go by name."""


def no_kernels() -> dict[str, Callable]:
    raise ImportError("SGLang's own kernels are not installed")


V3 = ModuleType("sglang.kernels.ops.attention.flash_attention_v3")
V3._load_fa3_kernels = no_kernels
SGL_KERNEL = ModuleType("sgl_kernel.flash_attn")
SGL_KERNEL.flash_attn_varlen_func = SGL_KERNEL.get_scheduler_metadata = no_kernels


def signature(name: str) -> inspect.Signature:
    return inspect.signature(eval(f"lambda {ARGUMENTS[name]}: None"))


def call(function: str, **given) -> object:
    """Call one of SGLang's functions, which calls the kernel of that name with all arguments, but
    without `out` if there is none."""
    bound = signature(function).bind(**given)
    bound.apply_defaults()
    arguments, names = bound.arguments, list(bound.arguments)
    last = LAST_BY_POSITION[function]
    count = 0 if last is None else names.index(last) + 1
    named = {name: arguments[name] for name in names[count:]}
    if named["out"] is None:
        del named["out"]
    kernel = V3._load_fa3_kernels()[function]
    return kernel(*(arguments[name] for name in names[:count]), **named)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """With these modules in SGLang's place, as they are before anything is put into them."""
    modules, kept = {}, [(module, dict(vars(module))) for module in (V3, SGL_KERNEL)]
    for module, _ in kept:
        above = None
        for part in module.__name__.split(".")[:-1]:
            name = part if above is None else f"{above.__name__}.{part}"
            found = modules.setdefault(name, ModuleType(name))
            found.__path__ = []
            if above is not None:
                setattr(above, part, found)
            above = found
        setattr(above, module.__name__.rpartition(".")[2], module)
        modules[module.__name__] = module
    hidden = {name: sys.modules.pop(name) for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)
        for module, contents in kept:
            vars(module).clear()
            vars(module).update(contents)


# -------------------------------------------------------------------------------------- layers


@dataclass
class Layer:
    """An attention layer; `window` is -1 for none, and counts keys beside a query's own."""

    scaling: float
    logit_cap: float = 0.0
    window: int = -1
    sinks: torch.Tensor | None = None

    @property
    def extra(self) -> dict:
        return {} if self.sinks is None else {"sinks": self.sinks}


@dataclass
class Step:
    """What all layers of a step share: the backend's metadata."""

    cache_seqlens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor | None
    max_seq_len_q: int
    page_table: torch.Tensor
    scheduler_metadata: object = None


Caches = tuple[torch.Tensor, torch.Tensor]


def extend(
    layer: Layer, step: Step, q: torch.Tensor, caches: Caches, causal: bool = True,
    is_cascade: bool = False, return_lse: bool = False, out: torch.Tensor | None = None,
    num_splits: int = 0,
) -> object:  # fmt: skip
    """A prefill, a draft's or one that verifies; with `is_cascade` the part before the draft.

    Attention in chunks is the same call, with a table of each chunk's pages and no cu_seqlens_k.
    """
    is_windowed = layer.window > -1
    return call(
        "flash_attn_with_kvcache",
        q=q,
        k_cache=caches[0],
        v_cache=caches[1],
        page_table=step.page_table,
        cache_seqlens=step.cache_seqlens,
        cu_seqlens_q=step.cu_seqlens_q,
        cu_seqlens_k_new=step.cu_seqlens_k,
        max_seqlen_q=step.max_seq_len_q,
        softmax_scale=layer.scaling,
        causal=causal and not is_cascade,
        window_size=(layer.window, 0 if causal else layer.window) if is_windowed else (-1, -1),
        softcap=layer.logit_cap,
        return_softmax_lse=is_cascade or return_lse,
        num_splits=num_splits,
        out=out,
        **layer.extra,
    )


def of_draft(layer: Layer, step: Step, q: torch.Tensor, caches: Caches) -> object:
    """The second part of a cascade: a draft's own tokens, slot by slot."""
    return call(
        "flash_attn_with_kvcache",
        q=q,
        k_cache=caches[0],
        v_cache=caches[1],
        page_table=step.page_table,
        cache_seqlens=step.cache_seqlens,
        cu_seqlens_q=step.cu_seqlens_q,
        cu_seqlens_k_new=step.cu_seqlens_k,
        max_seqlen_q=step.max_seq_len_q,
        softmax_scale=layer.scaling,
        causal=False,
        window_size=(-1, -1),
        softcap=layer.logit_cap,
        return_softmax_lse=True,
        num_splits=0,
        **layer.extra,
    )


def decode(
    layer: Layer, step: Step, q: torch.Tensor, caches: Caches, return_lse: bool = False,
    out: torch.Tensor | None = None, num_splits: int = 0,
) -> object:  # fmt: skip
    """One token of each request."""
    return call(
        "flash_attn_with_kvcache",
        q=q,
        k_cache=caches[0],
        v_cache=caches[1],
        page_table=step.page_table,
        cache_seqlens=step.cache_seqlens,
        cu_seqlens_q=step.cu_seqlens_q,
        max_seqlen_q=step.max_seq_len_q,
        softmax_scale=layer.scaling,
        causal=True,
        window_size=(layer.window, 0) if layer.window > -1 else (-1, -1),
        softcap=layer.logit_cap,
        return_softmax_lse=return_lse,
        num_splits=num_splits,
        out=out,
        scheduler_metadata=step.scheduler_metadata,
        **layer.extra,
    )


def decode_across(layer: Layer, step: Step, q: torch.Tensor, caches: Caches) -> object:
    """Cross attention to an encoder's tokens while decoding."""
    return call(
        "flash_attn_with_kvcache",
        q=q,
        k_cache=caches[0],
        v_cache=caches[1],
        page_table=step.page_table,
        cache_seqlens=step.cache_seqlens,
        cu_seqlens_q=step.cu_seqlens_q,
        cu_seqlens_k_new=step.cu_seqlens_k,
        max_seqlen_q=1,
        softmax_scale=layer.scaling,
        causal=False,
        window_size=(-1, -1),
        softcap=layer.logit_cap,
        num_splits=0,
        **layer.extra,
    )


def absorbed(layer: Layer, step: Step, q: torch.Tensor, qv: torch.Tensor, caches: Caches) -> object:
    """Latent attention (MLA) with its weights absorbed: keys are the rotary part, `qv` the rest."""
    return call(
        "flash_attn_with_kvcache",
        q=q,
        k_cache=caches[0],
        v_cache=caches[1],
        qv=qv,
        page_table=step.page_table,
        cache_seqlens=step.cache_seqlens,
        cu_seqlens_q=step.cu_seqlens_q,
        cu_seqlens_k_new=step.cu_seqlens_k,
        max_seqlen_q=step.max_seq_len_q,
        softmax_scale=layer.scaling,
        causal=True,
        softcap=layer.logit_cap,
        k_descale=None,
        v_descale=None,
        return_softmax_lse=False,
        num_splits=0,
    )


def of_chunk(
    layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: Caches,
    longest: tuple[int, int], causal: bool, return_lse: bool, out: torch.Tensor | None = None,
) -> object:  # fmt: skip
    """Latent attention with keys and values written out: of a prefill's own tokens, which is
    causal, or of a chunk of those before them."""
    return call(
        "flash_attn_varlen_func",
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=ends[0],
        cu_seqlens_k=ends[1],
        max_seqlen_q=longest[0],
        max_seqlen_k=longest[1],
        softmax_scale=layer.scaling,
        causal=causal,
        return_softmax_lse=return_lse,
        out=out,
        **layer.extra,
    )


def hybrid(
    layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor,
    longest: int,
) -> object:  # fmt: skip
    """A layer with a window beside linear ones."""
    return call(
        "flash_attn_varlen_func",
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=layer.scaling,
        causal=True,
        window_size=(layer.window, 0),
    )


def embed(
    layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor,
    longest: int,
) -> object:  # fmt: skip
    """A model that makes embeddings and keeps no cache; past SGLang's function, to sgl-kernel."""
    return SGL_KERNEL.flash_attn_varlen_func(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=layer.scaling,
        causal=True,
        window_size=(-1, -1),
        softcap=layer.logit_cap,
        num_splits=0,
        out=None,
        **layer.extra,
    )


def see(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, longest: int,
    window: int = -1, sinks: torch.Tensor | None = None,
) -> object:  # fmt: skip
    """An encoder of images."""
    extra = {} if sinks is None else {"sinks": sinks}
    return call(
        "flash_attn_varlen_func",
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=None,
        window_size=(window, window),
        **extra,
    )


def metadata_of(step: Step, **sizes) -> object:
    """What the backend makes once a step for those layers that decode without a window."""
    return SGL_KERNEL.get_scheduler_metadata(
        batch_size=len(step.cache_seqlens),
        max_seqlen_q=1,
        cache_seqlens=step.cache_seqlens,
        cu_seqlens_q=step.cu_seqlens_q,
        causal=True,
        has_softcap=False,
        num_splits=0,
        **sizes,
    )
