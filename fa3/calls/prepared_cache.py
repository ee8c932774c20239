"""Calls on a key/value cache, prepared: validated, planned and loaded once, then run.

`fa3.calls.kvcache` looks up what a call leads to. A call appends in one launch (`kernels.append`)
and attends in one or more (`mixed`, `decode`). Lengths are read on the device only, so a captured
CUDA graph goes on decoding as they grow. CPU tensors go to the reference.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fa3.calls import mixed
from fa3.calls.assertions import is_visible
from fa3.calls.call import (
    MOST_RAGGED_ROWS,
    NAMES,
    OF_INTEGERS,
    Call,
    Described,
    check_cache_counts,
    check_tensors,
)
from fa3.calls.decode import PreparedDecode
from fa3.calls.devices import gpu_of, reserve_sms
from fa3.calls.known_lengths import HostSeqlens
from fa3.calls.mixed import PreparedMixed
from fa3.calls.modifiers import modifier_tensors
from fa3.calls.operands import (
    DTYPES,
    CheckOfAddresses,
    Operand,
    Output,
    addresses,
    check_apart,
    check_of_addresses,
    check_out,
    check_writable,
    describe,
)
from fa3.calls.options import Options
from fa3.calls.results import hide_all_keys, hide_all_keys_of_packed
from fa3.calls.scheduler_metadata import IN_METADATA
from fa3.calls.values import check_values, values_on_host
from fa3.kernels.append import MOST_VECTORS, Append, AppendArguments, Rotary
from fa3.planning.gpu import H200
from fa3.planning.launch import slots, template_of
from fa3.primitives.arithmetic import LARGEST
from fa3.primitives.cache_blocks import CacheTables
from fa3.primitives.vectors import VECTOR
from fa3.problem import REMEMBERED, Window
from fa3.reference.cache import HostAppend
from fa3.reference.varlen import RaggedOperands
from fa3.running.compiler import load_kernel
from fa3.settings import check_settings

APPEND_TEMPLATE = template_of(AppendArguments)
NEW_AND_CACHE = slice(*slots(AppendArguments, "k", "seqlens"))
APPEND_LENGTHS = slice(*slots(AppendArguments, "seqlens", "batch_idx"))
ROTARY = slice(*slots(AppendArguments, "q", "rotary_seqlens"))
BATCH_IDX, PAGE_TABLE, ROTARY_SEQLENS, QUERY_STEP = slots(
    AppendArguments, "batch_idx", "page_table", "rotary_seqlens", "query_step"
)


@dataclass(frozen=True, slots=True)
class PreparedCacheCall:
    """What a call's description leads to, whatever the total of packed queries is.

    Fields:
        description: of all tensors.
        append: appends and rotates; None if nothing is appended.
        decode: attends; None if there are no keys, or no queries to attend from.
        query_step: 1 if each query has a rotary position of its own, 0 if they share one.
        lse_shape: None for packed queries, whose total it has.
        head_dim: columns of q.
        most_queries: rows of packed queries that 32 bits count.
        has_rotated_in_out: whether rotated queries may lie where the output will.
        has_host_integers: whether an int32 tensor is on the CPU.
        apart: checks that what is written shares no memory with other tensors; None if nothing of
            the caller's is written, and for packed queries.
    """

    description: Call
    append: Callable | None
    decode: PreparedDecode | PreparedMixed | None
    query_step: int
    output: Output
    lse_shape: tuple[int, ...] | None
    head_dim: int
    most_queries: int
    has_rotated_in_out: bool
    has_host_integers: bool
    apart: CheckOfAddresses | None

    def run(
        self,
        tensors: tuple[torch.Tensor | None, ...],
        softmax_scale: float,
        return_lse: bool,
        known: HostSeqlens | None = None,
        function_tensors: tuple[torch.Tensor, ...] = (),
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Append, and attend; what `flash_attn_with_kvcache` returns.

        Args:
            tensors: the `TENSORS`, the int32 ones on q's device.
            known: the lengths, if the host knows them; they fit the call.
            function_tensors: the tensors of the user's score and mask.
        """
        (
            q, k_cache, v_cache, _, _, _, _, seqlens, batch_idx, leftpad, pages, _, ends_q, _,
            used_q, _, slopes, sinks, out,
        ) = tensors  # fmt: skip
        rotated = lse = None
        if out is None:
            out = self.output.allocate(q)
            if self.has_rotated_in_out:
                rotated = out
        if return_lse:
            lse_shape = self.lse_shape or (self.description.heads_q, q.shape[0])
            lse = q.new_empty(*lse_shape, dtype=torch.float32)
        seqlen_new = 0
        if self.append is not None:
            q, seqlens, seqlen_new = self.append_tokens(tensors, rotated)
        if self.decode is not None and (ends_q is None or q.shape[0]):
            operands = RaggedOperands(q, k_cache, v_cache, out, lse, ends_q, None, used_q, seqlens)
            tables = CacheTables(batch_idx, leftpad, pages)
            modifiers = modifier_tensors(slopes, function_tensors, sinks)
            self.decode.attend(operands, tables, modifiers, softmax_scale, seqlen_new, known)
        elif ends_q is None:
            hide_all_keys(out, lse, sinks)
        elif self.description.batch:
            hide_all_keys_of_packed(out, lse, ends_q, used_q, sinks)
        return (out, lse) if return_lse else out

    def append_tokens(
        self, tensors: tuple[torch.Tensor | None, ...], rotated: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Append k and v to the caches.

        Args:
            rotated: where rotated queries may go; None for memory of their own.

        Returns:
            the queries, rotated if there are rotary tables; the lengths, with the new tokens if
            sequences get different numbers of them, or have different numbers of queries; keys that
            each sequence has beyond those.
        """
        (
            q, k_cache, v_cache, k, v, cos, sin, seqlens, batch_idx, _, pages, ends_new, ends_q,
            turns, _, _, _, _, _,
        ) = tensors  # fmt: skip
        total, seqlen_new = None, 0
        if ends_new is ends_q is None:
            seqlen_new = k.shape[1]
        else:
            total = seqlens.new_empty(seqlens.shape[0])
        arguments = APPEND_TEMPLATE.copy()
        arguments[NEW_AND_CACHE] = k, v, k_cache, v_cache
        arguments[APPEND_LENGTHS] = seqlens, total, ends_new
        arguments[BATCH_IDX], arguments[PAGE_TABLE] = batch_idx, pages
        if cos is not None:
            if rotated is None:
                rotated = q.new_empty(*q.shape)
            arguments[ROTARY] = q, rotated, cos, sin, ends_q
        arguments[ROTARY_SEQLENS] = turns
        arguments[QUERY_STEP] = self.query_step
        self.append(*arguments)
        return q if cos is None else rotated, seqlens if total is None else total, seqlen_new


@functools.lru_cache(maxsize=REMEMBERED)
def prepare_cache_call(described: Described, options: Options) -> PreparedCacheCall:
    """Validate calls of this description, and load their kernels.

    Args:
        described: the tensors; of packed queries `without_total`.
    """
    check_settings()
    call = Call.of(described, options.kind, options.max_seqlen_q)
    check_tensors(call)
    if options.metadata is not None:
        num_splits, sm_margin = options.metadata.splits_and_margin(
            options, call.q, call.k, call.v, call.page_table is not None, call.batch, call.seqlen_q
        )
        options = options._replace(num_splits=num_splits, sm_margin=sm_margin)
    if options.num_splits < 0:
        raise ValueError(f"num_splits must be 0 (chosen for you) or more, got {options.num_splits}")
    on_gpu = call.q.device.type == "cuda"
    reserve_sms(gpu_of(call.q.device) if on_gpu else H200, options.sm_margin)
    has_room = 0 not in (*call.k.shape, call.num_sequences, call.capacity)
    append = attends = None
    if has_room and call.k_new is not None and call.batch:
        kernel = append_kernel(call, options.rotary_interleaved)
        append = load_kernel(kernel) if on_gpu else HostAppend(kernel)
    if has_room and 0 not in (*call.q.shape, call.batch, call.seqlen_q):
        attends = mixed.prepare_attention(call, options)
    apart = None
    if not call.is_packed and not (call.out is append is None):
        written = ("out",) if append is None else ("out", call.name("k"), call.name("v"))
        apart = check_of_addresses(NAMES[options.kind], described, written)
    most = LARGEST if append is None else MOST_VECTORS // max(1, vectors_of_row(call, call.heads_q))
    return PreparedCacheCall(
        call,
        append,
        attends,
        int(options.window != Window()),
        Output.of(call.out_shape, call.q, call.is_packed),
        None if call.is_packed else (call.batch, call.heads_q, call.seqlen_q),
        call.head_dim,
        min(most, MOST_RAGGED_ROWS) if isinstance(attends, PreparedMixed) else most,
        has_rotated_in_out(call),
        any(operand is not None and operand.device.type == "cpu" for operand in call[OF_INTEGERS]),
        apart,
    )


def has_rotated_in_out(call: Call) -> bool:
    """Whether rotated queries may lie where the output will, in memory of the same shape.

    The decode kernel writes a row of O where it has read this row of Q, or when all that read it
    have. Where queries are packed, the forward kernel may attend to them too (`fa3.calls.mixed`):
    it reads Q twice, and when it computes failed rows once more, O has been written.
    """
    return call.rotary_cos is not None and not call.is_packed and call.head_dim == call.head_dim_v


def check_vectors(call: Call) -> None:
    """Raise if the kernel that appends cannot count what it copies and turns."""
    for name, operand in (("k", call.k_new), ("q", call.q)):
        *rows, heads, _ = operand.shape
        if math.prod(rows) * vectors_of_row(call, heads) > MOST_VECTORS:
            raise ValueError(f"{name} must have at most {MOST_VECTORS} vectors of 16 bytes")


def vectors_of_row(call: Call, heads: int) -> int:
    """Vectors of 16 bytes in a row of heads."""
    return heads * max(call.head_dim, call.head_dim_v) // VECTOR


def append_kernel(call: Call, rotary_interleaved: bool) -> Append:
    """The kernel that appends k and v of this call."""
    check_vectors(call)
    rotary = None
    if call.rotary_cos is not None:
        dtype = str(call.rotary_cos.dtype).removeprefix("torch.")
        rotary = Rotary(2 * call.rotary_cos.shape[1], bool(rotary_interleaved), dtype)
    return Append(
        DTYPES[call.q.dtype],
        call.head_dim,
        call.head_dim_v,
        paged=call.page_table is not None,
        batch_indexed=call.cache_batch_idx is not None,
        ragged=call.cu_seqlens_k_new is not None,
        rotary=rotary,
        packed=call.is_packed and rotary is not None,
        turned=call.rotary_seqlens is not None,
        # The decode kernel adds equal numbers by itself. Where queries are packed, the table of the
        # forward kernel's tiles is made of lengths too (`fa3.calls.mixed`).
        writes_lengths=call.is_packed or call.cu_seqlens_k_new is not None,
    )


# ------------------------------------------------------------------------------------- checks


def check_total(call: PreparedCacheCall, q: torch.Tensor) -> None:
    """Raise for packed queries with more rows than `most_queries`."""
    description = call.description._replace(q=Operand(*describe("q", q)))
    check_cache_counts(description)
    rows = description.q.shape[0]
    if isinstance(call.decode, PreparedMixed) and rows > MOST_RAGGED_ROWS:
        raise ValueError(
            f"q must have at most {MOST_RAGGED_ROWS} rows where a sequence may have many queries, "
            f"got {rows}"
        )
    check_vectors(description)


def check_written(call: PreparedCacheCall, tensors: tuple[torch.Tensor | None, ...]) -> None:
    """Raise unless the call can write to its output, if it is given, and append to its caches."""
    q, k_cache, v_cache, *_, out = tensors
    if call.append is not None:
        check_writable("k_cache", k_cache)
        check_writable("v_cache", v_cache)
    if call.apart is not None:
        if out is not None:
            check_writable("out", out)
        call.apart(*addresses(tensors))
        return
    # The total of packed queries, and so of their output, is another one in every call.
    names = NAMES[call.description.kind]
    if out is not None:
        check_out(out, call.output.shape_beside(q.shape), q, names[:-1], tensors[:-1])
    if call.append is not None:
        check_apart("k_cache", k_cache, ("q", *names[2:-1]), (q, *tensors[2:-1]))
        check_apart("v_cache", v_cache, ("q", *names[3:-1]), (q, *tensors[3:-1]))


# ------------------------------------------------------------------------- the int32 tensors


def with_integers_on_device(
    call: PreparedCacheCall,
    tensors: tuple[torch.Tensor | None, ...],
    length: int | None,
    known: HostSeqlens | None,
) -> tuple[torch.Tensor | None, ...]:
    """The `TENSORS` with the int32 ones on q's device; checks what the host can see of them.

    Args:
        length: of each sequence; None if cache_seqlens says it.
        known: what the lengths with new tokens should be, if there is metadata that says so.

    Raises:
        ValueError, RuntimeError: see `check_values` and `values_on_host`.
    """
    integers = tensors[OF_INTEGERS]
    if length is not None:
        integers = length, *integers[1:]
    if not any(value is not None and is_visible(value) for value in integers):
        return tensors
    description = call.description._replace(q=Operand(*describe("q", tensors[0])))
    values = values_on_host(description, integers)
    check_values(description, values, call.query_step)
    if known is not None:
        keys = None
        if not (values.seqlens is None or values.counts is None):
            keys = [a + b for a, b in zip(values.seqlens, values.counts, strict=True)]
        known.check_same(IN_METADATA[:2], values.query_ends, keys)
    names = NAMES[description.kind][OF_INTEGERS]
    on_gpu = (on_device(name, x, description) for name, x in zip(names, integers, strict=True))
    return *tensors[: OF_INTEGERS.start], *on_gpu, *tensors[OF_INTEGERS.stop :]


def on_device(name: str, value: int | torch.Tensor | None, call: Call) -> torch.Tensor | None:
    """The value as a tensor on q's device; a number for each sequence.

    Raises:
        RuntimeError: a CUDA graph would copy it from the host again at every replay.
    """
    device = call.q.device
    if isinstance(value, int):
        return torch.full((call.batch,), value, dtype=torch.int32, device=device)
    if value is None or value.device == device:
        return value
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name} must be on {device} while a CUDA graph is captured, got {value.device}"
        )
    # From pinned memory the copy would still run when the caller writes the next lengths.
    return (value.clone() if value.is_pinned() else value).to(device, non_blocking=True)
