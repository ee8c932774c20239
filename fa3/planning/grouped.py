"""`GroupedPlan`: a dense problem in the decode kernel, K and V being a cache that is full.

The forward kernel has tiles of one query head. With few queries most of their rows are empty, and
the query heads of a key/value head read the same keys one by one. In the decode kernel these heads
share a tile, which reads keys once. `fa3.planning.planner` compares its predicted time with the
forward kernel's; `fa3.calls.forward` launches the plan.

    T = max(memory, work) + fixed

    memory  bytes over the bandwidth that the kernel reaches
    work    key blocks over the SMs, if a head of K and V has several tiles
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from fa3.planning.costs import LEAST_MARGIN, UNSURE, least_gain
from fa3.planning.decode import TILE_N, DecodePlan, Sizes, choose_cut
from fa3.planning.explanation import (
    Candidate,
    PlanDescription,
    choice_of,
    counted,
    duration,
    facts_of_candidates,
    facts_of_prediction,
)
from fa3.planning.gpu import Gpu
from fa3.planning.launch import Launch
from fa3.planning.prediction import Prediction
from fa3.primitives.cache_blocks import CacheLayout
from fa3.primitives.shared_memory import CAPACITY, padded
from fa3.primitives.wgmma import ROWS
from fa3.problem import AttentionSpec, Problem
from fa3.schedules.sequences import LONGEST
from fa3.scores.masks import Band, Sequence

FIXED_US = 6.5  # what a call takes besides reading: launches, the first blocks' latency, the merge

READS = 0.9
"""Bandwidth that the kernel reaches over `Costs.bytes_per_us`. With both, 16 of the 17 times of
`benchmarks/results/h200-2026-11-21-decode` are met within 3%; for 8.3 us it says 7.4."""

MEASURED_HEAD_DIM = 128  # the largest heads that these times are of

BLOCK_US, BLOCK_COLUMNS = 1.09, 256
"""An SM's time for a key block of so many columns of K and V, where tiles share keys:
chunks-7x512+64x1 of `benchmarks/results/h200-2026-11-22-gradients`, 305,000 blocks in 2.5 ms."""

FULL = CacheLayout(has_seqlens=False)  # K and V of a dense call


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    """How a dense problem runs in the decode kernel."""

    problem: Problem
    gpu: Gpu
    decode: DecodePlan  # the plan of the kernels
    # Plans of the forward kernel that the planner compared with it.
    considered: tuple[Candidate, ...] = field(default=(), repr=False, compare=False)

    name: ClassVar[str] = "packed"

    @classmethod
    def of(
        cls, problem: Problem, gpu: Gpu, cache: CacheLayout = FULL, appends: bool = False
    ) -> "GroupedPlan":
        """Return the plan of a problem with keys in a cache, as a rule the call's own K and V.
        Raises NotImplementedError for a score or a mask of the user's or dropout, and ValueError
        for more queries or keys than the kernel counts."""
        spec = problem.spec
        if spec.has_user_functions:
            raise NotImplementedError(
                "pack_gqa must be None or False with a score or a mask of your own"
            )
        if spec.is_fp8:
            raise NotImplementedError("pack_gqa must be None or False with q in FP8")
        if spec.has_dropout:
            raise NotImplementedError("pack_gqa must be None or False with dropout_p")
        if problem.seqlen_k > LONGEST:
            raise ValueError(
                f"pack_gqa must be None or False with more than {LONGEST} keys, got "
                f"{problem.seqlen_k}"
            )
        heads = problem.num_heads_kv, problem.qhead_per_kvhead
        sizes = Sizes(problem.batch, problem.seqlen_q, *heads, problem.seqlen_k)
        sizes.check("q")
        window = sizes.bounds(problem.window)
        spec = AttentionSpec(
            spec.dtype, spec.head_dim, spec.head_dim_v, Band.of(window), spec.scores, spec.sinks
        )
        cut = choose_cut(sizes, window, gpu.num_sms, appends=appends)
        return cls(problem, gpu, DecodePlan(spec, cache, sizes, window, cut, gpu.num_sms))

    @classmethod
    def if_possible(cls, problem: Problem, gpu: Gpu) -> "GroupedPlan | None":
        """The plan of a problem; None if the kernel cannot run it."""
        try:
            return cls.of(problem, gpu)
        except (NotImplementedError, ValueError):
            return None

    def launches(self) -> tuple[Launch, ...]:
        """What is launched: the kernel that attends, and the one that merges."""
        return self.decode.launches

    @property
    def is_measured(self) -> bool:
        """Whether such calls were measured: one tile for each head of K and V, heads up to 128."""
        head_dim = max(self.problem.spec.head_dim, self.problem.spec.head_dim_v)
        return self.decode.sizes.num_m_blocks == 1 and head_dim <= MEASURED_HEAD_DIM

    def beats(self, others: Iterable[Candidate]) -> bool:
        """Whether it is predicted to be faster than all plans of the forward kernel, by more than
        the margin."""
        us = self.predict().mean_us
        margin = LEAST_MARGIN if self.is_measured else UNSURE
        best = min(other.prediction.mean_us for other in others)
        return best - us > least_gain(us, margin)

    def beside(self, plan: Candidate, others: Iterable[Candidate]) -> str:
        """Compare it with the forward kernel's plan and what that was compared with, in a
        sentence."""
        us, of_plan = self.predict().us, plan.prediction.us
        when = "unless pack_gqa is False" if self.beats((plan, *others)) else "if pack_gqa is True"
        remark = "" if self.is_measured else ", not measured"
        return (
            f"In the decode kernel, where query heads that share keys share tiles: {duration(us)}, "
            f"{us / of_plan - 1:+.1%}{remark}. Calls run so {when}."
        )

    def explain(self, appends: bool = False) -> PlanDescription:
        """Say what it does, its predicted time and bottleneck, and the forward kernel's plans."""
        problem, decode, prediction = self.problem, self.decode, self.predict()
        kernels = [*(("append",) if appends else ()), *(one.kernel for one in self.launches())]
        others = sorted(self.considered, key=lambda one: one.prediction.us)
        sizes, config = decode.sizes, decode.kernel().config
        call = "dense" if decode.cache.is_full else "cache"
        flops = problem.flops
        merge = "Combine merges" if len(self.launches()) > 1 else "The decode kernel merges"
        filled = "" if decode.cache.is_full else ", if all sequences fill the cache"
        unmeasured = "" if self.is_measured else "; such calls were not measured"
        sentences = {
            "CTA": f"{ROWS} query rows against blocks of {TILE_N} keys. The query heads that share "
            "keys are rows of the same tile, so keys are read once for all of them.",
            "Memory": f"{config.q_stages} stages of Q in shared memory, {config.kv_stages} of K "
            f"and of V: {config.smem_bytes(decode.spec):,} of {CAPACITY:,} bytes.",
            "Grid": f"{counted(decode.num_ctas, 'CTA')} on {self.gpu.num_sms} SMs, for "
            f"{counted(sizes.num_tiles, 'tile')}.",
            "Cut": f"All CTAs get equally many keys. {merge} the parts of split tiles.",
            "Time": f"{duration(prediction.us)} predicted, "
            f"{flops / prediction.us / 1e6:,.0f} TFLOP/s{filled}{unmeasured}.",
            "Bound": f"By {prediction.bound}: device memory {duration(prediction.memory_us)}, "
            f"compute {duration(prediction.compute_us)}, launches {prediction.launch_us:.1f} us.",
            "Choice": choice_of("decode kernel", prediction, others),
        }
        facts = {
            "tile": [ROWS, TILE_N],
            "ctas": decode.num_ctas,
            "tiles": sizes.num_tiles,
            "shared_memory_bytes": config.smem_bytes(decode.spec),
            "prediction": facts_of_prediction(prediction),
            "candidates": facts_of_candidates(others),
        }
        return PlanDescription.of(call, problem, self.gpu, kernels, sentences, facts)

    def predict(self) -> Prediction:
        """The time that the call is predicted to take, with its components."""
        problem, spec, sizes = self.problem, self.problem.spec, self.decode.sizes
        sequence = Sequence(problem.seqlen_q, problem.seqlen_k, self.decode.window)
        seen = self.decode.spec.mask.key_blocks(0, problem.seqlen_q, TILE_N, sequence)
        blocks = seen.end - seen.begin
        hidden = max(0, problem.seqlen_k - blocks * TILE_N)
        unread = problem.batch * problem.num_heads_kv * hidden * spec.key_bytes
        memory_us = (problem.bytes - unread) / (READS * self.gpu.costs.bytes_per_us)
        work_us = 0.0
        if sizes.num_m_blocks > 1:
            columns = padded(spec.head_dim) + padded(spec.head_dim_v)
            most = -(-sizes.num_tiles * blocks // self.gpu.num_sms)
            work_us = most * BLOCK_US * columns / BLOCK_COLUMNS
        us = max(memory_us, work_us)
        return Prediction(
            us=us + FIXED_US,
            burst_us=us + FIXED_US,
            compute_us=work_us,
            memory_us=memory_us,
            launch_us=FIXED_US,
            longest_us=us,
            waves=1.0,
            busy=1.0,
        )
