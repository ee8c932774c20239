"""How the attention of one step is run, decided once for all layers of a model.

The kernels read lengths on the device and cut keys by themselves, so calls need no schedule. What
the host can add, where it knows the lengths: of equal queries on a cache, that cutting does not
pay, since whole tiles need no workspace and no merge; of packed queries, the table of tiles
(`fa3.calls.known_lengths`), which each call would have to have made by a kernel. Lengths on a GPU
are described only, or with FA3_ASSERTIONS=1 read back to be checked (`fa3.calls.assertions`).
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fa3.calls.assertions import is_visible, read_back
from fa3.calls.call import LENGTHS, LENGTHS_OF_PACKED, MOST_RAGGED_ROWS
from fa3.calls.devices import gpu_of, reserve_sms
from fa3.calls.known_lengths import HostSeqlens, host_lengths
from fa3.calls.modifiers import structure_of
from fa3.calls.operands import (
    DTYPES,
    FP8_DTYPE,
    Operand,
    check_dtype,
    check_shape,
    describe_unaligned,
    dtype_of_output,
    operand_of,
)
from fa3.calls.options import (
    Options,
    as_pair,
    check_window,
    converted,
    integer,
    reject_unsupported,
)
from fa3.calls.packed_calls import RaggedCall, plan_varlen
from fa3.calls.values import check_leftpads
from fa3.complaints import kind_of
from fa3.planning.decode import Sizes
from fa3.planning.gpu import H200, Gpu
from fa3.planning.host_table import TableKind
from fa3.planning.routes import CACHE, PackedSizes, Signature, choose_route
from fa3.planning.whole_tiles import whole_tiles_suffice
from fa3.primitives.arithmetic import LARGEST
from fa3.primitives.cache_blocks import CacheLayout
from fa3.problem import (
    FP8_UNIT,
    HEAD_DIM_UNIT,
    MAX_HEAD_DIM,
    NO_BOUND,
    REMEMBERED,
    AttentionSpec,
    Window,
)
from fa3.schedules.sequences import LONGEST
from fa3.settings import check_settings

IN_METADATA = ("scheduler_metadata",) * 4
"""Where lengths come from, each of them, that are in the metadata of a step."""

USUAL_SOFTCAP = 50.0
"""The softcap that is planned for where calls have one, of which no more is said here. Like other
usual ones, and none, it gives bfloat16 a fixed reference, which the costs of tiles depend on. With
one up to 5.5 or above 60 a call in bfloat16 whose tiles may be cut walks another table, which the
first such call has made; in a CUDA graph that is captured before, the kernel makes it."""


@dataclass(frozen=True, slots=True)
class SchedulerMetadata:
    """What calls of one shape have in common, and how they are run.

    Attributes:
        dtype: of the cache and, unless it is FP8, of q.
        page_size: tokens of a page; None without pages.
        window: the keys that a query sees, with causal folded in.
        num_splits, sm_margin: as asked for; the calls' own are to be these, or left at 0.
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
    keeps_tiles_whole: bool = False

    def check(self, **of_call) -> None:
        """Raise ValueError unless a call is what this was made for."""
        for name, value in of_call.items():
            expected = getattr(self, name)
            if value != expected:
                raise ValueError(
                    f"scheduler_metadata was made for {name} {expected}, the call has {value}"
                )

    def splits_and_margin(
        self,
        options: Options,
        q: torch.Tensor | Operand,
        k: torch.Tensor | Operand,
        v: torch.Tensor | Operand,
        has_pages: bool,
        batch: int,
        seqlen_q: int,
    ) -> tuple[int, int]:
        """num_splits and sm_margin of a call on a cache; raises unless this was made for it."""
        self.check(
            batch=batch,
            seqlen_q=seqlen_q,
            heads_q=q.shape[-2],
            heads_kv=k.shape[2],
            head_dim=q.shape[-1],
            head_dim_v=v.shape[3],
            dtype=k.dtype,
            page_size=k.shape[1] if has_pages else None,
            window=options.window,
            has_softcap=bool(options.softcap),
        )
        return self.options(options.num_splits, options.sm_margin, options.batch_invariant)

    def options(self, num_splits: int, sm_margin: int, batch_invariant: bool) -> tuple[int, int]:
        """num_splits and sm_margin of a call, given its own.

        What was found for these lengths does not count where bits must not depend on them.
        """
        for name, given in (("num_splits", num_splits), ("sm_margin", sm_margin)):
            asked = getattr(self, name)
            if given not in (0, asked):
                raise ValueError(
                    f"{name} must be 0 or, as in scheduler_metadata, {asked}, got {given}"
                )
        whole = self.keeps_tiles_whole and not batch_invariant
        return 1 if whole else self.num_splits, self.sm_margin


@dataclass(slots=True, eq=False)
class PackedMetadata:
    """What calls on packed queries of the same lengths have in common.

    Fields:
        calls: what they have in common whatever the lengths are.
        has_packed_keys: whether keys are packed too, not in a cache.
        lengths: None if they are on a GPU.
        fitting: what the latest call led to that was found to be one of these calls.
    """

    calls: SchedulerMetadata
    has_packed_keys: bool
    lengths: HostSeqlens | None
    fitting: object = None

    def __reduce__(self):
        """Copy and pickle without what calls have led to: kernels are of this process."""
        return type(self), (self.calls, self.has_packed_keys, self.lengths)

    def check(self, has_packed_keys: bool | None = None, **of_call) -> None:
        """Raise ValueError unless a call is what this was made for."""
        if has_packed_keys not in (None, self.has_packed_keys):
            made, came = ("packed keys", "a cache")[:: 1 if self.has_packed_keys else -1]
            raise ValueError(f"scheduler_metadata was made for {made}, the call has {came}")
        self.calls.check(**of_call)


@dataclass(frozen=True, slots=True)
class StepLengths:
    """What a step says of its sequences, by the names of `get_scheduler_metadata`.

    Raises:
        ValueError: a tensor of packed sequences without those that it goes with.
    """

    batch: int
    max_seqlen_q: int
    max_seqlen_k: int
    max_seqlen_k_new: int
    cache_seqlens: int | torch.Tensor | None
    cache_leftpad: torch.Tensor | None
    cu_seqlens_k_new: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    seqused_q: torch.Tensor | None

    def __post_init__(self) -> None:
        for name, other in (
            ("cu_seqlens_k", "cu_seqlens_q"),
            ("seqused_q", "cu_seqlens_q"),
            ("seqused_q", "cu_seqlens_k"),
        ):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise ValueError(f"{name} must be None without {other}")

    @property
    def has_cache_on_gpu(self) -> bool:
        """Whether a tensor that says what is in the cache is on a GPU."""
        tensors = self.cache_seqlens, self.cu_seqlens_k_new, self.cache_leftpad
        return any(isinstance(one, torch.Tensor) and not one.is_cpu for one in tensors)

    def of_packed(self, may_cut: bool) -> HostSeqlens | None:
        """The lengths of packed queries and keys; None if one is on a GPU."""
        integers = self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_q, self.cache_seqlens
        ends_q, ends_k, used_q, used_k = on_host(LENGTHS_OF_PACKED, integers, self.batch)
        if ends_q is None:
            return None
        return self.checked(HostSeqlens.packed(ends_q, ends_k, used_q, used_k, may_cut))

    def of_packed_queries(self) -> HostSeqlens | None:
        """The lengths of packed queries and of keys in a cache; None if they cannot be seen."""
        keys = self.keys_in_cache()
        (ends_q,) = on_host(("cu_seqlens_q",), (self.cu_seqlens_q,), self.batch)
        if ends_q is None or keys is None:
            return None
        return self.checked(HostSeqlens.cached(ends_q, np.array(keys, np.int64)))

    def checked(self, lengths: HostSeqlens) -> HostSeqlens:
        """These lengths, if they are as short as the step says."""
        rows = MOST_RAGGED_ROWS, MOST_RAGGED_ROWS
        longest = self.max_seqlen_q, self.max_seqlen_k
        lengths.check_fit(("cu_seqlens_q", "cu_seqlens_q"), self.batch, rows, longest)
        return lengths

    def keys_in_cache(self) -> list[int] | None:
        """Keys of each sequence with the new tokens and without padding; None if not to be seen."""
        lengths = self.cache_seqlens
        if not isinstance(lengths, torch.Tensor):
            lengths = equal_lengths(self.batch, lengths)
        tensors = {
            "cache_seqlens": lengths,
            "cu_seqlens_k_new": self.cu_seqlens_k_new,
            "cache_leftpad": self.cache_leftpad,
        }
        check_entries(tensors, self.batch)
        if not all(tensor is None or is_visible(tensor) for tensor in tensors.values()):
            return None
        before, ends, padding = (read_back(name, tensor) for name, tensor in tensors.items())
        new = self.new_tokens(ends)
        self.check_in_cache(before, new)
        totals = [a + b for a, b in zip(before, new, strict=True)]
        padding = padding or [0] * self.batch
        check_leftpads(padding, totals)
        return [total - pad for total, pad in zip(totals, padding, strict=True)]

    def new_tokens(self, ends: list[int] | None) -> list[int]:
        """What each sequence gets.

        Args:
            ends: what is in cu_seqlens_k_new.
        """
        if ends is None:
            return [self.max_seqlen_k_new] * self.batch
        if ends[0] != 0:
            raise ValueError(f"cu_seqlens_k_new must begin with 0, got {ends[0]}")
        return [b - a for a, b in itertools.pairwise(ends)]

    def check_in_cache(self, before: list[int], new: list[int]) -> None:
        """Raise unless sequences can have these lengths, and get these tokens."""
        for sequence, (length, count) in enumerate(zip(before, new, strict=True)):
            total = length + count
            if length < 0:
                raise ValueError(
                    f"cache_seqlens must be 0 or more, got {length} for sequence {sequence}"
                )
            if count < 0:
                raise ValueError(
                    f"cu_seqlens_k_new must not decrease, but falls by {-count} for sequence "
                    f"{sequence}"
                )
            if 0 < self.max_seqlen_k_new < count:
                raise ValueError(
                    f"max_seqlen_k_new must be the most tokens that a sequence gets, {count}, or "
                    f"more, got {self.max_seqlen_k_new}: sequence {sequence} of cu_seqlens_k_new "
                    "has them"
                )
            if total > LONGEST:
                raise ValueError(
                    f"cache_seqlens must be at most {LONGEST} with new tokens, got {total} for "
                    f"sequence {sequence}"
                )
            if total > self.max_seqlen_k:
                raise ValueError(
                    f"max_seqlen_k must be the longest length with new tokens, {total}, or more, "
                    f"got {self.max_seqlen_k}"
                )


def equal_lengths(batch: int, cache_seqlens: object) -> torch.Tensor:
    """One length for each sequence."""
    length = integer("cache_seqlens", cache_seqlens, kind=LENGTHS)
    if not 0 <= length <= LONGEST:
        raise ValueError(f"cache_seqlens must be from 0 to {LONGEST}, got {length}")
    return torch.full((batch,), length, dtype=torch.int32, device="cpu")


def check_entries(tensors: Mapping[str, torch.Tensor | None], batch: int) -> None:
    """Raise unless each has an int32 for each sequence, and ends of sequences one more."""
    for name, tensor in tensors.items():
        operand = operand_of(describe_unaligned(name, tensor))
        if operand is not None:
            entries = batch + name.startswith("cu_seqlens")
            check_dtype(name, operand, torch.int32)
            check_shape(name, operand, (entries,), "batch_size")


def on_host(
    names: Sequence[str], tensors: Sequence[torch.Tensor | None], batch: int
) -> list[np.ndarray | None]:
    """The numbers in integer tensors; nothing if one is on a GPU."""
    check_entries(dict(zip(names, tensors, strict=True)), batch)
    if not all(tensor is None or tensor.is_cpu for tensor in tensors):
        return [None] * len(tensors)
    return [
        None if tensor is None else host_lengths(name, tensor, batch)
        for name, tensor in zip(names, tensors, strict=True)
    ]  # fmt: skip


def metadata_of_call(
    metadata: object, has_packed_queries: bool, has_packed_keys: bool
) -> tuple[SchedulerMetadata, HostSeqlens | None]:
    """What calls with this metadata have in common, and the lengths, if the host knows them.

    Raises:
        TypeError, ValueError: it is none, or not of such calls.
    """
    if not isinstance(metadata, (SchedulerMetadata, PackedMetadata)):
        came = kind_of(metadata)
        raise TypeError(f"scheduler_metadata must come from get_scheduler_metadata, got {came}")
    if isinstance(metadata, PackedMetadata):
        if not has_packed_keys:
            metadata.check(has_packed_keys=False)
        if not has_packed_queries:
            raise ValueError("cu_seqlens_q must be given as to scheduler_metadata, got None")
        return metadata.calls, metadata.lengths
    if has_packed_keys:
        raise ValueError("scheduler_metadata must be made with the call's cu_seqlens_q")
    return metadata, None


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
) -> SchedulerMetadata | PackedMetadata:
    """Decide how calls of `flash_attn_with_kvcache` or `flash_attn_varlen_func` are run; made once,
    for all layers.

    A call checks that it is what this was made for. Lengths on a GPU are not read, except with
    FA3_ASSERTIONS=1, to check them as in the call.

    Without cu_seqlens_q: where num_splits is 0 and cache_seqlens is on the CPU, finds out whether
    whole tiles keep the SMs as busy as tiles that are cut and merged. If so, the calls run without
    workspace and merge. If lengths have changed by the time of a call, that can cost time, but
    never changes the result.

    With cu_seqlens_q, for packed queries, and all lengths on the CPU: builds the tile table,
    longest tile first, and copies it to the current GPU, so that no call has to build one. It also
    finds out which kernels have work. The lengths on the GPU must be the same in the call.
    Otherwise the result is undefined, but nothing outside of the tensors is read or written; a call
    that sees the lengths raises an error. So capture a CUDA graph that must serve other lengths
    without it. Calls on any streams may use it at the same time. A copy, also a pickled one, has
    the lengths but no table on a GPU: its first call there builds it.

    Args:
        batch_size: sequences.
        max_seqlen_q: queries of a sequence; with cu_seqlens_q the most.
        max_seqlen_k: longest length that a sequence may have in these calls.
        num_heads_q, num_heads_kv: heads of q and of the cache.
        headdim: columns of q and k_cache: a multiple of 8 up to 256.
        cache_seqlens: int or (batch_size,) int32, as in the call. With cu_seqlens_k the call's
            seqused_k, or None.
        qkv_dtype: torch.bfloat16 or torch.float16; torch.float8_e4m3fn for a cache in FP8,
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
        ValueError: an argument has a wrong value.
        RuntimeError: FA3_ASSERTIONS is 1 and a CUDA graph is being captured.
        NotImplementedError: the combination is not supported, or a tensor does not lie in memory.
    """
    check_settings()
    shares_heads = num_heads_q != num_heads_kv
    reject_unsupported(attention_chunk, pack_gqa, has_packing=True, shares_heads=shares_heads)
    calls = SchedulerMetadata(
        batch=bounded("batch_size", batch_size, 1, LARGEST),
        seqlen_q=bounded("max_seqlen_q", max_seqlen_q, 1, LARGEST),
        heads_q=bounded("num_heads_q", num_heads_q, 1, LARGEST),
        heads_kv=bounded("num_heads_kv", num_heads_kv, 1, LARGEST),
        head_dim=head_size("headdim", headdim),
        head_dim_v=head_size("headdim_v", headdim if headdim_v is None else headdim_v),
        dtype=qkv_dtype,
        page_size=None if page_size is None else bounded("page_size", page_size, 1, LONGEST),
        window=check_window(as_pair(window_size), converted("causal", causal)),
        has_softcap=converted("has_softcap", has_softcap),
        num_splits=converted("num_splits", num_splits),
        sm_margin=converted("sm_margin", sm_margin),
    )
    check_calls(calls, has_packed_queries=cu_seqlens_q is not None)
    lengths = StepLengths(
        batch=calls.batch,
        max_seqlen_q=calls.seqlen_q,
        max_seqlen_k=integer("max_seqlen_k", max_seqlen_k, 0),
        max_seqlen_k_new=bounded("max_seqlen_k_new", max_seqlen_k_new, 0, LONGEST),
        cache_seqlens=cache_seqlens,
        cache_leftpad=cache_leftpad,
        cu_seqlens_k_new=cu_seqlens_k_new,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
    )
    gpu = reserve_sms(gpu_of_calls(cache_seqlens), calls.sm_margin)
    if cu_seqlens_q is None:
        return metadata_of_equal(calls, lengths, gpu)
    if cu_seqlens_k is None:
        return metadata_of_cache(calls, lengths, gpu)
    return metadata_of_packed(calls, lengths, gpu)


def bounded(name: str, size: object, least: int, most: int) -> int:
    """A size from `least` to `most`."""
    size = integer(name, size, least)
    if size > most:
        raise ValueError(f"{name} must be at most {most}, got {size}")
    return size


def head_size(name: str, size: object) -> int:
    """Columns that kernels can have."""
    size = integer(name, size, 1)
    if size % HEAD_DIM_UNIT or size > MAX_HEAD_DIM:
        raise ValueError(
            f"{name} must be a multiple of {HEAD_DIM_UNIT} up to {MAX_HEAD_DIM}, got {size}"
        )
    return size


def check_calls(calls: SchedulerMetadata, has_packed_queries: bool) -> None:
    """Raise unless there are kernels for what calls have in common."""
    group, rest = divmod(calls.heads_q, calls.heads_kv)
    if rest:
        raise ValueError(f"num_heads_q must be a multiple of {calls.heads_kv}, got {calls.heads_q}")
    if not has_packed_queries:
        Sizes(calls.batch, calls.seqlen_q, calls.heads_kv, group, 0).check(
            "batch_size, max_seqlen_q and the heads"
        )
    accepted = *DTYPES, FP8_DTYPE
    if not isinstance(calls.dtype, torch.dtype) or calls.dtype not in accepted:
        raise TypeError(f"qkv_dtype must be one of {accepted}, got {calls.dtype}")
    sizes = calls.head_dim, calls.head_dim_v
    if calls.dtype == FP8_DTYPE and any(size % FP8_UNIT for size in sizes):
        raise ValueError(
            f"headdim and headdim_v must be multiples of {FP8_UNIT} with qkv_dtype {FP8_DTYPE}, "
            "got {} and {}".format(*sizes)
        )


def metadata_of_equal(
    calls: SchedulerMetadata, lengths: StepLengths, gpu: Gpu
) -> SchedulerMetadata:
    """Metadata of calls on a cache whose sequences have equal queries.

    Args:
        gpu: without the SMs that are reserved.
    """
    keys = lengths.keys_in_cache()
    if keys is None or calls.num_splits or lengths.has_cache_on_gpu:
        return calls
    group = calls.heads_q // calls.heads_kv
    sizes = Sizes(calls.batch, calls.seqlen_q, calls.heads_kv, group, max(keys))
    key_bytes = (calls.head_dim + calls.head_dim_v) * calls.dtype.itemsize
    whole = whole_tiles_suffice(sizes, calls.window, key_bytes, keys, gpu.num_sms)
    return replace(calls, keeps_tiles_whole=whole)


def metadata_of_cache(calls: SchedulerMetadata, lengths: StepLengths, gpu: Gpu) -> PackedMetadata:
    """Metadata of calls whose queries are packed and whose keys are in a cache."""
    known = lengths.of_packed_queries()
    if known is None:
        return PackedMetadata(calls, False, None)
    spec, window = spec_of_calls(calls, calls.seqlen_q, lengths.max_seqlen_k)
    heads = calls.heads_q, calls.heads_kv
    layout = CacheLayout(calls.page_size or 0, is_fp8=calls.dtype == FP8_DTYPE)
    signature = Signature(CACHE, spec, window, *heads, gpu, cache=layout)
    longest = calls.seqlen_q, max(1, lengths.max_seqlen_k)
    most_rows = PackedSizes(calls.batch, calls.heads_q, MOST_RAGGED_ROWS, 0, *longest)
    route = choose_route(signature, most_rows._replace(fewest_q=known.fewest_q))
    if route.has_forward:
        kind = signature.plan.table_kind(window, route.most_queries, *heads, may_cut=False)
        upload(known, kind)
    return PackedMetadata(calls, False, known)


def metadata_of_packed(calls: SchedulerMetadata, lengths: StepLengths, gpu: Gpu) -> PackedMetadata:
    """Metadata of calls whose queries and keys are packed."""
    if calls.page_size is not None:
        raise ValueError("page_size must be None with cu_seqlens_k: keys are packed")
    if calls.dtype == FP8_DTYPE:
        raise ValueError(f"qkv_dtype must be 16 bits with cu_seqlens_k, got {calls.dtype}")
    if calls.num_splits > 1:
        raise ValueError(f"num_splits must be 0 or 1 with cu_seqlens_k, got {calls.num_splits}")
    may_cut = calls.num_splits == 0
    known = lengths.of_packed(may_cut)
    if known is None:
        return PackedMetadata(calls, True, None)
    has_used = lengths.seqused_q is not None, lengths.cache_seqlens is not None
    # No matter how many sequences and queries there are.
    call = planned_call(replace(calls, batch=1, seqlen_q=1), has_used, gpu)
    most = call.most_short_of_table(known, calls.heads_q)
    if most is not None:
        upload(
            known, call.plan.table_kind(call.window, most, calls.heads_q, calls.heads_kv, may_cut)
        )
    return PackedMetadata(calls, True, known)


@functools.lru_cache(maxsize=REMEMBERED)
def planned_call(calls: SchedulerMetadata, has_used: tuple[bool, bool], gpu: Gpu) -> RaggedCall:
    """What calls on packed keys lead to, whatever the lengths are."""
    spec, window = spec_of_calls(calls, MOST_RAGGED_ROWS, MOST_RAGGED_ROWS)
    return plan_varlen(spec, window, calls.heads_q, calls.heads_kv, *has_used, gpu, calls.sm_margin)


def spec_of_calls(
    calls: SchedulerMetadata, seqlen_q: int, seqlen_k: int
) -> tuple[AttentionSpec, Window]:
    """What is compiled for sequences up to these lengths, and the bounds that they may have."""
    window = calls.window.tighten(seqlen_q, seqlen_k)
    structure = structure_of(USUAL_SOFTCAP * calls.has_softcap, None, None, window.right == 0)
    dtype = dtype_of_output(calls.dtype)
    return structure.spec(dtype, calls.head_dim, calls.head_dim_v, window), window


def upload(lengths: HostSeqlens, kind: TableKind) -> None:
    """Make a table on the current GPU, if there is one and it can be copied there."""
    if torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
        lengths.upload(kind, torch.device("cuda", torch.cuda.current_device()))


def gpu_of_calls(cache_seqlens: int | torch.Tensor | None) -> Gpu:
    """The GPU of the calls: where the lengths are, else the current one."""
    if isinstance(cache_seqlens, torch.Tensor) and cache_seqlens.device.type == "cuda":
        return gpu_of(cache_seqlens.device)
    if torch.cuda.is_available():
        return gpu_of(torch.device("cuda", torch.cuda.current_device()))
    return H200
