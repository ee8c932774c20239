"""Plans and kernels in words, with predicted time, bottleneck and candidates.

`describe_kernel` says what people call a kernel: its role, tile, and what it is compiled for.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from fa3.kernels.append import Append
from fa3.kernels.backward import Backward, BackwardPass
from fa3.kernels.backward_queries import BackwardPreprocess
from fa3.kernels.combine import Combine
from fa3.kernels.decode import Decode
from fa3.kernels.decode_launch import TILE_N
from fa3.kernels.forward import Forward
from fa3.kernels.forward_launch import ForwardConfig
from fa3.kernels.segment_table import SegmentTable
from fa3.kernels.shared_tile_table import MultiSequenceTable
from fa3.kernels.tile_table import TileTable
from fa3.kernels.transpose import Transpose
from fa3.planning.costs import Gpu, least_gain
from fa3.planning.prediction import Prediction
from fa3.primitives.cache_blocks import CacheLayout
from fa3.primitives.warp_attention import MMA_ROWS
from fa3.primitives.wgmma import ROWS
from fa3.problem import NO_BOUND, AttentionSpec, Problem, Window
from fa3.scores.masks import Intervals
from fa3.scores.scores import Alibi, Softcap

BELOW = "\n" + " " * 9  # begins another line of a sentence
NOT_PREDICTED = "Not predicted: fa3 has no cost model of such calls."


class Candidate(NamedTuple):
    """A tiling and a schedule for a problem, with the predicted time."""

    config: ForwardConfig
    schedule: str  # a name in `fa3.schedules.SCHEDULES`
    prediction: Prediction
    # Whether its tile and its schedule were measured; otherwise the prediction is a guess, and the
    # planner takes it only for a gain above `fa3.planning.costs.UNSURE`.
    measured: bool
    laid_out: Any = None  # the schedule, if it was made to be predicted

    @property
    def name(self) -> str:
        return f"{self.schedule} {describe_config(self.config)}"


def describe_plan(
    problem: Problem,
    gpu: Gpu,
    kernels: Iterable[Any],  # what is launched, in this order
    sentences: dict[str, str],  # of this kind of plan, by what they are about
    flops: int,  # useful floating-point operations
) -> str:
    """A plan in words: general lines, then lines of its kind."""
    sentences = {
        "Problem": f"{describe_problem(problem)}: {quantity(flops, 'FLOP')}; q, k, v and out have "
        f"{quantity(problem.bytes, 'B')}.",
        "GPU": f"{gpu.name}, {gpu.num_sms} SMs.",
        "Kernels": BELOW.join(map(describe_kernel, kernels)),
        **sentences,
    }
    return "\n".join(f"{name:8} {sentence}" for name, sentence in sentences.items() if sentence)


def choice_of(name: str, prediction: Prediction, others: Iterable[Candidate]) -> str:
    """What was chosen, and candidates of other names, the fastest first."""
    us = prediction.us
    lines = [f"{name}: {duration(us)}."]
    others = (one for one in others if one.name != name)
    for other in sorted(others, key=lambda one: one.prediction.us):
        difference = other.prediction.us / us - 1 if us else 0.0
        remark = "" if other.measured else ", not measured"
        if 0 < us - other.prediction.us <= least_gain(us):
            remark += ", less than the model can tell"
        lines.append(f"{other.name}: {duration(other.prediction.us)}, {difference:+.1%}{remark}.")
    return BELOW.join(lines)


# ------------------------------------------------------------------------------------ in words


def quantity(number: float, unit: str) -> str:
    """A number with the prefix that suits it: "137.5 GFLOP", "83.9 MB"."""
    prefixes = ["", "k", "M", "G", "T", "P", "E"]
    while number >= 1000 and len(prefixes) > 1:
        number /= 1000
        del prefixes[0]
    return f"{number:,.1f} {prefixes[0]}{unit}" if prefixes[0] else f"{number:,.0f} {unit}"


def duration(us: float) -> str:
    """A time, three digits or more: "12.3 us", "393.9 ms", "13.7 s"."""
    if us >= 10_000_000:
        return f"{us / 1_000_000:,.1f} s"
    if us >= 10_000:
        return f"{us / 1000:,.1f} ms"
    return f"{us:,.0f} us" if us >= 100 else f"{us:.1f} us"


def counted(number: int, noun: str) -> str:
    """A number of things: "1 tile", "1,024 tiles"."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def describe_problem(problem: Problem) -> str:
    """A problem in one line."""
    spec = problem.spec
    heads = counted(problem.num_heads_q, "head")
    if problem.qhead_per_kvhead > 1:
        shared = counted(problem.num_heads_kv, "key/value head")
        heads = f"{problem.num_heads_q} query heads on {shared}"
    queries = "1 query" if problem.seqlen_q == 1 else f"{problem.seqlen_q:,} queries"
    modifiers = "".join(f", {name}" for name in names_of_modifiers(spec))
    return (
        f"{problem.batch:,} x {queries} on {counted(problem.seqlen_k, 'key')}, {heads}, "
        f"{head_dims(spec.head_dim, spec.head_dim_v)}, {spec.dtype}, "
        f"{describe_window(problem.window)}{modifiers}"
    )


def describe_window(window: Window) -> str:
    """A window in a few words."""
    if window == (NO_BOUND, NO_BOUND):
        return "no mask"
    if window == (NO_BOUND, 0):
        return "causal"
    left, right = ("all" if bound == NO_BOUND else f"{bound:,}" for bound in window)
    return f"window of {left} keys to the left and {right} to the right"


SCORES: dict[type, str] = {Softcap: "softcap", Alibi: "ALiBi"}
"""The names of fa3's scores; others have the name of their class."""


def describe_kernel(kernel: Any) -> str:
    """A kernel in one line: `forward, tile 128x128, list, bfloat16, head_dim 128, causal`."""
    words: list[str]
    match kernel:
        case str():
            return kernel
        case Forward():
            schedule: Any = kernel.schedule_type
            words = ["forward", f"tile {describe_config(kernel.config)}", schedule.name]
            words += [*words_of_spec(kernel.spec), *words_of_cache(kernel.cache)]
            words += ["equal queries"] * kernel.has_equal_queries
        case Decode():
            cut: Any = kernel.cut_type
            rows = MMA_ROWS if kernel.config.keys_by_warp else ROWS
            words = ["decode", f"tile {rows}x{TILE_N}", cut.words]
            words += [f"{kernel.qhead_per_kvhead} query heads per key/value head"]
            words += ["packed queries"] * kernel.is_packed
            words += ["overlapped with forward"] * kernel.overlaps_forward
            words += ["64-bit counts"] * kernel.is_long
            # It always has code for a bound to the right: see `fa3.planning.decode.Sizes.bounds`.
            spec_words = [
                word.replace("causal", "causal or not") for word in words_of_spec(kernel.spec)
            ]
            words += [*spec_words, *words_of_cache(kernel.cache)]
            words += ["FP8 queries"] * kernel.has_fp8_q
        case Combine():
            words = ["combine", kernel.dtype, f"head_dim_v {kernel.head_dim_v}"]
            words += ["sinks"] * (kernel.sinks is not None) + ["packed queries"] * kernel.is_packed
        case Append():
            rotary = "no rotary embedding"
            if kernel.rotary is not None:
                turned = "pairs" if kernel.rotary.interleaved else "halves"
                rotary = f"rotary embedding of {turned}, tables {kernel.rotary.dtype}"
            words = ["append", kernel.dtype, head_dims(kernel.head_dim, kernel.head_dim_v)]
            words += [rotary, "pages" if kernel.paged else "no pages", *["FP8 cache"] * kernel.fp8]
            words += ["lengths for tiles"] * kernel.writes_lengths
        case TileTable():
            words = ["tile table", f"tile {kernel.tile_m}x{kernel.tile_n}"]
            words += [name_of_mask(kernel.band)] + ["keys in a cache"] * kernel.has_cache
        case SegmentTable():
            words = describe_kernel(kernel.tiles).replace("tile table", "segment table").split(", ")
        case MultiSequenceTable():
            words = ["shared-tile table", name_of_mask(kernel.band)]
        case Transpose():
            words = ["transpose", f"head_dim_v {kernel.head_dim_v}"]
            words += ["packed keys"] * kernel.is_packed + ["used keys"] * kernel.has_used
        case BackwardPass():
            return describe_kernel(kernel.main)
        case BackwardPreprocess():
            spec = kernel.main.spec
            words = ["backward preprocess", spec.dtype, head_dims(spec.head_dim, spec.head_dim_v)]
            words += ["dropout"] * spec.has_dropout
        case Backward():
            config = kernel.config
            words = ["backward", f"tile {config.tile_m}x{config.tile_n}"]
            words += ["deterministic"] * kernel.is_ordered + words_of_spec(kernel.spec)
        case _:
            words = [type(kernel).__name__]
    return ", ".join(words)


def words_of_spec(spec: AttentionSpec) -> list[str]:
    """What a kernel is compiled for."""
    return [
        spec.dtype,
        head_dims(spec.head_dim, spec.head_dim_v),
        name_of_mask(spec.mask),
        *names_of_modifiers(spec),
    ]


def names_of_modifiers(spec: AttentionSpec) -> list[str]:
    """The names of a spec's scores and masks, sinks, dropout."""
    masks = () if isinstance(spec.mask, Intervals) else spec.mask.templates
    kinds = [template.kind for template in (*spec.scores, *masks)]
    names = [SCORES.get(kind, kind.__name__) for kind in kinds]
    return names + ["sinks"] * (spec.sinks is not None) + ["dropout"] * spec.has_dropout


def words_of_cache(cache: CacheLayout | None) -> list[str]:
    """How the keys lie, unless they are a dense tensor."""
    if cache is None or cache.is_full:
        return []
    if cache.is_packed:
        return ["packed keys"]
    pages = f"with pages of {cache.page_size}" if cache.page_size else "without pages"
    return [f"{'FP8 ' * cache.is_fp8}cache {pages}"]


def head_dims(head_dim: int, head_dim_v: int) -> str:
    """The head sizes: "head_dim 128", "head_dim 192 and 128"."""
    return f"head_dim {head_dim}" + (f" and {head_dim_v}" if head_dim_v != head_dim else "")


def name_of_mask(mask: Any) -> str:
    """The bounds that a kernel has code for, without their values."""
    if isinstance(mask, Intervals):
        return "key ranges from the table"
    return {
        (False, False): "no mask",
        (False, True): "causal",
        (True, False): "window to the left",
        (True, True): "window",
    }[mask.band.left, mask.band.right]


def describe_config(config: ForwardConfig) -> str:
    """A tiling in words, such as `128x80 in pairs of rows, fixed row max`."""
    text = f"{config.tile_m}x{config.tile_n}"
    if config.cluster > 1:
        text += " in pairs of rows" if config.cluster_m > 1 else " in pairs of heads"
    return f"{text}, fixed row max" if config.fixed_row_max else text
