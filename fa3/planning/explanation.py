"""A plan in words, for `Plan.explain`: what it does, its predicted time and bottleneck, and the
candidates (`Candidate`) that the planner compared."""

from dataclasses import dataclass
from typing import NamedTuple

from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.costs import Costs, least_gain
from fa3.planning.gpu import Gpu
from fa3.planning.prediction import Prediction
from fa3.planning.tile_costs import TileKey
from fa3.planning.timeline import Timeline
from fa3.primitives.shared_memory import CAPACITY
from fa3.problem import NO_BOUND, Problem, Window
from fa3.schedules import Schedule


class Candidate(NamedTuple):
    """A tiling and a schedule for a problem, with the predicted time.

    Fields:
        schedule: a name in `fa3.schedules.SCHEDULES`.
        measured: whether its tile and its schedule were measured; otherwise the prediction is a
            guess, and the planner takes it only for a gain above `fa3.planning.costs.UNSURE`.
    """

    config: ForwardConfig
    schedule: str
    prediction: Prediction
    measured: bool

    @property
    def name(self) -> str:
        return f"{self.schedule} {describe_config(self.config)}"


@dataclass(frozen=True)
class Explanation:
    """Everything there is to say about a plan. `print` it.

    Fields:
        is_arranged: whether the caller gave the order of the tiles.
        chosen: the plan itself.
        candidates: what the planner compares for this problem, fastest first.
        packing: the same problem in the kernel of decoding, in a sentence; empty if that cannot be.
    """

    problem: Problem
    gpu: Gpu
    schedule: Schedule
    is_arranged: bool
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    timeline: Timeline
    costs: Costs
    packing: str

    def __str__(self) -> str:
        sentences = {
            "Problem": f"{describe_problem(self.problem)}: {self.problem.flops / 1e9:,.1f} GFLOP "
            f"on at least {self.problem.bytes / 1e6:,.1f} MB.",
            "CTA": self.cta,
            "Memory": self.memory,
            "Grid": self.grid,
            "Order": self.order,
            "Work": self.work,
            "Softmax": self.softmax,
            "Balance": self.balance,
            "Time": self.time,
            "Bound": self.bound,
            "Choice": self.choice,
            "Packing": self.packing,
            "Costs": self.tuning,
        }
        return "\n".join(f"{name:8} {sentence}" for name, sentence in sentences.items() if sentence)

    def trace(self, recorded: Timeline | None = None) -> dict:
        """The timeline in the Trace Event Format that Perfetto and chrome://tracing open.

        Args:
            recorded: a recording on the GPU (`fa3.record_timeline`), shown next to the prediction.
        """
        lanes = "SM" if self.config.cluster == 1 else "cluster"
        return self.timeline.trace_events(describe_problem(self.problem), lanes, recorded)

    @property
    def config(self) -> ForwardConfig:
        return self.chosen.config

    @property
    def lane(self) -> str:
        """What one cluster occupies: an SM or several."""
        return "SM" if self.config.cluster == 1 else f"cluster of {self.config.cluster} SMs"

    @property
    def cta(self) -> str:
        config = self.config
        return (
            f"{config.tile_m} query rows against blocks of {config.tile_n} keys; "
            f"{config.threads} threads in 1 producer and {config.consumers} consumer warpgroups."
        )

    @property
    def memory(self) -> str:
        config = self.config
        o_buffer = "O in a buffer of its own" if config.own_o else "O staged where Q was"
        return (
            f"{counted(config.q_stages, 'stage')} of Q, {config.kv_stages} of K and of V, "
            f"{o_buffer}: {config.smem_bytes(self.problem.spec):,} of {CAPACITY:,} bytes."
        )

    @property
    def grid(self) -> str:
        cluster = self.config.cluster
        kind = "persistent CTA" if self.schedule.is_persistent else "CTA"
        clusters = "" if cluster == 1 else f" in clusters of {cluster}"
        tiles = counted(self.schedule.order.num_tiles * cluster, "tile")
        return (
            f"{counted(self.schedule.num_clusters * cluster, kind)}{clusters} on "
            f"{self.gpu.num_sms} SMs, for {tiles}: {self.chosen.prediction.waves:,.2f} waves."
        )

    @property
    def order(self) -> str:
        order = self.schedule.order
        heads = self.problem.num_heads_q * self.problem.batch
        sections = -(-order.num_heads * order.batch // order.heads_per_section)
        together = counted(heads, "head") + " together"
        if sections > 1:
            together = f"{heads:,} heads in {sections} sections that share L2"
        first = "in the caller's order" if self.is_arranged else self.schedule.direction
        return f"{type(self.schedule).__name__}; {together}, {first}."

    @property
    def work(self) -> str:
        """Key blocks, counted once for every CTA of a cluster."""
        timeline, cluster = self.timeline, self.config.cluster
        blocks, full = timeline.blocks * cluster, timeline.full_blocks * cluster
        return f"{counted(blocks, 'key block')}, {full:,} of them unmasked."

    @property
    def softmax(self) -> str:
        if not self.config.fixed_reference:
            return ""
        return "Reference does not follow the maximum; a second launch repeats rows it fails for."

    @property
    def balance(self) -> str:
        timeline = self.timeline
        return (
            f"{duration(min(timeline.busy, default=0.0))} to "
            f"{duration(max(timeline.busy, default=0.0))} of work for "
            f"{'an' if self.lane == 'SM' else 'a'} {self.lane}, mean "
            f"{duration(timeline.mean)}: {timeline.balance:.1%}."
        )

    @property
    def time(self) -> str:
        prediction = self.chosen.prediction
        rate = self.problem.flops / prediction.us / 1e6
        where = "" if self.costs.measured else f" Not measured on a {self.gpu.name}."
        tile = "" if self.chosen.measured else " Its tile or schedule was not measured."
        return (
            f"{duration(prediction.us)} predicted under steady load, {rate:,.0f} TFLOP/s; "
            f"{duration(prediction.burst_us)} in a burst.{where}{tile}"
        )

    @property
    def tuning(self) -> str:
        """What the predictions come from, if that was measured on the user's GPU."""
        if self.gpu.tuned is None:
            return ""
        shapes = self.costs.tile(TileKey.of(self.problem.spec, self.config)).tuned
        return f"Tuned to this GPU: {self.costs.when}; its tile on {shapes} of them."

    @property
    def bound(self) -> str:
        prediction = self.chosen.prediction
        return (
            f"By {prediction.bound}: compute {duration(prediction.compute_us)} with SMs "
            f"busy for {prediction.busy:.1%} of it, device memory "
            f"{duration(prediction.memory_us)}, launch {prediction.launch_us:.1f} us."
        )

    @property
    def choice(self) -> str:
        """The candidates with their predicted times."""
        us = self.chosen.prediction.us
        others = [candidate for candidate in self.candidates if candidate.name != self.chosen.name]
        lines = [f"{self.chosen.name}: {duration(us)}."]
        for other in others:
            difference = other.prediction.us / us - 1 if us else 0.0
            remark = "" if other.measured else ", not measured"
            if 0 < us - other.prediction.us <= least_gain(us):
                remark += ", less than the model can tell"
            lines.append(
                f"{other.name}: {duration(other.prediction.us)}, {difference:+.1%}{remark}."
            )
        return ("\n" + " " * 9).join(lines)


def duration(us: float) -> str:
    """A time in three digits or more: "12.3 us", "1,234 us", "393.9 ms"."""
    if us >= 10_000:
        return f"{us / 1000:,.1f} ms"
    return f"{us:,.0f} us" if us >= 100 else f"{us:.1f} us"


def counted(number: int, noun: str) -> str:
    """A number of things: "1 tile", "1,024 tiles"."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def describe_config(config: ForwardConfig) -> str:
    """A tiling in a few characters: "128x128", "128x80 in pairs of rows, fixed reference"."""
    text = f"{config.tile_m}x{config.tile_n}"
    if config.cluster > 1:
        text += " in pairs of rows" if config.cluster_m > 1 else " in pairs of heads"
    return f"{text}, fixed reference" if config.fixed_reference else text


def describe_problem(problem: Problem) -> str:
    """A problem in one line."""
    spec = problem.spec
    heads = counted(problem.num_heads_q, "head")
    if problem.qhead_per_kvhead > 1:
        heads = f"{problem.num_heads_q} query heads on {problem.num_heads_kv} key/value heads"
    head_dim = f"head_dim {spec.head_dim}"
    if spec.head_dim_v != spec.head_dim:
        head_dim += f" and {spec.head_dim_v}"
    kinds = [template.kind.__name__ for template in (*spec.scores, *spec.mask.templates)]
    if spec.sinks is not None:
        kinds.append("sinks")
    if spec.has_dropout:
        kinds.append("dropout")
    modifiers = "".join(f", {kind}" for kind in kinds)
    return (
        f"{problem.batch} x {problem.seqlen_q:,} queries on {problem.seqlen_k:,} keys, {heads}, "
        f"{head_dim}, {spec.dtype}, {describe_window(problem.window)}{modifiers}"
    )


def describe_window(window: Window) -> str:
    """A window in a few words."""
    if window == (NO_BOUND, NO_BOUND):
        return "no mask"
    if window == (NO_BOUND, 0):
        return "causal"
    left, right = ("all" if bound == NO_BOUND else f"{bound:,}" for bound in window)
    return f"window of {left} keys to the left and {right} to the right"
