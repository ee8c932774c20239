"""Scheduler metadata: how a step runs, decided once for all layers.

The kernels read lengths on the device and cut keys by themselves, so calls need no schedule. What
the host can add, where it knows the lengths of equal queries on a cache: that cutting does not pay,
since whole tiles need no workspace and no merge. Lengths are a hint, so that any are taken. Calls
check what they get, and that metadata was made for it: so nothing else need be checked here.
"""

from typing import NamedTuple

import torch

from fa3.calls.call import LENGTHS, AttentionCall
from fa3.calls.devices import gpu_for_call
from fa3.calls.operands import DTYPES, FP8_DTYPE, describe
from fa3.calls.options import (
    CACHED,
    PACKED,
    Options,
    as_pair,
    check_window,
    default_pack_gqa,
    flag,
    integer,
    named_options,
)
from fa3.complaints import shown
from fa3.planning.decode import Sizes, whole_tiles_suffice
from fa3.planning.routes import CACHE, MOST_OF_DECODE, PackedSizes, Signature, choose_route
from fa3.primitives.arithmetic import LARGEST
from fa3.primitives.cache_blocks import CacheLayout
from fa3.problem import MAX_HEAD_DIM, NO_BOUND, AttentionSpec, Problem, Window
from fa3.schedules.sequences import LONGEST
from fa3.scores.masks import Band
from fa3.settings import check_settings


class SchedulerMetadata(NamedTuple):
    """What calls of one shape have in common, and how they run.

    Attributes:
        seqlen_q: queries of a sequence; of packed ones the most.
        dtype: of the cache and, unless it is FP8, of q.
        page_size: tokens of a page; None without pages.
        window: the keys that a query sees, with causal folded in.
        num_splits, sm_margin: as asked for; the calls' own are to be these, or left at 0.
        has_packed_queries, has_packed_keys: whether they are packed.
        keeps_tiles_whole: whether cutting tiles was found not to pay.
    """

    batch: int
    seqlen_q: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    page_size: int | None
    window: Window
    has_softcap: bool
    num_splits: int
    sm_margin: int
    has_packed_queries: bool
    has_packed_keys: bool
    keeps_tiles_whole: bool = False

    def check(self, **values_of_call: object) -> None:
        """Raise ValueError unless a call is what this was made for."""
        for name, value in values_of_call.items():
            expected = getattr(self, name)
            if value != expected:
                raise ValueError(
                    f"scheduler_metadata was made for {name} {expected}, the call has {value}"
                )

    def check_call(self, call: AttentionCall, options: Options) -> None:
        """Raise ValueError unless this was made for such calls.
        The call's tensors have at least shapes and dtypes."""
        names = ["heads_q", "heads_kv", "head_dim", "head_dim_v"]
        if not self.has_packed_keys:
            names += "seqlen_q", "batch"
        self.check(has_packed_keys=call.kind == PACKED)
        if self.has_packed_queries:
            self.check(has_packed_queries=call.is_packed)
        page_size = None if call.page_table is None else call.page_size
        self.check(
            **{name: getattr(call, name) for name in names}, dtype=call.k.dtype,
            page_size=page_size, window=options.window, has_softcap=bool(options.softcap),
        )  # fmt: skip

    def applied_to(self, options: Options) -> Options:
        """Return a call's options with the `num_splits` and `sm_margin` of this.

        Packed keys are split where both allow it. Whole tiles do not count where bits must not
        depend on lengths.
        """
        num_splits = self.num_splits
        if options.kind == PACKED:
            num_splits = max(num_splits, options.num_splits)
        for name, ours in (("num_splits", num_splits), ("sm_margin", self.sm_margin)):
            asked = getattr(options, name)
            if asked not in (0, ours):
                raise ValueError(
                    f"{name} must be 0 or, as in scheduler_metadata, {ours}, got {asked}"
                )
        if self.keeps_tiles_whole and not options.batch_invariant:
            num_splits = 1
        return options._replace(num_splits=num_splits, sm_margin=self.sm_margin)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: int | torch.Tensor | None,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (NO_BOUND, NO_BOUND),
    attention_chunk: int | None = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    *,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
) -> SchedulerMetadata:
    """Decide how calls of a step run, once for all layers.

    They are calls of `flash_attn_with_kvcache` or `flash_attn_varlen_func`, and each checks that it
    is what this was made for. Finds out whether whole tiles keep the SMs as busy as tiles that are
    cut and merged: without cu_seqlens_q, where num_splits is 0, cache_seqlens is on the CPU, and
    the decode kernel serves the calls. If so, they run without workspace and merge. If lengths have
    changed by the time of a call, that can cost time, but never changes the result.

    With cu_seqlens_q, for packed queries, it holds what calls have in common whatever their lengths
    are: the kernels read lengths on the GPU. Lengths are checked in the call.

    Args:
        batch_size: sequences.
        max_seqlen_q: queries of a sequence; with cu_seqlens_q the most.
        max_seqlen_k: longest length that a sequence may have in these calls.
        num_heads_q, num_heads_kv: heads of q and of the cache.
        headdim: columns of q and k_cache: a multiple of 8 up to 256.
        cache_seqlens: int or (batch_size,) int32, as in the call. With cu_seqlens_k the call's
            seqused_k, or None.
        qkv_dtype: torch.bfloat16 or torch.float16; torch.float8_e4m3fn for keys in FP8,
            whatever q has.
        headdim_v: columns of v_cache, like headdim, which it is if not given.
        cu_seqlens_k_new: as in the call.
        cache_leftpad: as in the call.
        page_size: tokens of a page; None without pages.
        max_seqlen_k_new: most tokens that a sequence gets.
        causal, window_size, num_splits, pack_gqa, sm_margin: as in the call.
        has_softcap: whether the call has a softcap.
        attention_chunk: 0 or None, which are the same: no chunks.
        cu_seqlens_q: (batch_size + 1,) int32, as in the call, where queries are packed.
        cu_seqlens_k: like cu_seqlens_q, where keys are packed too.
        seqused_q: (batch_size,) int32, as in the call on packed keys.

    Returns:
        What the calls' scheduler_metadata takes.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a wrong value; lengths may have any.
        NotImplementedError: the combination is not supported, or a tensor does not lie in memory.
    """
    check_settings()
    pack_gqa = default_pack_gqa(pack_gqa, (num_heads_q, headdim), (num_heads_kv, headdim))
    options = named_options(
        CACHED if cu_seqlens_k is None else PACKED,
        {"causal": causal, "attention_chunk": attention_chunk, "num_splits": num_splits,
         "sm_margin": sm_margin, "pack_gqa": pack_gqa},
    )  # fmt: skip
    for name, tensor, other_name, other in (
        ("cu_seqlens_k", cu_seqlens_k, "cu_seqlens_q", cu_seqlens_q),
        ("seqused_q", seqused_q, "cu_seqlens_k", cu_seqlens_k),
    ):
        if tensor is not None and other is None:
            raise ValueError(f"{name} must be None without {other_name}")
    columns: dict[str, int] = {"least": 1, "most": MAX_HEAD_DIM}
    head_dim = integer("headdim", headdim, **columns)
    calls = SchedulerMetadata(
        batch=integer("batch_size", batch_size, 1, most=LARGEST),
        seqlen_q=integer("max_seqlen_q", max_seqlen_q, 1, most=LARGEST),
        heads_q=integer("num_heads_q", num_heads_q, 1, most=LARGEST),
        heads_kv=integer("num_heads_kv", num_heads_kv, 1, most=LARGEST),
        head_dim=head_dim,
        head_dim_v=head_dim if headdim_v is None else integer("headdim_v", headdim_v, **columns),
        dtype=qkv_dtype,
        page_size=None if page_size is None else integer("page_size", page_size, 1, most=LONGEST),
        window=check_window(as_pair(window_size), options["causal"]),
        has_softcap=flag("has_softcap", has_softcap),
        num_splits=options["num_splits"],
        sm_margin=options["sm_margin"],
        has_packed_queries=cu_seqlens_q is not None,
        has_packed_keys=cu_seqlens_k is not None,
    )
    check_calls(calls)
    longest_k = integer("max_seqlen_k", max_seqlen_k, 0)
    most_new = integer("max_seqlen_k_new", max_seqlen_k_new, 0, most=LONGEST)
    if not (calls.has_packed_keys or isinstance(cache_seqlens, torch.Tensor)):
        length = min(max(0, integer("cache_seqlens", cache_seqlens, kind=LENGTHS)), LONGEST)
        cache_seqlens = torch.full((calls.batch,), length, dtype=torch.int32, device="cpu")
    in_cache = {
        "cache_seqlens": cache_seqlens,
        "cu_seqlens_k_new": cu_seqlens_k_new,
        "cache_leftpad": cache_leftpad,
    }
    packed = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q}
    for name, tensor in (in_cache | packed).items():
        if tensor is not None:
            operand = describe(name, tensor, 1)
            operand.check_dtype(name, torch.int32)
            entries = calls.batch + name.startswith("cu_seqlens")
            operand.check_shape(name, (entries,), "batch_size")
    # Of lengths on a GPU, or else the current one.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if isinstance(cache_seqlens, torch.Tensor) and cache_seqlens.is_cuda:
        device = cache_seqlens.device
    gpu = gpu_for_call(device, calls.sm_margin)
    are_on_host = all(one is None or one.is_cpu for one in in_cache.values())
    if calls.has_packed_queries or calls.num_splits or not are_on_host:
        return calls
    new = most_new if cu_seqlens_k_new is None else cu_seqlens_k_new.long().diff()
    keys = cache_seqlens.long() + new - (0 if cache_leftpad is None else cache_leftpad)
    lengths = keys.tolist()
    group = calls.heads_q // calls.heads_kv
    sizes = Sizes(calls.batch, calls.seqlen_q, calls.heads_kv, group, max(lengths))
    key_bytes = (calls.head_dim + calls.head_dim_v) * calls.dtype.itemsize
    # Whole tiles of the decode kernel are no gain where the forward kernel serves calls.
    spec = AttentionSpec("bfloat16", calls.head_dim, calls.head_dim_v, Band.of(calls.window))
    problem = Problem(spec, *sizes[:2], longest_k, calls.heads_kv, group, calls.window)
    signature = Signature.of(
        CACHE, problem, gpu, sm_margin=calls.sm_margin,
        cache=CacheLayout(calls.page_size or 0, left_padded=cache_leftpad is not None),
        has_packed_queries=calls.seqlen_q > MOST_OF_DECODE,
    )  # fmt: skip
    is_forward = choose_route(signature, PackedSizes.of(problem)).has_forward
    keeps_whole = not is_forward and whole_tiles_suffice(
        sizes, calls.window, key_bytes, lengths, gpu.num_sms
    )
    return calls._replace(keeps_tiles_whole=keeps_whole)


def check_calls(calls: SchedulerMetadata) -> None:
    """Raise unless there are kernels for what calls have in common."""
    group, rest = divmod(calls.heads_q, calls.heads_kv)
    if rest:
        heads = f"{calls.heads_q} and {calls.heads_kv}"
        raise ValueError(f"num_heads_q must be a multiple of num_heads_kv, got {heads}")
    if not calls.has_packed_queries:
        Sizes(calls.batch, calls.seqlen_q, calls.heads_kv, group, 0).check(
            "batch_size, max_seqlen_q and the heads"
        )
    accepted = *DTYPES, FP8_DTYPE
    if not isinstance(calls.dtype, torch.dtype) or calls.dtype not in accepted:
        raise TypeError(f"qkv_dtype must be one of {accepted}, got {shown(calls.dtype)}")
