"""`warmup`: compile all kernels that a model can need, in parallel.

The planner says which kernels these are, over a grid of batch sizes and lengths. So do the plans of
packed sequences and of decoding. Several processes compile them; they meet in the cache on disk. No
GPU is needed.
"""

import argparse
import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fa3.calls.call import MOST_RAGGED_ROWS, ROTARY_UNIT
from fa3.calls.devices import gpu_of
from fa3.calls.options import as_pair, check_window, flag, integer, real
from fa3.complaints import shown
from fa3.kernels.append import Append, Rotary
from fa3.kernels.decode import Decode
from fa3.kernels.kernel_base import KernelBase
from fa3.kernels.transpose import Transpose
from fa3.planning.costs import H100, H200, Gpu
from fa3.planning.decode import FULL, MOST_MERGED_ROWS, SHARED_ROWS, DecodePlan, Sizes, config_of
from fa3.planning.explanation import describe_kernel
from fa3.planning.planner import plan_forward
from fa3.planning.routes import CACHE, FORWARD, PACKED, SPLIT, Signature, launches_of_route
from fa3.primitives.cache_blocks import CacheLayout
from fa3.primitives.wgmma import ROWS
from fa3.problem import FP8, NO_BOUND, AttentionSpec, Problem, Window
from fa3.running.code_cache import cache_dir, is_unchanged
from fa3.running.compiler import is_on_disk
from fa3.schedules.sequences import LONGEST
from fa3.scores.masks import Band
from fa3.scores.scores import Softcap
from fa3.scores.templates import Template
from fa3.settings import check_settings
from fa3.tools.compile_pool import compile_all
from fa3.tools.models import (
    CACHE_DTYPES,
    CALLS,
    PAGE_SIZES,
    ROTARIES,
    SHORT_DTYPES,
    Model,
    preset_of,
)

BATCHES = (1, 2, 4, 8, 16, 32, 64, 256)

SEQLENS = (
    1, 2, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192,
    16384, 32768, 65536, 131072,
)  # fmt: skip
"""Batch sizes and lengths that the planner is asked about. Random problems of up to 1M keys, 2,300
to 5,600 for each of four presets, led to one kernel more at most: gemma2-9b's 21 times of 4,577."""

MOST_TOKENS = 1 << 20  # most keys of a batch that the planner is asked about


def warmup(
    heads: tuple[int, int] | None = None,
    head_dim: int | None = None,
    *,
    preset: str | Path | None = None,
    head_dim_v: int | None = None,
    dtype: str | torch.dtype | None = None,
    causal: bool = True,
    window_size: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: bool = False,
    calls: Iterable[str] = tuple(CALLS),
    page_sizes: Sequence[int] = PAGE_SIZES,
    rotary: str = "halves",
    cache_dtype: str = "auto",
    processes: int | None = None,
    dry_run: bool = False,
) -> str:
    """Compile all kernels that a model can need.

    These are the kernels that the planner chooses for batch sizes up to 256 and lengths up to 128k,
    on the Hopper GPUs of this machine, or else on an H200 and an H100; those for packed sequences;
    those that attend to a cache, and append to it. Kernels that are on disk already are not
    compiled again. Needs no GPU. The first call of a kernel then loads it, in milliseconds.

    Args:
        heads: (heads_q, heads_kv).
        head_dim: columns of q and k.
        preset: a model of `fa3.tools.models.PRESETS`, or the path of a Hugging Face `config.json`
            of a causal decoder. It says sizes, mask, softcap and sinks; other options go first.
        head_dim_v: columns of v; head_dim if not given.
        dtype: bf16, fp16 or e4m3, or torch's names; by default the dtype of a `config.json`, or
            else bf16. With e4m3 caches are FP8, too, and tokens are appended from bf16.
        causal: whether keys after a query's own position are hidden.
        window_size: keys that a query sees before and after its own position, as (left, right), if
            the model has a window; -1 for all. causal sets right to 0.
        softcap: bound of the scores; 0 for none.
        sinks: whether heads have sinks, in the model's dtype.
        calls: what the model is run through: "dense" is `flash_attn_func`, "packed"
            `flash_attn_varlen_func`, "cache" `flash_attn_with_kvcache`, and "paged"
            `flash_attn_varlen_func` with a page_table, as vLLM calls it; all by default.
        page_sizes: tokens of a page of the caches, 0 for a cache without pages.
        rotary: what turns together when tokens are appended, "halves" or "pairs" of all columns;
            "none" for no embedding.
        cache_dtype: of the caches: "auto" for the model's, or "fp8" for float8_e4m3fn.
        processes: how many compile and print what is done; one for each core by default.
        dry_run: whether to list the kernels only, and compile none.

    Returns:
        how many kernels the model can need, and how many were on disk; with dry_run also which.

    Raises:
        TypeError: an option has a wrong type.
        ValueError: an option has a wrong value, or neither sizes nor a preset are given.
        RuntimeError: kernels could not be compiled, or not be kept; what was printed says why.
    """
    check_settings()
    begin = time.perf_counter()
    model = preset_of(preset) if preset is not None else None
    causal, window = flag("causal", causal), None
    head_dim = None if head_dim is None else integer("head_dim", head_dim, 1)
    if window_size is not None or not causal:
        bounds = (NO_BOUND, NO_BOUND) if window_size is None else window_size
        window = check_window(as_pair(bounds), causal)
    counts = (None, None) if heads is None else values_of("heads", heads, integer)
    if len(counts) != 2:
        raise ValueError(f"heads must be two integers (heads_q, heads_kv), got {counts}")
    model = with_options(
        model,
        heads_q=counts[0],
        heads_kv=counts[1],
        head_dim=head_dim,
        head_dim_v=head_dim if head_dim_v is None else integer("head_dim_v", head_dim_v, 1),
        dtype=None if dtype is None else name_of_dtype(dtype),
        windows=window and (window,),
        softcap=real("softcap", softcap) or None,
        sinks=flag("sinks", sinks) or None,
        has_fp8_cache=one_of("cache_dtype", cache_dtype, CACHE_DTYPES) == "fp8" or None,
    )
    calls = values_of("calls", calls, one_of, CALLS)
    page_sizes = values_of("page_sizes", page_sizes, integer, 0)
    processes = None if processes is None else integer("processes", processes, 1)
    wanted = dict.fromkeys(kernels_of(model, calls, page_sizes, rotary_of(model, rotary)))
    if not wanted:
        raise ValueError(
            f"calls and page_sizes must ask for a kernel, got {calls} and {page_sizes}: 'paged' "
            "takes page sizes of 1 or more, 'cache' also 0"
        )
    absent = tuple(kernel for kernel in wanted if not is_on_disk(kernel))
    total, stored = f"{len(wanted)} kernels:", len(wanted) - len(absent)
    if dry_run:
        places = dict.fromkeys(wanted, "on disk") | dict.fromkeys(absent, "to compile")
        lines = [f"{place:11} {describe_kernel(kernel)}" for kernel, place in places.items()]
        return "\n".join([*lines, f"{total} {stored} on disk, {len(absent)} to compile"])
    if absent:
        compile_all(absent, processes)
        check_kept(absent)
    seconds = f"{time.perf_counter() - begin:.0f} s"
    return f"{total} {stored} were on disk, {len(absent)} compiled, in {seconds}"


def run_compile(options: argparse.Namespace) -> None:
    """What `fa3 compile` does: `warmup` with the options of the command line."""
    named = {name: one for name, one in vars(options).items() if one is not None}
    del named["command"]
    print(warmup(**named | {"causal": options.causal and options.window_size is None}))


def with_options(model: Model | None, **options: object) -> Model:
    """Return a model with the options that are not None."""
    fields: dict[str, Any] = {name: one for name, one in options.items() if one is not None}
    if model is not None:
        model = replace(model, **fields)
    elif "heads_q" in fields and "head_dim" in fields:
        model = Model(**fields)
    else:
        raise ValueError("heads and head_dim must be given, or a preset; got one of them or none")
    model.check()
    return model


def one_of(name: str, value: str, accepted: Iterable[str]) -> str:
    """An option that is one of some names."""
    if value not in tuple(accepted):
        raise ValueError(f"{name} must be of {list(accepted)}, got {shown(value)}")
    return value


def values_of(name: str, values: Iterable, check: Callable, *limits: Any) -> tuple:
    """An option of several values, each as `check` returns it."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a tuple or a list, got {shown(values)}")
    return tuple(check(name, value, *limits) for value in values)


def name_of_dtype(dtype: str | torch.dtype) -> str:
    """The name of a dtype: "bfloat16" for torch.bfloat16 and for "bf16"."""
    name = str(dtype).removeprefix("torch.")
    return SHORT_DTYPES.get(name, name)


def check_kept(kernels: Sequence[KernelBase]) -> None:
    """Raise RuntimeError unless kernels are on disk."""
    lost = [kernel for kernel in kernels if not is_on_disk(kernel)]
    if lost:
        why = "what is printed above" if is_unchanged() else "sources of fa3 that have changed"
        raise RuntimeError(
            f"{len(lost)} of {len(kernels)} kernels are not in {cache_dir()}, because of {why}. "
            f"The first is {lost[0]}"
        )


# ------------------------------------------------------------------------------ which kernels


def kernels_of(
    model: Model, calls: Sequence[str], page_sizes: Sequence[int], rotary: Rotary | None
) -> Iterator[KernelBase]:
    """Yield all kernels that these calls can need, some repeatedly."""
    for kernel in kernels_of_queries(model, calls, page_sizes, rotary):
        yield kernel
        if isinstance(kernel, Decode) and kernel.cache.is_fp8:
            # Calls with more queries have tiles of more rows.
            kind = kernel.spec, kernel.cache, kernel.cut_type
            for rows in (SHARED_ROWS, ROWS):
                yield replace(kernel, config=config_of(*kind, rows))


def kernels_of_queries(
    model: Model, calls: Sequence[str], page_sizes: Sequence[int], rotary: Rotary | None
) -> Iterator[KernelBase]:
    """The same for some numbers of queries."""
    for is_packed in (False, True) if model.is_fp8 else ():
        if ("packed" if is_packed else "dense") in calls:
            yield Transpose(model.head_dim_v, is_packed)
    if "dense" in calls:
        yield from dense_kernels(model)
    for window in model.windows:
        if "packed" in calls:
            yield from routed_kernels(model, window)
        for page_size in page_sizes:
            cache = CacheLayout(page_size, is_fp8=model.has_fp8_cache or model.is_fp8)
            if "paged" in calls and page_size:
                yield from routed_kernels(model, window, cache)
                # Of a call with long sequences, FP8 queries become 16-bit ones.
                yield from kernels_on_cache(model, window, cache, is_packed=True)
            if "cache" in calls:
                # With tiles cut, and whole.
                yield from kernels_on_cache(model, window, cache)
                yield from kernels_on_cache(model, window, cache, num_splits=1)
                tiled = list(routed_kernels(model, window, cache, has_equal_queries=True))
                yield from tiled
                # Tiles are made of lengths with the new tokens.
                for writes_lengths in [False, *[True] * bool(tiled)]:
                    yield Append(
                        model.out_dtype, model.head_dim, model.head_dim_v, page_size > 0,
                        batch_indexed=False, ragged=False, rotary=rotary,
                        writes_lengths=writes_lengths, fp8=cache.is_fp8,
                    )  # fmt: skip


def spec_of(model: Model, window: Window, on_cache: bool = False) -> AttentionSpec:
    """The specs of a layer with this window."""
    scores = (Template.of(Softcap(float(model.softcap))),) if model.softcap else ()
    sinks = model.out_dtype if model.sinks else None
    head_dims = model.head_dim, model.head_dim_v
    spec = AttentionSpec(model.out_dtype, *head_dims, Band.of(window), scores, sinks)
    is_fp8 = model.is_fp8 and not on_cache
    return replace(spec, dtype=FP8, other_out=spec.dtype) if is_fp8 else spec


def known_gpus() -> list[Gpu]:
    """The GPUs to choose kernels for: this machine's, or all known."""
    gpus = []
    for index in range(torch.cuda.device_count()):
        with contextlib.suppress(ValueError):  # no Hopper GPU
            gpus.append(gpu_of(torch.device("cuda", index)))
    return list(dict.fromkeys(gpus)) or [H200, H100]


def dense_kernels(model: Model) -> Iterator[KernelBase]:
    """What the planner chooses for calls without a cache, of all sizes."""
    for gpu in known_gpus():
        for problem in dict.fromkeys(problems_of(model)):
            yield from (one.kernel for one in plan_forward(problem, gpu).launches())
    for window in () if model.is_fp8 else model.windows:
        yield from kernels_on_cache(model, window, FULL)
        yield from kernels_on_cache(model, window, FULL, num_splits=1)


def problems_of(model: Model) -> Iterator[Problem]:
    """Calls without a cache, of all sizes, some repeatedly."""
    ratio = model.heads_q // model.heads_kv
    for batch, seqlen_q, seqlen_k in itertools.product(BATCHES, SEQLENS, SEQLENS):
        if seqlen_q > seqlen_k or batch * seqlen_k > MOST_TOKENS:
            continue
        for window in model.windows:
            tight = window.tighten(seqlen_q, seqlen_k)
            sizes = batch, seqlen_q, seqlen_k, model.heads_kv, ratio
            yield Problem(spec_of(model, tight), *sizes, tight)


def routed_kernels(
    model: Model, window: Window, cache: CacheLayout | None = None, has_equal_queries: bool = False
) -> Iterator[KernelBase]:
    """Launches of packed queries of all routes; of equal ones, forward only."""
    heads, kind = (model.heads_q, model.heads_kv), PACKED if cache is None else CACHE
    # A bound that hides nothing, of few queries or few keys, is not compiled in.
    few = (1,) if cache else ()
    for sizes in itertools.product((*few, MOST_RAGGED_ROWS), (*few, LONGEST)):
        tight = window.tighten(*sizes)
        spec = spec_of(model, tight, cache is not None)
        room = {"cache": cache, "capacity": sizes[1]} if cache else {}
        signature = Signature(
            kind, spec, tight, *heads, H200, has_equal_queries=has_equal_queries, **room
        )
        for name in signature.names if cache is None or signature.may_have_both else ():
            if not has_equal_queries or name in (FORWARD, SPLIT):
                # So many queries that the decode kernel does not merge by itself.
                launches = launches_of_route(signature, name, MOST_MERGED_ROWS + 1)
                yield from (one.kernel for one in launches)


def kernels_on_cache(
    model: Model, window: Window, cache: CacheLayout, num_splits: int = 0, is_packed: bool = False
) -> Iterator[KernelBase]:
    """Launches of calls on a cache, of any lengths."""
    heads = model.heads_kv, model.heads_q // model.heads_kv
    kinds = {"is_packed": is_packed, "has_fp8_q": model.is_fp8}
    # A cache with room for 1 token only, as all short ones, needs no bound to the left.
    for capacity in (1, LONGEST):
        tight = Sizes(1, 1, *heads, capacity).bounds(window)
        problem = Problem(spec_of(model, tight, True), 1, 1, capacity, *heads, tight)
        # After a kernel that appends, tiles are cut otherwise. With many parts others merge.
        row = replace(problem, qhead_per_kvhead=1)  # tiles of many rows may be cut as this one's
        many = DecodePlan.of(row, H200, cache, num_splits, appends=True, **kinds)
        few = DecodePlan.of(replace(row, seqlen_k=1), H200, cache, num_splits, **kinds)
        for plan in (replace(many, problem=problem, cut=one.cut) for one in (many, few)):
            yield from filter(None, (plan.kernel(), plan.combine()))


def rotary_of(model: Model, rotary: str) -> Rotary | None:
    """Return the rotary embedding of a name in `ROTARIES`; None for "none"."""
    interleaved = ROTARIES[one_of("rotary", rotary, ROTARIES)]
    if interleaved is None:
        return None
    if model.head_dim % ROTARY_UNIT:
        raise ValueError(
            f"rotary must be 'none' with head_dim {model.head_dim}, got {rotary!r}: an embedding "
            f"turns a multiple of {ROTARY_UNIT} columns"
        )
    return Rotary(model.head_dim, interleaved, model.out_dtype)
