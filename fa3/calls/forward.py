"""`flash_attn_func`: validate, plan, run. CPU tensors go to the reference, CUDA tensors to Hopper.

How a call runs is worked out once for its shapes, strides, types and options, and remembered
(`fa3.calls.attention`).
"""

import functools
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from fa3.calls import operators
from fa3.calls.attention import PreparedAttention, checked_call, run_call
from fa3.calls.call import Described
from fa3.calls.decode import PreparedDecode
from fa3.calls.devices import gpu_of, reserve_sms
from fa3.calls.launcher import Prepared, lse_address
from fa3.calls.options import DENSE, Options, check_hashable
from fa3.calls.scales import Scales
from fa3.calls.tuned_plans import plan_call
from fa3.complaints import shown
from fa3.planning.decode import DecodePlan
from fa3.planning.gpu import H200
from fa3.planning.plan import Plan, check_plan
from fa3.planning.planner import ScheduleChoice, plan_dense, plan_forward, schedule_name
from fa3.planning.routes import ZEROS, choose_dense
from fa3.primitives.cache_blocks import CacheTables
from fa3.primitives.dropout import DropoutArguments
from fa3.problem import NO_BOUND, REMEMBERED, Problem
from fa3.reference.dropout import Dropout
from fa3.reference.steps import execute
from fa3.reference.walker import RaggedOperands
from fa3.running.graphs import Table
from fa3.scores.masks import Mask
from fa3.scores.scores import Score


class PreparedForward(NamedTuple):
    """How calls of a description run in the forward kernel."""

    plan: Plan
    prepared: Prepared | None  # its launches; None on the CPU

    def attend(
        self,
        operands: RaggedOperands,  # dense ones
        sizes: None,
        modifiers: tuple[torch.Tensor, ...] | None,  # of the spec's scores, mask and sinks
        scale: float,
        dropout: Dropout | None,
        tables: CacheTables,
        seqlen_new: int,
        descales: tuple[torch.Tensor, ...] | None,  # of FP8 tensors
    ) -> None:
        """Write out and, unless it is None, the log-sum-exp."""
        if self.prepared is None:
            execute(self.plan, operands[:5], scale, modifiers, dropout, descales)
            return
        drawn = None if dropout is None else dropout.arguments
        self.prepared.run(values_of_dense(*operands[:5], modifiers, scale, drawn, descales))


def values_of_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    modifiers: tuple[torch.Tensor, ...] | None,
    softmax_scale: float,
    dropout: DropoutArguments | None = None,
    descales: tuple[torch.Tensor, ...] | None = None,
) -> dict[str, Any]:
    """Return what launches of a `Plan` take of a call."""
    return {
        "q": q, "k": k, "v": v, "o": out, "lse": lse_address(lse), "modifiers": modifiers,
        "softmax_scale": softmax_scale, "dropout": dropout, "descales": descales,
    }  # fmt: skip


def prepare_plan(plan: Plan, device: torch.device, is_recorded: bool = False) -> Prepared:
    """Load the kernels of a plan, the first one instrumented if it `is_recorded`."""
    table = None
    if plan.schedule.table is not None:
        table = Table.upload(plan.schedule.table, device)
    return Prepared.of(plan.launches(is_recorded), plan.memory, table)


@operators.registers
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (NO_BOUND, NO_BOUND),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    score: Score | None = None,
    mask: Mask | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    schedule: ScheduleChoice = None,
    plan: Plan | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(score(softmax_scale * q k^T) + mask) v.

    Query i stands at key i + seqlen_k - seqlen_q (bottom-right alignment). Several query heads
    may share one key/value head (GQA, MQA): query head h uses key/value head
    h // (heads_q / heads_kv). Runs on the current stream of the tensors' GPU; CPU tensors run
    through `fa3.reference.steps`. q, k, v and sinks may require grad: out and the log-sum-exp are
    then differentiable by them, once.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), bfloat16 or float16; head_dim a multiple of 8
            up to 256. Any strides that are multiples of 16 bytes with a contiguous last dimension.
            Or float8_e4m3fn, without gradients: then head sizes are multiples of 32, k and v are
            of the same dtype, and the output is bfloat16 or, with such an `out`, float16.
        k: (batch, seqlen_k, heads_kv, head_dim), like q.
        v: (batch, seqlen_k, heads_kv, head_dim_v), like q; head_dim_v may differ from head_dim.
        softmax_scale: factor of the scores, positive; 1 / sqrt(head_dim) by default.
        causal: hide the keys after a query's own position.
        window_size: keys that a query sees before and after its own position, as (left, right);
            -1 for all. causal sets right to 0, whatever it is.
        softcap: bound of the scores: cap * tanh(score / cap); 0 for none. Applied before
            everything else that changes scores.
        alibi_slopes: (heads_q,) or (batch, heads_q), float32: adds
            -slope |i + seqlen_k - seqlen_q - j| to the score of query i and key j.
        sinks: (heads_q,), float32 or q's dtype: a logit that joins the denominator of its
            head's softmax, and so the log-sum-exp.
        score: a function of scores of your own, see `fa3.Score`; applied last. Has no gradient.
        mask: a mask of your own, see `fa3.Mask`; joined with causal and window_size.
        deterministic: whether dQ must have the same bits every time, for which key tiles wait for
            each other on a GPU. Out, dK and dV always have.
        sm_margin: SMs to leave to other kernels, also in the backward pass.
        return_lse: also return the log-sum-exp. return_attn_probs is FlashAttention-3's name
            for the same.
        out: (batch, seqlen_q, heads_q, head_dim_v) tensor that receives the output, like q;
            bfloat16 or float16 with q in FP8. Must not share memory with another tensor of the
            call; it may lie between their elements. Not with gradients.
        schedule: the order of the tiles: "single", "static", "list", "dynamic", "split", a class
            of `fa3.schedules` or an object of one, or a function from the list of `fa3.Tile` to
            their order; chosen by the planner if not given. If the planner pairs CTAs, the list
            has a tile for each pair. No order changes a bit of the output; "split" computes parts
            of tiles and adds them up, which changes the last place. A function is called once for
            every shape: pass the same one each time.
        plan: how to run, from `fa3.plan_forward`; chosen by the planner if not given.
        dropout_p: how likely a value's weight is dropped, in [0, 1); what is kept is divided by
            1 - dropout_p. It is rounded to a multiple of 2**-16, and to 0.996 from there on. The
            log-sum-exp is the one without dropout.
        rng_state: (1,), int64, on q's device: the seed of dropout, which `fa3.dropout_mask` takes
            too. By default it is drawn from torch's default generator of the device, in a CUDA
            graph anew at each replay.
        num_splits: 0 or 1, which are the same: the planner decides whether to split.
        pack_gqa: whether the query heads of a key/value head share tiles, in the decode kernel,
            which pays with few queries; chosen by the planner if not given. True is refused with
            gradients, dropout, a schedule, a plan, and a score or a mask of your own.
        attention_chunk: 0 or None, which are the same: no chunks.
        q_descale, k_descale, v_descale: (batch, heads_kv), float32, positive: what q, k and v in
            FP8 are multiplied by; 1 by default. Any strides, also 0.
        qv: in the signature for compatibility; anything but None is not supported.

    Returns:
        out, (batch, seqlen_q, heads_q, head_dim_v), of q's dtype, bfloat16 for FP8; with
        return_lse also the log-sum-exp of the scaled scores, (batch, heads_q, seqlen_q), float32,
        natural logarithm. A query that sees no key gives 0 and -inf, or 0 and its head's sink.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has a wrong value, shape, layout or device, a score or mask does
            not compile, or a tensor requires grad that would get none.
        NotImplementedError: the combination is not supported, a tensor does not lie in memory, or a
            transform of torch.func or torch.jit.trace is active.

    Source: Dao et al., FlashAttention (arXiv 2205.14135); Shah et al., FlashAttention-3
        (arXiv 2407.08608); ALiBi: Press et al. (arXiv 2108.12409).
    """
    tensors = (
        q, k, v, None, None, None, None, None, None, None, None, None, None, None, None, None,
        q_descale, k_descale, v_descale, alibi_slopes, sinks, out,
    )  # fmt: skip
    options = (
        causal, softcap, attention_chunk, num_splits, sm_margin, return_lse, return_attn_probs,
        deterministic, dropout_p, pack_gqa, qv,
    )  # fmt: skip
    if not (schedule is plan is None):
        check_choices(schedule, plan)
    arguments = (
        softmax_scale, window_size, score, mask, rng_state, None, None, None, None, schedule, plan,
    )  # fmt: skip
    return run_call(DENSE, prepare_forward, tensors, options, arguments)


def check_choices(schedule: ScheduleChoice, plan: Plan | None) -> None:
    """Raise unless calls can be remembered by the schedule, and the plan is one."""
    check_hashable("schedule", schedule)
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"plan must come from fa3.plan_forward, got {shown(plan)}")


@functools.lru_cache(maxsize=REMEMBERED)
def prepare_forward(described: Described, options: Options) -> PreparedAttention:
    """Validate calls of this description, plan them and load their kernels."""
    call = checked_call(described, options)
    problem, pack_gqa, schedule, plan = (
        call.problem(options), options.pack_gqa, options.schedule, options.plan,
    )  # fmt: skip
    on_gpu, is_planned = call.q.device.type == "cuda", not (schedule is plan is None)
    gpu = gpu_of(call.q.device) if on_gpu else H200
    if plan is None:
        gpu = reserve_sms(gpu, options.sm_margin)
    elif schedule is not None:
        raise ValueError("schedule must be None when plan is given: a plan has a schedule")
    elif options.sm_margin:
        raise ValueError("sm_margin must be 0 when plan is given: a plan has its SMs")
    else:
        check_plan(plan)
        check_same_problem(plan, problem)
    if pack_gqa and is_planned:
        raise ValueError(
            "pack_gqa must be None or False with a schedule or a plan, which are of another kernel"
        )
    if choose_dense(problem, gpu, pack_gqa, is_planned).name == ZEROS:
        # There is no tile, so no plan either.
        schedule_name(schedule)
        return PreparedAttention.of(call, described, options, None, problem=problem)
    if not is_planned:
        plan = (plan_call if on_gpu else plan_dense)(problem, gpu, pack_gqa)
    elif plan is None:
        plan = plan_forward(problem, gpu, schedule=schedule)
    kernels: Any = None
    if isinstance(plan, DecodePlan):
        kernels = PreparedDecode.of(plan, on_gpu)
    else:
        gpu = plan.gpu
        kernels = PreparedForward(plan, prepare_plan(plan, call.q.device) if on_gpu else None)
    scales = None
    if call.is_fp8:
        scales = Scales.on(call.q.device, call.heads_kv, True)
    return PreparedAttention.of(
        call, described, options, kernels, problem=problem, num_sms=gpu.num_sms, scales=scales
    )


def check_same_problem(plan: Plan, problem: Problem) -> None:
    """Raise unless a plan is one of this problem."""
    made, asked = sizes_and_spec(plan.problem), sizes_and_spec(problem)
    differing = [name for name in asked if made[name] != asked[name]]
    if differing:
        ours, theirs = (
            ", ".join(f"{name} {values[name]}" for name in differing) for values in (asked, made)
        )
        raise ValueError(f"plan was made for {theirs}; the call has {ours}")


def sizes_and_spec(problem: Problem) -> dict[str, object]:
    """All that a problem says, by name."""
    return {
        field.name: getattr(owner, field.name)
        for owner in (problem, problem.spec)
        for field in fields(owner)
        if field.name != "spec"
    }
