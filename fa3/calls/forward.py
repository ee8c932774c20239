"""`flash_attn_func`: validate, plan, run. CPU tensors go to the reference, CUDA tensors to Hopper.

How a call runs is worked out once for its shapes, strides, types and options, and remembered
(`fa3.calls.attention`).
"""

import torch

from fa3.calls import operators
from fa3.calls.attention import run_call
from fa3.calls.options import DENSE, check_hashable
from fa3.complaints import shown
from fa3.planning.plan import Plan
from fa3.planning.planner import ScheduleChoice
from fa3.problem import NO_BOUND
from fa3.scores.masks import Mask
from fa3.scores.scores import Score


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
    return run_call(DENSE, tensors, options, arguments)


def check_choices(schedule: ScheduleChoice, plan: Plan | None) -> None:
    """Raise unless calls can be remembered by the schedule, and the plan is one."""
    check_hashable("schedule", schedule)
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"plan must come from fa3.plan_forward, got {shown(plan)}")
