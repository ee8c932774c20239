"""Invalid arguments of all public functions, and what is said of each.

A row of a table is (calls, arguments, change, error, message): in each of the calls, each of the
arguments is changed. A function is called with the argument's value, a dict changes the arguments
that it names, and any other value takes the argument's place. The message begins with the argument.
"..." stands for any words, and "$" for the end.
"""

from dataclasses import replace

import numpy as np
import torch
from problems import make_problem
from score_problems import Span, Stairs
from valid_calls import (
    INDEXED,
    PAGED,
    PLAIN,
    PROBLEMS,
    RAGGED,
    STATE,
    Nothing,
    all_on_meta,
    cases,
    combine,
    config,
    dense,
    each,
    every_other,
    freed,
    in_inference,
    metadata_of_cache,
    metadata_of_packed,
    metadata_of_varlen,
    of_sizes,
    of_totals,
    on_meta,
    one_row,
    problem,
    rotary,
    rows,
    shared,
    shifted,
    to_fp8,
    turned,
    varlen,
    widened,
)
from varlen_problems import integers

import fa3
from fa3.calls.call import MOST_RAGGED_ROWS
from fa3.kernels.append import MOST_VECTORS
from fa3.planning.costs import H200
from fa3.primitives.arithmetic import LARGEST
from fa3.problem import Window
from fa3.schedules.recompute import RecomputeTiles
from fa3.scores.masks import Band

VALUE, TYPE, MISSING = ValueError, TypeError, NotImplementedError

MASK = Span(*torch.zeros(2, 4).int())
ONE = torch.tensor(1)
OUT = torch.empty(2, 20, 4, 64).bfloat16()
PACKED_OUT = torch.empty(21, 4, 64).bfloat16()

# ------------------------------------------------------------------------------------ the tables

ATTEND = "dense varlen cache"
ALL = "dense varlen cache metadata"
DROPOUT = "dense varlen dropout_mask"
REALS = "softmax_scale softcap"
DESCALES = "q_descale k_descale v_descale"
NO_ROWS = dict.fromkeys("qkv", OUT[:0])
NO_TENSOR = "must be a torch.Tensor, got"
DIMENSIONS = "must have 4 dimensions (batch, seqlen_"
DIMENSIONS_OF_ROWS = "must have 3 dimensions (total_"
NO_HEAD_DIM = "has head_dim 60, supported are multiples of 8 up to 256"
NOT_8 = "must have strides that are multiples of 8 elements (16 bytes), got stride"

TENSORS = [
    ("dense", "q v", lambda x: x[0], DIMENSIONS),
    ("dense", "v", lambda x: x[None], DIMENSIONS),
    ("varlen", "q", lambda x: x[None], DIMENSIONS_OF_ROWS),
    ("varlen", "k", lambda x: x[0], DIMENSIONS_OF_ROWS),
    ("cache", "q", lambda x: x[0], "must have 4 dim...(2, 4, 64)"),
    ("packed", "q", lambda x: x[None], "must have 3 dimensions"),
    ("dense varlen", "q k v", lambda x: x.tolist(), TYPE, f"{NO_TENSOR} list"),
    ("cache", "q k_cache v_cache k", lambda x: x.tolist(), TYPE, f"{NO_TENSOR} list"),
    ("cache", "q k_cache v_cache", None, TYPE, f"{NO_TENSOR} NoneType"),
    (ATTEND, "q", lambda x: x.float(), TYPE, "must be torch.bfloat16, torch.float16 or"),
    ("dense varlen pages", "k v", lambda x: x.half(), TYPE, "must be torch.bfloat16 like q, got"),
    ("cache", "k_cache k", lambda x: x.half(), TYPE, "must be torch.bfloat16 like q, got torch.fl"),
    *(
        row
        for call, name in (("varlen", "k"), ("cache", "k_cache"))
        for row in (
            (call, name, freed, MISSING, "must lie in memory, got a"),
            (call, name, lambda x: x.to_sparse(), MISSING, "must lie in memory, got a"),
            (call, name, lambda x: torch.nested.nested_tensor([x[0]]), MISSING, "must lie in"),
            (call, name, lambda x: x.float(), TYPE, "must be torch.bfloat16 like q, got torch"),
        )
    ),
    ("dense varlen", "v", on_meta, "must be on cpu like q, got meta"),
    ("cache", "k_cache rotary_cos", on_meta, "must be on cpu like q, got meta"),
    (f"{ATTEND} pages", "q", lambda x: x[..., :3, :], "must have a multiple of k...heads, got 3"),
    ("dense", "q", dict.fromkeys("kv", OUT[:, :, :0]), "must have a multiple of k's...4...and 0 "),
    (ATTEND, "q", lambda x: x[..., :60], NO_HEAD_DIM),
    ("dense varlen", "v", lambda x: x[..., :60], NO_HEAD_DIM),
    ("cache", "v_cache", lambda x: x[..., :60], NO_HEAD_DIM),
    *(
        ("dense", name, torch.zeros(2, n, 4, 512).bfloat16()[..., :size], f"has head_dim {size},")
        for size in (0, 4, 12, 100, 250, 264, 512)
        for name, n in (("q", 20), ("v", 30))
    ),
    ("dense", "k", lambda x: x[..., :32], "must have shape (2, 30, 2, 64) to go with q"),
    ("dense", "k", lambda x: x[:1], "must have shape (2, 30, 2, 64) to...got (1, 30"),
    ("dense", "v", lambda x: x[:, :20], "must have shape (2, 30, 2, 64) to...got (2, 20"),
    ("dense", "v", lambda x: x[:, :, :1], "must have shape (2, 30, 2, 64) to...got (2, 30"),
    ("varlen", "k", lambda x: x[..., :32], "must have shape (20, 2, 64) to go with q...got (20, 2"),
    ("varlen", "v", lambda x: x[:, :1], "must have shape (20, 2, 64) to go with k...got (20, 1"),
    ("varlen", "v", lambda x: x[:-1], "must have 20 rows like k, got 19"),
    ("pages", "k", lambda x: x[..., :32], "must have shape (3, 16, 2, 64) to go with q"),
    ("pages", "v", lambda x: x[:2], "must have shape (3, 16, 2, 64) to go with k, got"),
    ("cache", "k_cache", lambda x: x[..., :32], "must have shape...64)...32)"),
    ("cache", "v_cache", lambda x: x[:, :-1], "must have shape...to go with k_cache"),
    ("cache", "k", lambda x: x[:1], "must have shape (2, 2, 2, 64)...(1, 2, 2, 64)"),
    ("cache", "k", lambda x: x[:, :, :1], "must have shape (2, 2, 2, 64)"),
    ("cache", "k", lambda x: x[0], "must have 4 dim"),
    ("cache", "v", lambda x: x[:, :1], "must have shape (2, 2, 2, 64)...(2, 1, 2, 64)"),
    ("ragged", "k", lambda x: x[None], "must have 3 dim"),
    ("indexed", "k_cache", {"cache_batch_idx": None}, "must have 2 rows"),
    ("paged", "k_cache", dict.fromkeys(("k_cache", "v_cache"), lambda x: x[:, :0]),
     "must have pages of 1 token...page_table"),
    ("dense varlen", "q k v", turned, "must be contiguous in its last dimension, got stri"),
    ("cache", "q k_cache", turned, "must be contiguous in its last dimension, got stri"),
    ("dense varlen", "k", shifted, "starts 8 bytes after a multiple of 16"),
    ("dense varlen", "v", widened, NOT_8),
    ("varlen", "k", one_row, NOT_8),
    ("dense", "q", all_on_meta(dense()), "must be a CPU or CUDA tensor, got meta"),
    ("varlen", "q", all_on_meta(varlen()), "must be a CPU or CUDA tensor, got meta"),
    ("dense cache", "q", {"q": [[1.0]], "sinks": torch.ones(4)}, TYPE, f"{NO_TENSOR} list"),
    ("dense", "q", {"q": OUT[0], "alibi_slopes": torch.ones(4)}, DIMENSIONS),
    # What else a cache takes.
    ("cache", "k", None, "must be given with v"),
    ("cache", "v", None, "must be given with k"),
    ("cache", "cache_seqlens", None, "must be given with k"),
    ("cache", "rotary_cos", {"k": None, "v": None}, "must be None without k"),
    ("cache", "rotary_cos", None, "must be given with rotary_sin"),
    ("cache", "rotary_sin", lambda x: x[:-1], "must have shape...rotary_cos"),
    ("cache", "rotary_sin", lambda x: x.float(), TYPE, "must be...like rotary_cos"),
    ("cache", "rotary_cos", lambda x: x.double(), TYPE, "must be...float32...float64"),
    ("cache", "rotary_cos", lambda x: x[None], "must have 2 dim"),
    ("ragged", "rotary_seqlens", integers(1, 2), "must be None without rotary_cos and rotary_sin"),
    ("cache", "rotary_cos", rotary(0, 32), "must have a position, got none"),
    ("cache", "rotary_cos", rotary(64, 4), "has...rotary_dim of 8"),
    ("cache", "rotary_cos", rotary(64, 12), "has...rotary_dim of 24"),
    ("cache", "rotary_cos", rotary(64, 40), "has...64"),
    ("cache", "cache_seqlens", lambda x: x.long(), TYPE, "must be torch.int32, got torch.int64"),
    ("cache", "cache_seqlens", lambda x: x[:1], "must have shape (2,)...(1,)"),
    *each("cache", "cache_seqlens", TYPE, "must be an integer or an int32 torch.Tensor, got {}",
          (True, "True"), (7.0, "7.0"), ([7], "list")),
    ("cache", "cache_seqlens", on_meta, "must be on cpu...or on the CPU, got meta"),
    ("cache", "cache_seqlens", every_other, "must be contiguous"),
    ("packed", "cache_seqlens", integers(1, 2, 3), "must have shape"),
    ("paged", "page_table", lambda x: x.long(), TYPE, "must be torch.int32"),
    ("paged", "page_table", lambda x: x[0], "must have 2 dim"),
    ("paged", "page_table", lambda x: x[:1], "must have 2 rows...1"),
    ("paged", "page_table", turned, "must be contiguous"),
    ("indexed", "cache_batch_idx", lambda x: x[:1], "must have shape (2,)"),
    ("indexed", "cache_leftpad", lambda x: x.float(), TYPE, "must be torch.int32"),
    ("ragged", "cu_seqlens_k_new", lambda x: x[:2], "must have shape (3,)...(2,)"),
    ("cache", "k_cache", lambda x: x.clone().requires_grad_(), "requires grad"),
    ("cache", "k_cache", lambda x: x[:1].expand_as(x), "must not overlap itself...strides"),
    # Lengths of packed sequences.
    ("varlen", "cu_seqlens_q cu_seqlens_k", lambda x: x.tolist(), TYPE, f"{NO_TENSOR} list"),
    ("varlen pages", "cu_seqlens_q", None, TYPE, f"{NO_TENSOR} NoneType"),
    ("varlen", "cu_seqlens_q", lambda x: x[None], "must have shape (batch + 1,), got (1, 5"),
    ("varlen packed", "cu_seqlens_q", lambda x: x[:0], "must have shape (batch + 1,), got (0,)"),
    ("varlen packed", "cu_seqlens_q", lambda x: x.long(), TYPE, "must be torch.int32, got"),
    ("varlen", "cu_seqlens_q", lambda x: x[0], "must have shape (batch + 1,), got ()"),
    ("varlen", "cu_seqlens_q cu_seqlens_k", on_meta, "must be on cpu like q, got meta"),
    ("varlen", "cu_seqlens_q", every_other, "must be contiguous"),
    ("varlen", "cu_seqlens_k", lambda x: x.long(), TYPE, "must be torch.int32, got torch.int64"),
    ("varlen", "cu_seqlens_k", lambda x: x[:-1], "must have shape (5,) to go with cu_seqle"),
    ("varlen", "seqused_q", integers(1, 2, 3), "must have shape (4,) to go with"),
    ("varlen pages", "seqused_q", torch.ones(4), TYPE, "must be torch.int32, got torch.float32"),
    ("varlen", "seqused_k", integers(*range(5)), "must have shape (4,) to go with"),
    ("varlen", "seqused_k", integers(*range(8))[::2], "must be contiguous in its last"),
    ("pages", "seqused_q", integers(1), "must have shape (2,)"),
    ("pages", "seqused_k", lambda x: x.long(), TYPE, "must be torch.int32, got"),
    ("pages", "seqused_k", lambda x: x[:1], "must have shape (2,) to go with cu_seqlens_q"),
    ("pages", "seqused_k", None, "must be given with page_table"),
    ("pages", "cu_seqlens_k", integers(0, 1), "must be None with page_table"),
    ("pages", "k", lambda x: x[0], "must have 4 dimensions"),
    ("varlen", "s_aux", dict.fromkeys(("sinks", "s_aux"), torch.zeros(4)), "must be None with"),
    ("pages", "block_table", integers(0, 1), "must be None with page_table, for which"),
]  # fmt: skip

OUTPUTS = [
    ("dense varlen cache combine", "out", lambda x: [1.0], TYPE, f"{NO_TENSOR} list"),
    ("dense", "out", OUT[:, :-1], "must have shape (2, 20, 4, 64) to go with q and v, got (2, 19"),
    ("dense", "out", OUT[0], DIMENSIONS),
    ("varlen", "out", PACKED_OUT[:-1], "must have 21 rows like q, got 20"),
    ("varlen", "out", PACKED_OUT[None], DIMENSIONS_OF_ROWS),
    ("cache", "out", torch.empty(2, 2, 4, 32).bfloat16(), "must have shape (2, 2, 4, 64)"),
    ("cache", "out", torch.empty(2, 2, 4, 64), TYPE, "must be torch.bfloat16 like q, got torch.fl"),
    *(
        row
        for call, out in (("dense", OUT), ("varlen", PACKED_OUT))
        for row in (
            (call, "out", out.half(), TYPE, "must be torch.bfloat16 or torch.float32, got torch.f"),
            (call, "out", on_meta(out), "must be on cpu like q, got meta"),
            (call, "out", shifted(out), "starts 8 bytes after a multiple of 16"),
            (call, "out", widened(out), NOT_8),
            (call, "out", turned(out), "must be contiguous in its last dimension"),
            (call, "out", out[:1].expand_as(out), "must not overlap itself when it is"),
            (call, "out", out.clone().requires_grad_(), "requires grad, but would get no"),
            (call, "out", in_inference(out), "must not be an inference tensor"),
        )
    ),
    ("packed", "out", torch.empty(5, 2, 64).bfloat16(), "must have 4 rows like q, got 5"),
    ("packed", "out", torch.empty(1, 4, 2, 64).bfloat16(), "must have 3 dimensions"),
    ("packed", "out", torch.empty(4, 2, 64), TYPE, "must be torch.bfloat16 like q"),
    ("packed", "out", rows(4, 2, 64), "must not overlap itself"),
    ("packed", "out", torch.empty(513).bfloat16()[1:].view(4, 2, 64), "starts 2 bytes afte"),
    ("combine", "out", torch.empty(1, 5, 4, 64).expand(2, -1, -1, -1), "must not overlap itself"),
    ("combine", "out", torch.zeros(2, 5, 4, 32), "must have shape"),
    ("combine", "out", in_inference(torch.zeros(2, 5, 4, 64)), "must not be an inference tensor"),
    ("combine", "out", {"out": torch.zeros(2, 5, 4, 64), "out_dtype": torch.float16}, TYPE,
     "must be torch.float16 like out_dtype, got torch.float32"),
    *each("combine", "out_dtype", TYPE, "must be{}", ("float32", "...got 'float32'"),
          ([], " a torch.dtype, got list"), (torch.int8, " float32, bfloat16 or"),
          (torch.float64, " float32, bfloat16 or")),
    ("combine", "out_partial", torch.zeros(2, 2, 2, 8), "must have 5 dim"),
    ("combine", "out_partial", torch.zeros(0, 2, 5, 4, 64), "must have a part"),
    ("combine", "out_partial", all_on_meta(combine()), "must be a CPU or CUDA tensor, got meta"),
    ("combine", "out_partial", [1.0], TYPE, f"{NO_TENSOR} list"),
    ("combine", "out_partial", torch.zeros(3, 2, 5, 4, 12), "has head_dim 12"),
    ("combine", "out_partial lse_partial", lambda x: x.half(), TYPE, "must be torch.float32"),
    ("combine", "lse_partial", None, TYPE, f"{NO_TENSOR} NoneType"),
    ("combine", "lse_partial", torch.zeros(3, 2, 4, 5), "must have shape"),
    ("combine", "lse_partial", on_meta, "must be on cpu"),
]  # fmt: skip

VALUES = [
    ("varlen", "cu_seqlens_q", integers(1, 7, 7, 8, 21), "must begin with 0, got 1"),
    ("varlen", "cu_seqlens_k", integers(-1, 9, 14, 14, 20), "must begin with 0, got -1"),
    ("varlen", "cu_seqlens_q", integers(0, 7, 6, 8, 21), "must not decrease, got 7 to 6 for"),
    ("varlen", "cu_seqlens_k", integers(0, 9, 14, 2, 1), "must not decrease, got 14 to 2 for"),
    ("varlen", "cu_seqlens_q", integers(0, 7, 7, 8, 22), "must end at 21, the rows of q,...got 22"),
    ("varlen", "cu_seqlens_k", integers(0, 9, 14, 14, 21), "must end at 20, the rows of k,...got"),
    ("varlen", "max_seqlen_q", 12, "must be 13 or more, the rows of q that sequence 3 has, got 12"),
    ("varlen", "max_seqlen_k", 0, "must be 9 or more, the rows of k that sequence 0 has, got 0"),
    ("varlen", "max_seqlen_q", {"max_seqlen_q": 6, "seqused_q": integers(7, 9, 0, 3)}, "must be 7"),
    ("varlen", "seqused_q seqused_k", integers(3, -2, 0, 0), "must be...0...got -2"),
    ("pages", "seqused_q", integers(3, -2), "must be...0...got -2"),
    ("pages", "max_seqlen_q", 2, "must be 3 or more"),
    ("pages", "seqused_k", lambda x: x + 40, "must be from 0 to 32, what the cache"),
    ("pages", "seqused_k", integers(3, -2), "must be...0...got -2"),
    ("pages", "page_table", lambda x: x + 9, "must have pages from 0 to 2 where"),
    ("packed", "max_seqlen_q", 1, "must be 2 or more"),
    ("packed", "cu_seqlens_q", integers(0, 9, 2), "must not decrease, got 9 to 2"),
]  # fmt: skip
"""What integer tensors must not have, which the CPU sees."""

VALUES_OF_CACHES = [
    ("cache", "cache_seqlens", integers(20, 40), "must be from 0 to 39...40...sequence 1"),
    ("cache", "cache_seqlens", integers(-1, 3), "must be from 0 to 39...-1...sequence 0"),
    ("cache", "cache_seqlens", integers(20, 38), "must leave room for k...1...38...2...39"),
    ("paged", "page_table", lambda x: x.clone().fill_(-1), "must have pages from 0...-1..."),
    ("paged", "page_table", lambda x: x + 100, "must have pages from 0...(0, 0)"),
    ("indexed", "cache_batch_idx", integers(0, 3), "must be from 0 to 2...3...sequence 1"),
    ("indexed", "cache_batch_idx", integers(-1, 0), "must be from 0 to 2...-1...sequence 0"),
    ("indexed", "cache_batch_idx", integers(1, 1), "must not repeat...got 1 2 times"),
    ("indexed", "cache_leftpad", integers(21, 0), "must be from 0...20...21...sequence 0"),
    ("indexed", "cache_leftpad", integers(0, -1), "must be from 0...-1...sequence 1"),
    ("ragged", "cu_seqlens_k_new", integers(0, 2, 4), "must...from 0 to k's 5...[0, 2, 4]"),
    ("ragged", "cu_seqlens_k_new", integers(1, 2, 5), "must...from 0 to k's 5...[1, 2, 5]"),
    ("ragged", "cu_seqlens_k_new", integers(0, 6, 5), "must...from 0 to k's 5...[0, 6, 5]"),
    ("ragged", "cache_seqlens", integers(20, 38), "must leave room for k: sequence 1...3"),
    ("cache", "rotary_cos", rotary(31, 16), "has 31 positions, sequence 1 needs 32"),
    ("paged", "cache_seqlens", {"page_table": integers(0, 1).view(2, 1)}, "must be"),
    ("paged", "page_table", shared((0, 1, 0, 1), (20, 20)), "must not give...both append to it"),
    ("paged", "page_table", shared((0, 1, 2, 0), (14, 30)), "must not give...both append to it"),
    ("paged", "page_table", shared((0, 1, 0, 2), (4, 10)), "must not give...one has tokens and"),
    ("paged", "page_table", shared((0, 0, 1, 2), (15, 3)), "must not give...one has tokens and"),
    ("paged", "page_table", shared((3, 3, 1, 2), (30, 3)), "must not give...one has tokens and"),
]  # fmt: skip
"""What the integer tensors of a call on a cache must not have, wherever they are."""

FAR_VALUES = [
    (replace(INDEXED, page_size=16), {"cache_leftpad": integers(-7, 2**31 - 1)}),
    (replace(INDEXED, page_size=16), {"cache_batch_idx": integers(-(2**31), 2**31 - 1)}),
    (replace(PAGED, page_size=1), {"page_table": lambda x: x - 2**30}),
    (PLAIN, {"cache_seqlens": integers(-(2**31), 2**31 - 1)}),
    (RAGGED, {"cu_seqlens_k_new": integers(2 - 2**31, 1, 5)}),
]
"""Values that lead far away: (problem, changes)."""

FLAGS = [
    ("dense", "causal deterministic return_lse return_attn_probs"),
    ("varlen", "causal deterministic return_lse return_attn_probs return_softmax_lse"),
    ("cache", "causal rotary_interleaved return_softmax_lse batch_invariant return_lse"),
    ("metadata", "causal has_softcap"),
    ("problem", "causal"),
    ("backward", "is_causal"),
    ("gradients", "causal deterministic fp32_dkv accumulate_dkv"),
    ("quantize", "smooth_k hadamard"),
]
COUNTS = [
    (ALL, "attention_chunk num_splits sm_margin"),
    ("varlen", "max_seqlen_q max_seqlen_k"),
    ("metadata", "max_seqlen_k_new page_size headdim_v"),
    ("backward gradients", "sm_margin"),
]
TAKE_TENSORS = [
    (ATTEND, "alibi_slopes sinks"),
    ("varlen", "cu_seqlens_q cu_seqlens_k seqused_q seqused_k"),
    ("cache", "k rotary_cos rotary_sin cache_batch_idx cache_leftpad page_table"),
    (ATTEND, DESCALES),
    ("metadata", "cu_seqlens_q cu_seqlens_k_new cache_leftpad"),
]
WINDOWS = f"{ALL} problem gradients"

OPTIONS = [
    *(
        row
        for calls, names in FLAGS
        for row in each(calls, names, TYPE, "must be a bool, got {}", ("no", "'no'"), (1, "1"),
                        (0.0, "0.0"), (None, "None"), ([], "list"), (ONE == 1, "Tensor"))
    ),
    *(
        row
        for calls, names in COUNTS
        for row in each(calls, names, TYPE, "must be an integer, got {}", (True, "True"),
                        (1.0, "1.0"), ("1", "'1'"), (ONE, "Tensor"))
    ),
    *((calls, names, -1, "must be...got -1$") for calls, names in COUNTS),
    ("varlen", "max_seqlen_q max_seqlen_k", None, TYPE, "must be an integer, got None"),
    ("pages", "max_seqlen_k", None, TYPE, "must be an integer, got None"),
    ("pages", "max_seqlen_k", -1, "must be 0 or more, got -1"),
    ("packed", "max_seqlen_q", None, "must be given with cu_seqlens_q"),
    ("cache", "max_seqlen_q", 2, "must be None without cu_seqlens_q"),
    ("cache", "max_seqlen_q", 2.0, TYPE, "must be an integer, got 2.0"),
    ("cache", "rotary_seqlens", integers(3, -3), "must be"),
    *each(ATTEND, REALS, TYPE, "must be a float, got {}",
          (True, "True"), ("1", "'1'"), (1j, "1j"), (ONE, "Tensor")),
    *each(ATTEND, REALS, VALUE, "must be...positive and finite in ..., got {}", (-1, "-1"),
          (-1.0, "-1.0$"), (np.float32("nan"), "nan"), (np.inf, "inf"), (10**400, "inf")),
    *each(ATTEND, REALS, VALUE, "must be", (1e-46, ""), (1e39, ""), (2.0**-127, "")),
    (ATTEND, "softmax_scale", 0.0, "must be"),
    *(
        row
        for calls, names in TAKE_TENSORS
        for row in each(calls, names, TYPE, "must be a torch.Tensor, got {}",
                        ([1.0], "list"), (1, "int"), (np.ones(3), "ndarray"))
    ),
    *(
        row
        for value in (ONE, np.ones(2), False, 0, "x")
        for row in (
            (ATTEND, "qv", value, MISSING, "must be None, got ...: it is not supported$"),
        )
    ),
    (ATTEND, DESCALES, ONE, "must be None unless ... is torch.float8_e4m3fn, got"),
    *each(ATTEND, DESCALES, TYPE, f"{NO_TENSOR} {{}}", (np.ones(2), "ndarray"), (0, "int"),
          (False, "bool"), ("x", "str")),
    *each(WINDOWS, "window_size", TYPE, "must be two integers (left, right), each -1...got {}",
          ((True, False), "True"), ((1, 0.0), "0.0"), ("ab", "'a'"), ((ONE, 0), "Tensor"),
          (ONE, "Tensor"), ({3, 0}, "set"), (None, "None"), (3, "3"), (([1], 0), "list")),
    *each(WINDOWS, "window_size", VALUE, "must be two integers (left, right)...got {}",
          ((3,), "(3,)"), ((3, -2), "(3, -2)"), ((1, 2, 3), "(1, 2, 3)")),
    ("dense", "window_size", {"window_size": 3, "alibi_slopes": torch.ones(4)}, TYPE, "must be"),
    *each(ALL, "pack_gqa", TYPE, "must be a bool, got {}",
          ("x", "'x'"), (0, "0"), (1.0, "1.0"), (ONE, "Tensor")),
    (ALL, "attention_chunk", 64, MISSING, "must be 0 or None...64"),
    (ALL, "sm_margin", 132, "must be from 0 to 131, got 132"),
    ("dense", "sm_margin", {**NO_ROWS, "sm_margin": -1}, "must be 0 or more, got -1"),
    ("cache pages", "pack_gqa", False, MISSING, "must be None or True here, got False: the query"),
    ("varlen", "pack_gqa", True, MISSING, "must be None or False here, got True: the query heads"),
    ("metadata", "pack_gqa", {"pack_gqa": False, "num_heads_kv": 2}, MISSING, "must be None or"),
    ("dense varlen", "num_splits", 2, MISSING, "must be 0 or 1 here, got 2: the"),
    ("dense varlen pages", "score", ONE, TYPE, "must be a fa3.Score, got Tensor"),
    ("dense varlen", "mask", True, TYPE, "must be a fa3.Mask, got bool"),
    ("dense", "score", MASK, TYPE, "must be a fa3.Score, got Span"),
    ("dense", "score", lambda x: lambda logit, at: logit, TYPE, "must be a fa3.Score, got functio"),
    ("pages", "mask", Stairs, TYPE, "must be a fa3.Mask, got the class Stairs. Pass"),
    ("dense varlen", "mask", fa3.Mask, TYPE, "must be a fa3.Mask, got the class Mask. Pass an obj"),
    ("dense varlen", "score", fa3.Score, TYPE, "must be...class Score...that is derived from it$"),
    ("dense", "mask", Nothing, TYPE, "must be...the class Nothing. Pass an object: Nothing(...)$"),
    *each("dense", "plan", TYPE, "must come from fa3.plan_forward, got {}",
          (fa3.Plan, "the class Plan$"), (ONE, "Tensor$"), ("list", "'list'"), (5, "5")),
    *each("dense", "schedule", TYPE, "must be{}", (([],), " hashable"), ([1], " hashable"),
          (True, ""), (3, "...3"), (ONE, "..., got Tensor$")),
    ("dense", "schedule", "fastest", "must be one of ...'fastest'"),
    ("dense", "schedule", {**NO_ROWS, "schedule": "fastest"}, "must be one of"),
    ("dense", "schedule", lambda x: lambda tiles: tiles[1:], "leaves out Tile"),
    ("dense", "schedule", lambda x: lambda tiles: tiles + tiles[:1], "has Tile...2 times"),
    ("dense", "schedule", lambda x: lambda tiles: tiles.sort(), TYPE, "must return the tiles"),
    ("dense", "alibi_slopes", torch.Tensor, TYPE, f"{NO_TENSOR} the class Tensor$"),
    ("varlen", "causal", (1, 2), TYPE, "must be a bool, got tuple$"),
    # What changes scores.
    *each("dense", "alibi_slopes", VALUE, "must have {}",
          (torch.zeros(2), "shape (4,) to go with q, got (2,)"),
          (torch.zeros(4, 2), "shape (2, 4) to go with q, got (4, 2)"),
          (torch.zeros(1, 4), "shape (2, 4) to go with q, got (1, 4)"),
          (torch.zeros(2, 4, 1), "2 dimensions (batch, heads_q), got shape (2, 4, 1)")),
    ("varlen", "alibi_slopes", torch.ones(3, 4), "must have shape (4, 4) to go with cu_se"),
    ("cache", "alibi_slopes", torch.ones(3), "must have shape"),
    ("dense cache", "alibi_slopes", torch.ones(4).bfloat16(), TYPE, "must be torch.float32, got"),
    ("dense", "alibi_slopes", torch.zeros(4, requires_grad=True), "requires grad"),
    (ATTEND, "alibi_slopes sinks", torch.zeros(4, device="meta"), "must be on cpu like q, got"),
    (ATTEND, "sinks", torch.zeros(2), "must have shape (4,) to go with q, got (2,)"),
    (ATTEND, "sinks", torch.zeros(2, 4), "must have 1 dimension (heads_q), got shape (2, 4)"),
    (ATTEND, "sinks", torch.zeros(4).half(), TYPE, "must be torch.float32 or torch.bfloat16, got"),
    # Dropout.
    *each("dense varlen dropout_mask problem", "dropout_p", VALUE,
          "must be at least 0 and less than 1, got {}", (1.0, "1.0"), (-0.1, "-0.1"),
          (np.nan, "nan")),
    *each("dense varlen pages dropout_mask", "dropout_p", TYPE, "must be a float, got {}",
          ("a", "'a'"), (torch.zeros(2), "Tensor")),
    ("dense varlen", "dropout_p", True, TYPE, "must be a float"),
    ("dense varlen", "rng_state", STATE, "must be None without dropout_p"),
    (DROPOUT, "rng_state", {"dropout_p": 0.1, "rng_state": 3}, TYPE, NO_TENSOR),
    (DROPOUT, "rng_state", {"dropout_p": 0.1, "rng_state": STATE.int()}, TYPE, "must be torch"),
    (DROPOUT, "rng_state", {"dropout_p": 0.1, "rng_state": STATE.repeat(2)}, "must have shape"),
    ("dense varlen", "rng_state", {"dropout_p": 0.1, "rng_state": on_meta(STATE)}, "must be on"),
    ("dense", "pack_gqa", {"dropout_p": 0.1, "pack_gqa": True}, MISSING, "must be None or False"),
    ("pages", "dropout_p", 0.1, MISSING, "is not supported with page_table"),
    ("pages", "rng_state", STATE, MISSING, "is not supported with page_table"),
    ("dropout_mask", "batch", -1, "must be 0 or more"),
    ("dropout_mask", "seqlen_k", 1 << 31, "must be at most 2147483647, got 2147483648"),
    ("dropout_mask", "heads", 1.5, TYPE, "must be an integer"),
]  # fmt: skip

SIZES = [
    ("dense", "k", of_sizes(64, 2**31 - 64), "must have at most"),
    ("dense", "k", of_sizes(2048, 2**31 - 1024), "must have at most"),
    ("dense", "k", of_sizes(1, 2**32 + 5), "must have at most"),
    ("dense", "q", of_sizes(2**32 + 1, 1), "must have at most 1073741311 queries, got 4294967297"),
    ("dense", "q", of_sizes(2**24, 128, 256), "must have at most 16777216 tiles"),
    ("varlen", "q", of_totals(2**29 + 1, 1), "must have at most 536870912 rows, got 536870913"),
    ("varlen", "k", of_totals(1, 2**29 + 1), "must have at most 536870912 rows, got 536870913"),
    ("varlen", "q", of_totals(2**24, 128, 256), "must have at most 8388607 rows"),
    ("packed", "q", rows(LARGEST + 1, 2, 64), f"must have at most {MOST_RAGGED_ROWS} rows"),
    ("packed_new", "q", rows(MOST_VECTORS // 16 + 1, 2, 64),
     f"must have at most {MOST_VECTORS // 16} rows"),
    ("packed", "q", {"q": rows(MOST_RAGGED_ROWS + 1, 2, 64), "max_seqlen_q": 500},
     f"must have at most {MOST_RAGGED_ROWS} rows"),
    ("pages", "max_seqlen_q", LARGEST, "must give a key/value head at most 1073741824 rows, got"),
    ("cache", "cache_seqlens", 10**12, "must be from 0 to 39"),
    ("cache", "cache_seqlens", 38, "must leave room for k...38"),
    ("cache", "cache_seqlens", 40, "must be from 0 to 39...40"),
    ("metadata", "max_seqlen_q", 1 << 40, "must be at most 2147483647"),
    ("metadata", "num_heads_q", 1 << 63, "must be at most 2147483647"),
    ("metadata", "batch_size,", {"batch_size": 1 << 30, "cache_seqlens": 5},
     "...heads must give at most ... tiles of"),
    ("metadata", "batch_size,", {"num_heads_q": 1 << 30, "num_heads_kv": 1 << 29},
     "...heads must give at most ... tiles of"),
    ("metadata", "batch_size,", {"max_seqlen_q": LARGEST}, "max_seqlen_q ... must give a"),
]  # fmt: skip

METADATA = [
    ("metadata", "max_seqlen_q", 0, "must"),
    ("metadata", "num_heads_q", {"num_heads_kv": 3}, "must be...num_heads_kv, got 8 and 3"),
    ("metadata", "num_heads_kv", 0, "must"),
    ("metadata", "qkv_dtype", torch.float32, TYPE, "must be one of...got torch.float32"),
    ("metadata", "qkv_dtype", "bfloat16", TYPE, "must be one of (torch.bfloat16"),
    ("metadata", "qkv_dtype", np.zeros(2), TYPE, "must be one of (torch.bfloat16...got ndarray"),
    ("metadata", "page_size", 0, "must be"),
    ("metadata", "page_size", 1 << 31, "must be at most 2146435072"),
    ("metadata", "headdim_v", 264, "must be at most 256"),
    ("metadata", "batch_size", "2", TYPE, "must be an integer, got '2'"),
    ("metadata", "max_seqlen_k_new", 1 << 31, "must be at most"),
    ("metadata", "cache_leftpad", torch.zeros(2), TYPE, "must be torch.int32"),
    ("metadata", "cache_leftpad", integers(0, 0, 0), "must have shape"),
    *each("metadata", "cache_seqlens", TYPE, "must be an integer or an int32 torch.Tensor, got {}",
          (True, "True"), ("7", "'7'"), (None, "None")),
    ("packed_metadata", "cu_seqlens_q", integers(0, 1), "must have shape (5,)"),
    ("packed_metadata", "num_splits", 2, MISSING, "must be 0 or 1 here"),
    ("packed_metadata", "cu_seqlens_k", {"cu_seqlens_q": None}, "must be None without"),
    # As an argument.
    ("cache varlen", "scheduler_metadata", 3, TYPE, "must come from get_scheduler_metadata"),
    ("cache varlen", "scheduler_metadata", [1], TYPE, "must come from...got list"),
    ("cache", "scheduler_metadata", torch.zeros(3), TYPE, "must come from"),
    ("cache", "scheduler_metadata", fa3.SchedulerMetadata, TYPE, "must...the class SchedulerMetad"),
    *(
        ("varlen", "scheduler_metadata", metadata_of_varlen(**changes), words)
        for changes, words in (
            ({"qkv_dtype": torch.float16}, "was made for dtype torch.float16, the call has torch."),
            ({"headdim_v": 128}, "was made for head_dim_v 128, the call has 64"),
            ({"causal": True}, "was made for window Window(left=-1, right=0), the call has"),
            ({"has_softcap": True}, "was made for has_softcap True, the call has False"),
            ({"batch_size": 3, "cu_seqlens_q": integers(0, 7, 8, 21),
              "cu_seqlens_k": integers(0, 9, 14, 20)}, "was made for batch 3"),
            ({"num_heads_q": 8}, "was made for heads_q 8, the call has 4"),
        )
    ),
    ("packed", "scheduler_metadata", metadata_of_varlen(), "was made for has_packed_keys True"),
    ("varlen", "scheduler_metadata", metadata_of_packed(), "was made for has_packed_keys False"),
    ("packed", "scheduler_metadata",
     {"scheduler_metadata": metadata_of_packed(), "cu_seqlens_q": None, "max_seqlen_q": None,
      "q": OUT[:, :1, :2]}, "was made for has_packed_queries True"),
    ("varlen", "scheduler_metadata", metadata_of_varlen(page_size=16), "was made for page_size 16"),
    *(
        ("cache", "scheduler_metadata", metadata_of_cache(**changes), f"was made for {words} ")
        for changes, words in (
            ({"qkv_dtype": torch.float16}, "dtype"), ({"headdim_v": 128}, "head_dim_v"),
            ({"page_size": 16}, "page_size"), ({"causal": True}, "window"),
            ({"window_size": (3, 3)}, "window"), ({"has_softcap": True}, "has_softcap"),
            ({"batch_size": 3, "cache_seqlens": integers(2, 3, 4)}, "batch 3,"),
        )
    ),
]  # fmt: skip

ENDS = integers(0, 7, 20)
DK = torch.zeros(2, 30, 2, 64)
FP8_ROWS = to_fp8(DK[..., :40])

FLASH_ATTENTION_3 = [
    ("qkv", "num_heads_q", None, "must be given with qkv of 4 dimensions"),
    ("qkv", "num_heads_q", 5, "must leave k and v the same number of qkv's 8"),
    ("qkv", "num_heads_q", 10, "must leave k and v the same number of qkv's"),
    ("qkv", "num_heads_q", 4.0, TYPE, "must be an integer, got 4.0"),
    ("qkv", "num_heads_q", {"qkv": torch.zeros(2, 20, 3, 4, 64), "num_heads_q": 2}, "must be 4"),
    ("qkv", "qkv", {"qkv": torch.zeros(2, 20, 2, 4, 64), "num_heads_q": None},
     "must have shape (batch, seqlen, 3, heads, head"),
    ("qkv", "qkv", PACKED_OUT, "must have shape"),
    ("qkv", "qkv", [], TYPE, f"{NO_TENSOR} list"),
    ("backward", "dq dk dv dout softmax_lse", None, TYPE, f"{NO_TENSOR} NoneType"),
    ("backward", "q", to_fp8, TYPE, "must be torch.bfloat16 or torch.float16, got torch.float8"),
    ("backward", "dk", OUT, "must have shape (2, 30, 2, 64)"),
    ("backward", "dv", torch.zeros(2, 30, 2, 64), TYPE, "must be torch.bfloat16"),
    ("backward", "out", OUT[:, :19], "must have shape"),
    ("backward", "out", "x", TYPE, f"{NO_TENSOR} str"),
    ("backward", "lse", {"softmax_lse": torch.zeros(2, 20, 4)}, "must have shape"),
    ("backward", "softmax_lse dout", on_meta, "must be on cpu"),
    ("backward", "d_out", {"dout": OUT.float()}, TYPE, "must be torch.bfloat16"),
    ("backward", "max_seqlen_q", 5, "must be None without cu_seqlens_q"),
    ("backward", "cu_seqlens_k", ENDS, "must be None without cu_seqlens_q"),
    ("backward", "cu_seqlens_k", {"cu_seqlens_q": ENDS}, "must be given with cu_seqlens_q"),
    ("backward", "softmax_scale", "1", TYPE, "must be a float, got '1'"),
    ("backward", "softcap", -1.0, "must be 0"),
    ("backward", "dk", dict.fromkeys(("dk", "dv"), dense()["k"]), "must not overlap dv"),
]  # fmt: skip

PASSES = [
    ("gradients", "dv", {"dk": DK}, "must be given with dk"),
    ("gradients", "dk", {"dv": DK}, "must be given with dv"),
    ("gradients", "dk and dv", {"accumulate_dkv": True}, "must be given with accumulate_dkv"),
    ("gradients", "fp32_dkv", {"fp32_dkv": True, "dk": DK.bfloat16(), "dv": DK.bfloat16()},
     "must be False with dk and dv in torch.bfloat16"),
    ("gradients", "dk", {"dk": DK.bfloat16(), "dv": DK.bfloat16(), "accumulate_dkv": True}, TYPE,
     "must be torch.float32 with accumulate_dkv"),
    ("gradients", "dv", {"dk": DK, "dv": DK.bfloat16()}, TYPE, "must be torch.float32 like dk"),
    ("gradients", "dk", {"dk": DK.half(), "dv": DK.half()}, TYPE, "must be torch.bfloat16 like k"),
    ("gradients", "dq", OUT.float(), TYPE, "must be torch.bfloat16"),
    *each("gradients", "dropout_p", TYPE, "must be a float, got {}",
          (None, "None"), (True, "True"), (torch.ones(2), "")),
    ("gradients", "rng_state", {"dropout_p": 0.5}, "must be given with dropout_p"),
    ("gradients", "d_lse", 1.0, TYPE, NO_TENSOR),
    ("gradients", "d_lse", torch.zeros(2, 4, 19), "must have shape (2, 4, 20)"),
    ("gradients", "seqused_k", ENDS, "must be None without cu_seqlens_q"),
    ("gradients", "mask", 3, TYPE, "must be"),
    ("quantize", "q", dict.fromkeys("qkv", OUT.to(torch.float8_e4m3fn)), TYPE,
     "must be torch.bfloat16 or torch.float16"),
    ("quantize", "q", dict.fromkeys("qkv", OUT.float()), TYPE, "must be torch.bfloat16 or"),
    ("quantize", "k", lambda x: x.half(), TYPE, "must be torch.bfloat16 like q"),
    ("quantize", "q", dict.fromkeys("qkv", OUT[..., :48]),
     "has head_dim 48, supported in FP8 are multiples of 32"),
    ("quantize", "v", lambda x: x[:, :10], "must have shape"),
    ("quantize", "q", lambda x: x[:, :, :0], "must have heads like k, got shape (2, 20, 0, 64)"),
    ("quantize quantize_packed", "q k v", lambda x: x.clone().requires_grad_(), "requires grad"),
    ("quantize_packed", "cu_seqlens_k", None, TYPE, NO_TENSOR),
    ("quantize_packed", "transpose_v", True, MISSING, "must be False with packed sequences"),
    ("quantize_packed", "cu_seqlens_q", lambda x: x + 1, "must begin with 0"),
]  # fmt: skip

E4M3 = "must be torch.float8_e4m3fn, got torch."
NEW = dict.fromkeys("kv", torch.zeros(2, 1, 2, 64).bfloat16())

IN_FP8 = [
    ("fp8", "k v", lambda x: x.bfloat16(), TYPE, "must be torch.float8_e4m3fn like q, got"),
    ("fp8", "k", {"q": OUT}, TYPE, "must be torch.bfloat16 like q"),
    ("fp8", "q", lambda x: x.to(torch.float8_e5m2), TYPE, "must be torch.bfloat16, torch.float16"),
    ("fp8", "out", OUT.float(), TYPE, "must be torch.bfloat16 or torch.float16, got"),
    ("fp8_varlen", "q", {"q": None, "out": PACKED_OUT.half()}, TYPE, f"{NO_TENSOR} NoneType"),
    ("fp8", "q", dict.fromkeys("qkv", to_fp8(OUT[..., :48])),
     "has head_dim 48, supported with q in FP8 are multiples of 32"),
    ("fp8", "q_descale", torch.ones(2, 3), "must have shape (2, 2)"),
    ("fp8", "k_descale", torch._neg_view(torch.ones(2, 2)), "is a lazily negated view"),
    *(("fp8", "v", torch.zeros(2, 2, 64, 2, 32).to(torch.float8_e4m3fn)[..., :n], text)
      for n, text in ((16, "must have its groups of 16 keys"), (8, "must have shape (2, 2, 64"))),
    ("fp8", "dropout_p", 0.5, MISSING, "must be 0 with q in torch.float8_e4m3fn"),
    ("fp8", "pack_gqa", True, MISSING, "must be None or False with q in FP8"),
    ("fp8", "q, k, v and sinks", {"sinks": torch.zeros(4, requires_grad=True)}, MISSING,
     "must not require grad with q in FP8"),
    ("gradients", "q", to_fp8, TYPE, "must be torch.bfloat16 or torch.float16"),
    ("fp8_varlen", "v_descale", torch.ones(2, 2), "must have shape (4, 2)"),
    # Caches.
    ("fp8_cache", "k_cache", lambda x: x.to(torch.float8_e5m2), TYPE, f"{E4M3}float8_e5m2"),
    *(("fp8_cache", "k_cache", {"k_cache": other, "v_cache": other}, TYPE, E4M3)
      for other in (lambda x: x.to(torch.float8_e5m2), lambda x: x.to(torch.uint8))),
    ("fp8_cache", "v_cache", lambda x: x.bfloat16(), TYPE, f"{E4M3}bfloat16"),
    ("cache", "v_cache", lambda x: x.bool(), TYPE, "must be torch.bfloat16 like q, got torch.bool"),
    ("fp8_cache", "q", lambda x: x.float(), TYPE, "must be torch.bfloat16, torch.float16 or"),
    ("cache", "k_descale", torch.ones(2, 2),
     "must be None unless k_cache is torch.float8_e4m3fn, got k_cache in torch.bfloat16"),
    ("fp8_cache", "k_descale", lambda x: x.double(), TYPE, "must be torch.float32, got"),
    ("fp8_cache", "k_descale", torch.ones(2), "must have 2 dimensions (batch, heads_kv), got"),
    ("fp8_cache", "v_descale", torch.ones(2, 2, device="meta"), "must be on cpu like q, got meta"),
    ("fp8_cache", "q_descale", torch.ones(2, 2), "must be None unless q is torch.float8_e4m3fn"),
    ("fp8_cache", "q", {"q": OUT[:, :1, :2, :40], "k_cache": FP8_ROWS, "v_cache": FP8_ROWS},
     "has head_dim 40, supported with an FP8 cache are multiples of 16"),
    ("fp8_cache", "out", {"q": to_fp8, "out": OUT[:, :1].half()}, TYPE, "must be torch.bfloat16"),
    ("fp8_cache", "k and v", {"q": to_fp8, **NEW}, "must be None with q in torch.float8_e4m3fn"),
]  # fmt: skip

PLAN, LONGER = (
    fa3.plan_forward(make_problem(2, seqlen, 30, 2, 2, 64), schedule="list") for seqlen in (20, 700)
)

PLANS = [
    ("problem", "q", (1, 70, 4), "must have 4 dimensions"),
    ("problem", "q", (), "must have 4 dimensions"),
    ("problem", "q", dict.fromkeys("kv", (1, 90, 3, 64)), "must have a multiple of k's"),
    ("problem", "v", (1, 90, 2, 260), "has head_dim 260"),
    ("problem", "v", (1, 90, 2, 60), "has head_dim 60"),
    ("problem", "v", (1, 80, 2, 64), "must have shape"),
    ("problem", "q", (1, 70.0, 4, 64), TYPE, "must be an integer, got 70.0"),
    ("problem", "q", 3, TYPE, "must be a torch.Tensor or a shape, got int"),
    ("problem", "q", OUT.float(), TYPE, "must be torch.bfloat16"),
    ("problem", "softcap", -1.0, "must be 0"),
    ("problem", "sinks", torch.zeros(3), "must have shape"),
    ("problem", "dtype", "float32", "must be one of ... got 'float32'"),
    ("problem", "dtype", OUT, "must be one of ... got Tensor"),
    ("problem", "dtype", {"q": OUT.half(), "dtype": "float16"}, "must be None with tensors"),
    ("plan", "problem", 3, TYPE, "must be of type Problem"),
    ("plan", "problem", None, TYPE, "must be of type Problem, got None"),
    ("plan", "problem gpu config", ONE, TYPE, "must be ..., got Tensor$"),
    ("plan", "problem.seqlen_q", problem(seqlen_q=300.0), TYPE, "must be of type int"),
    ("plan", "problem.batch", problem(batch=True), TYPE, "must be of type int"),
    ("plan", "problem.batch", problem(batch=-1), "must be 0 or more"),
    ("plan", "problem.seqlen_k", problem(seqlen_k=-1), "must be 0 or more"),
    ("plan", "problem.window", problem(window=(-1, 0)), TYPE, "must be of type Window"),
    ("plan", "problem.window.left", problem(window=Window(-5, 0)), "must be -1"),
    ("plan", "problem.spec.mask", problem(window=Window()), "must have the bounds"),
    ("plan", "problem.spec.mask", problem(mask=None), TYPE, "must be of type Band"),
    ("plan", "problem.spec.mask", problem(mask=Band()), "must have the bounds"),
    ("plan", "problem.spec.dtype", problem(dtype="float32"), "must be one of"),
    ("plan", "problem.spec.head_dim", problem(head_dim=7), "must be a multiple of 8"),
    ("plan", "problem.spec.head_dim_v", problem(head_dim_v=512), "must be a multiple"),
    ("plan", "problem.qhead_per_kvhead", problem(qhead_per_kvhead=0), "must be 1 or more"),
    ("plan", "gpu", None, TYPE, "must be a Gpu"),
    ("plan", "gpu", np.zeros(2), TYPE, "must be a Gpu or one of ...got ndarray"),
    ("plan", "gpu", "A100", "must be a Gpu or one of ...'H200'...got 'A100'"),
    ("plan", "gpu.num_sms", {"gpu": replace(H200, num_sms=0)}, "must be 1 or more"),
    ("plan", "gpu.num_sms", {"gpu": replace(H200, num_sms=132.0)}, TYPE, "must be of type int"),
    ("plan", "gpu.name", {"gpu": replace(H200, name=None)}, TYPE, "must be of type str"),
    ("plan", "config", {"gpu": replace(H200, num_sms=1), **config(cluster_m=2)},
     "...do not fit 1 SMs"),
    ("plan", "config", "wide", TYPE, "must be a ForwardConfig or None"),
    ("plan", "q_stages", config(q_stages=0), "must be 1 or more"),
    ("plan", "kv_stages", config(kv_stages=-3), "must be 1 or more"),
    ("plan", "tile_n", config(tile_n=64.0), TYPE, "must be of type int"),
    ("plan", "own_o", config(own_o="x"), TYPE, "must be of type bool"),
    ("plan", "cluster_m", config(cluster_m=True), TYPE, "must be of type"),
    ("plan", "fixed_row_max", config(fixed_row_max=1), TYPE, "must be"),
    *(("plan", "tile_m", config(tile_m=rows), "must be") for rows in (64, 160, 256)),
    *(("plan", "tile_n", config(tile_n=keys), "must be") for keys in (0, 72, 272)),
    ("plan", "cluster_m", config(cluster_m=4), "must be"),
    ("plan", "ForwardConfig", config(tile_m=192, tile_n=256, kv_stages=4), "...shared memory"),
    *each("plan", "schedule", TYPE, "must be one of ...'list'... or a function",
          (int, ""), (RecomputeTiles, ""), (3, ""), (1.5, "")),
    ("plan", "schedule", lambda x: LONGER.schedule, "...of another problem or tiling"),
    ("dense", "plan", LONGER, "was made for seqlen_q 700; the call has seqlen_q 20$"),
    ("dense", "plan", {"plan": PLAN, **NO_ROWS}, "was made for...; the call has "),
    ("dense", "schedule", {"plan": PLAN, "schedule": "list"}, "must be None"),
    ("dense", "sm_margin", {"plan": PLAN, "sm_margin": 4}, "must be 0 when plan is given"),
    ("dense", "pack_gqa", {"plan": PLAN, "pack_gqa": True}, "must be ... with a schedule"),
    ("dense", "pack_gqa", {"schedule": "list", "pack_gqa": True}, "must be ... with a schedule"),
    ("dense", "plan", replace(PLAN, schedule=LONGER.schedule), "has...tiles of another problem,"),
    ("dense", "tile_m", {"plan": replace(PLAN, **config(tile_m=100))}, "must be"),
    ("dense", "plan", replace(PLAN, schedule=None), TYPE, "must have a schedule"),
    ("dense", "plan", replace(PLAN, config=None), TYPE, "must have a config"),
    ("dense", "problem", {"plan": replace(PLAN, problem=None)}, TYPE, "must be"),
    ("dense", "gpu", {"plan": replace(PLAN, gpu=132)}, TYPE, "must be of type Gpu"),
    ("dense", "config",
     {"plan": replace(PLAN, gpu=replace(H200, num_sms=1), **config(cluster_m=2))},
     "...do not fit 1 SMs"),
]  # fmt: skip

WRONG_VALUES = [(PROBLEMS[case.call], case.changes) for case in cases(VALUES_OF_CACHES)]
WRONG_VALUES += FAR_VALUES
"""(problem of a call on a cache, changes), of which only the CPU and assertions complain."""
