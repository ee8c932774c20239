"""What people call a kernel: its role, its tile and what it is compiled for, in one line."""

from typing import Any

from fa3.kernels.append import Append
from fa3.kernels.backward import Backward
from fa3.kernels.backward_pass import BackwardPass
from fa3.kernels.backward_preprocess import BackwardPreprocess
from fa3.kernels.combine import Combine
from fa3.kernels.decode import Decode
from fa3.kernels.decode_launch import TILE_N
from fa3.kernels.forward import Forward
from fa3.kernels.forward_launch import ForwardConfig
from fa3.kernels.joined_table import MultiSequenceTable
from fa3.kernels.segment_table import SegmentTable
from fa3.kernels.tile_table import TileTable
from fa3.primitives.cache_blocks import CacheLayout
from fa3.primitives.wgmma import ROWS
from fa3.problem import AttentionSpec
from fa3.scores.intervals import Intervals
from fa3.scores.scores import Alibi, Softcap

FORWARD_TILES = {
    "RecomputeTiles": "recompute",
    "RecomputeRaggedTiles": "recompute of packed sequences",
    "RaggedTiles": "packed sequences",
    "RaggedSegments": "packed sequences, tiles split on the GPU",
    "MultiSequenceTiles": "short packed sequences that share tiles",
}
"""What the forward kernel works on, by its schedule's class; other schedules have a name."""

DECODE_CUTS = {
    "CtaGroups": "keys split over all CTAs, merged inside",
    "StreamK": "keys split over all CTAs, merged inside or by combine",
    "FixedSplit": "keys split by each sequence's length, merged by combine",
    "NoSplit": "whole tiles",
}
"""How the decode kernel splits keys, by the class of its cut. docs/environment.md has the words."""

SCORES: dict[type, str] = {Softcap: "softcap", Alibi: "ALiBi"}
"""The names of fa3's scores; others have the name of their class."""


def describe_kernel(kernel: Any) -> str:
    """A kernel in one line: "forward, tile 128x128, list, bfloat16, head_dim 128, causal"."""
    words: list[str]
    match kernel:
        case str():
            return kernel
        case Forward():
            kind: Any = kernel.schedule_type
            tiles = FORWARD_TILES.get(kind.__name__) or kind.name
            both = " or online softmax" * kernel.has_online_and_fixed
            words = ["forward", f"tile {describe_config(kernel.config)}{both}", tiles]
            words += [*words_of_spec(kernel.spec), *words_of_cache(kernel.cache)]
        case Decode():
            words = ["decode", f"tile {ROWS}x{TILE_N}"]
            words += [DECODE_CUTS[kernel.cut_type.__name__]]
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
        case TileTable():
            words = ["tile table", f"tile {kernel.tile_m}x{kernel.tile_n}"]
            words += [name_of_mask(kernel.band)] + ["keys in a cache"] * kernel.has_cache
        case SegmentTable():
            words = describe_kernel(kernel.tiles).replace("tile table", "segment table").split(", ")
        case MultiSequenceTable():
            words = ["shared-tile table", name_of_mask(kernel.band)]
        case BackwardPass():
            return describe_kernel(kernel.main)
        case BackwardPreprocess():
            # It has no mask, whatever the call has: see `fa3.planning.backward.preprocess_spec`.
            spec_words = [word for word in words_of_spec(kernel.spec) if word != "no mask"]
            words = ["backward preprocess", *spec_words]
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
    """The names of scores and masks of a spec, and whether it has sinks and dropout."""
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
    """The bounds that a kernel has code for; it takes their values when it is launched."""
    if isinstance(mask, Intervals):
        return "key ranges from the table"
    return {
        (False, False): "no mask",
        (False, True): "causal",
        (True, False): "window to the left",
        (True, True): "window",
    }[mask.band.left, mask.band.right]


def describe_config(config: ForwardConfig) -> str:
    """A tiling in a few characters: "128x128", "128x80 in pairs of rows, fixed row max"."""
    text = f"{config.tile_m}x{config.tile_n}"
    if config.cluster > 1:
        text += " in pairs of rows" if config.cluster_m > 1 else " in pairs of heads"
    return f"{text}, fixed row max" if config.fixed_reference else text
