"""What calls of one description lead to: checked, planned, loaded, and remembered.

Then a repeated call costs a look-up, the allocation of its outputs and the launches. Whatever the
lengths of packed tensors are, nothing here depends on them.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from fa3.calls.backward import preparation_of
from fa3.calls.call import DESCALES, INTEGERS, MOST_RAGGED_ROWS, AttentionCall, check_tensors
from fa3.calls.devices import gpu_for_call
from fa3.calls.execution import Attend, Prepared, attend_by, launcher, packed_call, prepare_on_cache
from fa3.calls.modifiers import functions_of
from fa3.calls.operands import (
    ALIGNMENT,
    DTYPES,
    FP8_DTYPE,
    CheckOfAddresses,
    Operand,
    describe,
    dtype_of_output,
    hide_all_keys,
)
from fa3.calls.options import DENSE, PACKED, Options, checked_options, integer
from fa3.calls.tuned_plans import plan_call
from fa3.complaints import shown
from fa3.kernels.append import MOST_VECTORS, Append, Rotary
from fa3.kernels.transpose import Transpose
from fa3.planning import routes
from fa3.planning.launch import FromCall, Launch
from fa3.planning.planner import Plan, check_plan, plan_dense, plan_forward, schedule_name
from fa3.planning.routes import ZEROS, Signature, choose_dense
from fa3.primitives.ragged_lengths import first_group, key_groups
from fa3.primitives.vectors import VECTOR
from fa3.problem import FP8, HEAD_DIM_UNIT, KEYS_OF_GROUP, REMEMBERED, Problem, Window
from fa3.reference.append import append_tokens
from fa3.running.compiler import load_kernel
from fa3.running.memory import Table, is_capturing
from fa3.settings import check_settings


@functools.cache
def one_on(device: torch.device) -> torch.Tensor:
    """A one, (1, 1), that any stream may read; not during a capture."""
    if device.type == "cuda":
        return Table.upload(np.ones((1, 1), np.float32), device).numbers
    return torch.ones(1, 1, dtype=torch.float32, device=device)


def scales_on(
    device: torch.device,
    heads_kv: int,
    has_fp8_q: bool,  # whether queries have a scale
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return a function from descales to what a launch takes.
    It takes the batch, and the descales of queries, keys and values or None. What it returns is of
    keys, values and, if they are FP8, queries."""
    # During a capture each call makes its own one: a graph writes its memory when it runs.
    known = None if is_capturing(device) else one_on(device)

    def scales(
        batch: int,
        scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        given, one = (scale_k, scale_v, *[scale_q] * has_fp8_q), known
        if one is None and any(scale is None for scale in given):
            one = torch.ones(1, 1, dtype=torch.float32, device=device)
        shape = batch, heads_kv
        return tuple([one.expand(shape) if scale is None else scale for scale in given])

    return scales


@dataclass(frozen=True, slots=True)
class PreparedAttention:
    """What calls of a description lead to, whatever their packed lengths are."""

    description: AttentionCall
    run: Attend | None  # how they run; None if there is no key, or no query
    # shapes, dtype: of out, contiguous on q's device, and of the log-sum-exp.
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    out_dtype: torch.dtype
    is_out_like_q: bool  # whether `torch.empty_like` makes out: it takes less time than `new_empty`
    # Checks that what is written shares no memory with other tensors; None if nothing of the
    # caller's is written.
    overlaps: CheckOfAddresses | None
    scale: float  # the softmax scale if the call names none
    most_queries: int = MOST_RAGGED_ROWS  # rows of packed queries that 32 bits count
    problem: Problem | None = None  # of calls that may have a gradient
    prepare_backward: Callable | None = None  # of these calls, see `preparation_of`
    scales: Callable | None = None  # of calls with FP8 tensors, see `scales_on`
    # Whether FP8 queries become 16-bit ones before they attend to an FP8 cache, which is exact. The
    # forward kernel takes them only so.
    widens_q: bool = False
    # Appends to the cache and rotates: gives the queries, the lengths, and keys beyond those.
    append: Any = None
    has_host_integers: bool = False  # whether an int32 tensor is on the CPU
    capacity: int | None = None  # length of each sequence in a call on a cache without lengths

    @classmethod
    def of(
        cls, call: AttentionCall, options: Options, run: Attend | None, **rest: Any
    ) -> "PreparedAttention":
        """What follows from a valid call for all kinds of calls."""
        integers, scales = [getattr(call, name) for name in INTEGERS], None
        if call.is_fp8 or call.has_fp8_cache:
            scales = scales_on(call.q.device, call.heads_kv, call.q.dtype == FP8_DTYPE)
        shape, q = call.out_shape, call.q
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        is_out_like_q = q == q._replace(shape=shape, stride=strides, dtype=dtype_of_output(q.dtype))
        return cls(
            call,
            run,
            shape,
            call.lse_shape,
            dtype_of_output(q.dtype),
            is_out_like_q,
            call.overlaps(options, appends=rest.get("append") is not None),
            scale=call.head_dim**-0.5,
            scales=scales,
            has_host_integers=any(x is not None and x.device.type == "cpu" for x in integers),
            capacity=call.capacity if call.has_cache and call.seqused_k is None else None,
            **rest,
        )

    def new_out(self, q: torch.Tensor) -> torch.Tensor:
        """Allocate out; packed queries have another number of rows in each call."""
        shape = (q.shape[0], *self.out_shape[1:]) if len(self.lse_shape) == 2 else self.out_shape
        # Sizes one by one, here and in `attend`: in a tuple they would take torch 0.4 us more.
        if q.dtype is self.out_dtype:
            return q.new_empty(*shape)
        return q.new_empty(*shape, dtype=self.out_dtype)

    def attend(
        self,
        values: dict[str, Any],  # of the call, by name; more are added
        returns_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Append, write out or a new tensor; return it with log-sum-exp.
        `values` has all `TENSORS`, the int32 ones on q's device; `modifiers`, the tensors of the
        spec's scores, mask and sinks, `softmax_scale` and `dropout`."""
        q, out, ends_q = values["q"], values["out"], values["cu_seqlens_q"]
        is_new, lse = out is None, None
        if out is None:
            out = torch.empty_like(q) if self.is_out_like_q else self.new_out(q)
        if returns_lse:
            shape = self.lse_shape if ends_q is None else (self.lse_shape[0], q.shape[0])
            values["lse"] = lse = q.new_empty(*shape, dtype=torch.float32)
            values["address_of_lse"] = lse.data_ptr()
        if self.scales is not None:
            batch = q.shape[0] if ends_q is None else ends_q.shape[0] - 1
            descales = self.scales(batch, *map(values.get, DESCALES))
            if self.widens_q:
                scale_k, scale_v, scale_q = descales
                descales = scale_k * scale_q, scale_v
                values["q"] = q = q.to(out.dtype, memory_format=torch.contiguous_format)
            values["descales"] = descales
        values["o"], values["max_seqlen_k"] = out, 0
        if self.append is not None:
            self.append.run(values, out if is_new else None)
        if ends_q is not None and not q.shape[0]:
            return out, lse
        if self.run is None:
            if ends_q is None or ends_q.shape[0] > 1:
                hide_all_keys(values)
            return out, lse
        self.run(values)
        return out, lse


@functools.lru_cache(maxsize=REMEMBERED)
def prepare_call(call: AttentionCall, options: Options) -> PreparedAttention:
    """Validate calls of this description, plan them and load their kernels.
    The call is `without_lengths`."""
    check_settings()
    check_tensors(call)
    if options.scheduler_metadata is not None:
        options.scheduler_metadata.check_call(call, options)
        options = options.scheduler_metadata.applied_to(options)
    prepare = {DENSE: fields_of_dense, PACKED: fields_of_packed}.get(options.kind, fields_of_cached)
    return PreparedAttention.of(call, options, **prepare(call, options))


# --------------------------------------------------------------------------------- dense calls


def fields_of_dense(call: AttentionCall, options: Options) -> dict[str, Any]:
    """Plan a dense call; the fields of its `PreparedAttention`."""
    device, pack_gqa = call.q.device, options.pack_gqa
    schedule, plan = options.schedule, options.plan
    problem, is_planned = call.problem(options), not (schedule is plan is None)
    gpu = gpu_for_call(device, options.sm_margin)
    if plan is not None:
        if schedule is not None:
            raise ValueError("schedule must be None when plan is given: a plan has a schedule")
        if options.sm_margin:
            raise ValueError("sm_margin must be 0 when plan is given: a plan has its SMs")
        check_plan(plan)
        check_same_problem(plan, problem)
    if pack_gqa and is_planned:
        raise ValueError(
            "pack_gqa must be None or False with a schedule or a plan, which are of another kernel"
        )
    if choose_dense(problem, gpu, pack_gqa=pack_gqa, is_planned=is_planned).name == ZEROS:
        # There is no tile, so no plan either.
        schedule_name(schedule)
        return {"run": None, "problem": problem}
    if not is_planned:
        plan = (plan_dense if device.type == "cpu" else plan_call)(problem, gpu, pack_gqa)
    elif plan is None:
        plan = plan_forward(problem, gpu, schedule=schedule)
    run = ValuesByRows.of(call, attend_by(plan, device))
    # A plan may have been made for a GPU with more SMs, or fewer.
    gpu = replace(gpu, num_sms=min(plan.gpu.num_sms, gpu.num_sms))
    backward = preparation_of(problem, gpu)
    return {"run": run, "problem": problem, "prepare_backward": backward}


class ValuesByRows(NamedTuple):
    """How FP8 calls on row-major v run: V^T is written first."""

    prepared: Prepared
    attend_transposed: Attend

    @classmethod
    def of(cls, call: AttentionCall, attend: Attend) -> Attend:
        """Return what runs a call, given `attend`, which needs V^T in FP8."""
        if not call.is_fp8 or call.has_transposed_v or call.q.device.type != "cuda":
            return attend
        kernel = Transpose(call.head_dim_v, call.is_packed, call.seqused_k is not None)
        return cls(Prepared.of([Launch.of(kernel)]), attend).attend

    def attend(self, values: dict[str, Any]) -> None:
        """Write V^T, then out. The caller's values keep v as it is."""
        v, ends = values["v"], values["cu_seqlens_k"]
        (*batch, seqlen, heads, columns), groups = v.shape, key_groups(v.shape[-3])
        if ends is not None:
            batch, groups = [1], first_group(seqlen, ends.shape[0] - 1)
        values["transposed_v"] = v.new_empty(*batch, heads, columns, groups, KEYS_OF_GROUP)
        if v.numel() and (ends is None or ends.shape[0] > 1):
            self.prepared.run(values)
        self.attend_transposed(values | {"v": values["transposed_v"]})


def problem_posed_by(
    operands: Sequence[torch.Tensor | Sequence[int]],  # q, k and v
    dtype: str | None,
    modifiers: Sequence[Any],  # alibi_slopes, sinks, score and mask
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    dropout_p: float,
) -> Problem:
    """The problem of a call; `Problem.of` says what the arguments are."""
    q, k, v = (described_operand(*one, dtype) for one in zip("qkv", operands, strict=True))
    slopes, sinks, score, mask = modifiers
    functions, _ = functions_of(q, score, mask)
    options = checked_options(
        DENSE,
        window_size,
        {"causal": causal, "softcap": softcap, "dropout_p": dropout_p, "functions": functions},
    ).options
    q.check_rank("q")
    slopes, sinks = (
        None if tensor is None else describe(name, tensor, 1, name == "sinks")
        for name, tensor in (("alibi_slopes", slopes), ("sinks", sinks))
    )
    call = AttentionCall(q=q, k=k, v=v, alibi_slopes=slopes, sinks=sinks, kind=DENSE)
    check_tensors(call)
    return call.problem(options)


def described_operand(name: str, value: torch.Tensor | Sequence[int], dtype: str | None) -> Operand:
    """Describe a tensor, or a CPU tensor of this shape."""
    if isinstance(value, torch.Tensor):
        if dtype is not None:
            raise ValueError(
                f"dtype must be None with tensors, which have their own, got {shown(dtype)}"
            )
        return describe(name, value, ALIGNMENT, True)
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a torch.Tensor or a shape, got {type(value).__name__}")
    shape = tuple(integer(name, size, 0) for size in value)
    types = {known: kind for kind, known in (DTYPES | {FP8_DTYPE: FP8}).items()}
    if dtype is not None and dtype not in types:
        raise ValueError(f"dtype must be one of {list(types)}, got {shown(dtype)}")
    rows = *shape[:-1], -(-shape[-1] // HEAD_DIM_UNIT) * HEAD_DIM_UNIT if shape else 0
    strides = tuple(math.prod(rows[dim + 1 :]) for dim in range(len(shape)))
    return Operand(shape, strides, types[dtype or "bfloat16"], torch.device("cpu"))


def check_same_problem(plan: Plan, problem: Problem) -> None:
    """Raise unless a plan is one of this problem."""
    planned, asked = (
        {name: getattr(owner, name) for owner in (one, one.spec) for name in owner.__slots__}
        for one in (plan.problem, problem)
    )
    differing = [name for name in asked if name != "spec" and planned[name] != asked[name]]
    if differing:
        in_call, in_plan = (
            ", ".join(f"{name} {values[name]}" for name in differing) for values in (asked, planned)
        )
        raise ValueError(f"plan was made for {in_plan}; the call has {in_call}")


# -------------------------------------------------------------------------------- packed calls


def fields_of_packed(call: AttentionCall, options: Options) -> dict[str, Any]:
    """Load kernels for packed sequences; the fields of the `PreparedAttention`."""
    problem, device = call.problem(options), call.q.device
    gpu = gpu_for_call(device, options.sm_margin)
    signature = Signature.of(
        routes.PACKED, problem, gpu, sm_margin=options.sm_margin,
        has_used_q=call.seqused_q is not None, has_used_k=call.seqused_k is not None,
        has_gradients=options.has_gradient, num_splits=options.num_splits,
    )  # fmt: skip
    run = ValuesByRows.of(call, packed_call(signature, device.type == "cuda").attend)
    backward = preparation_of(problem, gpu)
    return {"run": run, "problem": problem, "prepare_backward": backward}


# ---------------------------------------------------------------------------- calls on a cache


def fields_of_cached(call: AttentionCall, options: Options) -> dict[str, Any]:
    """Load kernels of a call on a cache; return its `PreparedAttention`'s fields."""
    gpu_for_call(call.q.device, options.sm_margin)
    has_room = 0 not in (*call.k.shape, call.num_sequences, call.capacity)
    append, run, is_tiled, most = None, None, False, MOST_RAGGED_ROWS
    if has_room and 0 not in (*call.q.shape, call.batch, call.seqlen_q):
        run, is_tiled = prepare_on_cache(call, options)
    if has_room and call.k_new is not None and call.batch:
        append = PreparedAppend.of(call, options, call.is_packed or is_tiled)
        most = min(most, MOST_VECTORS // max(1, vectors_of_row(call, call.heads_q)))
    widens_q = is_tiled and call.q.dtype == FP8_DTYPE
    return {"run": run, "most_queries": most, "append": append, "widens_q": widens_q}


def query_step(options: Options) -> int:
    """Rotary positions between queries: 1, or 0 if they share one."""
    return int(options.window != Window())


NAMES_OF_APPEND = {
    "k": "k_new", "v": "v_new", "k_cache": "k", "v_cache": "v", "seqlens": "seqused_k",
    "cu_seqlens": "cu_seqlens_k_new", "cos": "rotary_cos", "sin": "rotary_sin",
}  # fmt: skip
"""Names of `AppendArguments`, and what the call's values are called, where they differ."""


@dataclass(frozen=True, slots=True)
class PreparedAppend:
    """Appends to caches of calls of a description, and rotates their queries."""

    launch: Callable[[dict[str, Any]], object]
    is_rotary: bool  # whether queries and new keys are rotated
    # Whether rotated queries may be in the output's memory, which has the same shape. The decode
    # kernel writes a row of O where it has read this row of Q, or when all that read it have. The
    # forward kernel, which may have packed queries and prompts, reads Q twice: when it computes
    # failed rows once more, O has been written.
    rotates_in_out: bool
    # Keys of each sequence beyond the lengths; None if the kernel writes the lengths with them.
    seqlen_new: int | None

    @classmethod
    def of(cls, call: AttentionCall, options: Options, has_tiles: bool) -> "PreparedAppend":
        """Load the kernel. `has_tiles` says whether the forward kernel may attend."""
        kernel, is_rotary = append_kernel(call, options, has_tiles), call.rotary_cos is not None
        entry: Callable = functools.partial(append_tokens, kernel)
        if call.q.device.type == "cuda":
            entry = load_kernel(kernel)
        named: dict[str, Any] = {name: FromCall(to) for name, to in NAMES_OF_APPEND.items()}
        named["query_step"] = query_step(options)
        seqlen_new = None if kernel.writes_lengths else call.k_new.shape[1]
        launch = launcher(entry, Launch.of(kernel, **named).arguments)
        in_out = not has_tiles and call.head_dim == call.head_dim_v
        return cls(launch, is_rotary, in_out, seqlen_new)

    def run(self, values: dict[str, Any], out: torch.Tensor | None) -> None:
        """Append k and v to the caches.
        `out` is None if it is the caller's: rotated queries are never put there.

        Changes values: q, if there are rotary tables; the lengths, which get the new tokens, if the
        kernel writes lengths. Otherwise `seqlen_new` says how many keys each sequence has beyond
        those.
        """
        if self.is_rotary:
            if out is None or not self.rotates_in_out:
                q = values["q"]
                out = q.new_empty(*q.shape)
            values["rotated"] = out
        if self.seqlen_new is None:
            seqlens = values["seqused_k"]
            values["new_seqlens"] = total = seqlens.new_empty(seqlens.shape[0])
            self.launch(values)
            values["seqused_k"] = total
        else:
            self.launch(values)
            values["seqlen_new"] = self.seqlen_new
        if self.is_rotary:
            values["q"] = out


def vectors_of_row(call: AttentionCall, heads: int) -> int:
    """Vectors of 16 bytes in a row of heads."""
    return heads * max(call.head_dim, call.head_dim_v) // VECTOR


def append_kernel(call: AttentionCall, options: Options, has_tiles: bool) -> Append:
    """The kernel that appends k and v of this call."""
    for name, operand in (("k", call.k_new), ("q", call.q)):
        *rows, heads, _ = operand.shape
        count = math.prod(rows) * vectors_of_row(call, heads)
        if count > MOST_VECTORS:
            raise ValueError(f"{name} must have at most {MOST_VECTORS} vectors (16 B), got {count}")
    rotary = None
    if call.rotary_cos is not None:
        dtype = str(call.rotary_cos.dtype).removeprefix("torch.")
        rotary = Rotary(2 * call.rotary_cos.shape[1], options.rotary_interleaved, dtype)
    return Append(
        DTYPES[call.k_new.dtype],
        call.head_dim,
        call.head_dim_v,
        paged=call.page_table is not None,
        batch_indexed=call.batch_idx is not None,
        ragged=call.cu_seqlens_k_new is not None,
        rotary=rotary,
        packed=call.is_packed and rotary is not None,
        turned=call.rotary_seqlens is not None,
        # The decode kernel adds equal numbers by itself. The table of the forward kernel's tiles is
        # made of lengths (`fa3.calls.execution`).
        writes_lengths=has_tiles or call.cu_seqlens_k_new is not None,
        fp8=call.has_fp8_cache,
    )
