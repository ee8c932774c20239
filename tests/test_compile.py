"""Every tiling of the planner's table, compiled for sm_90a and read back as machine code.

No GPU is needed. The properties here are those that cost speed without changing a result:
registers that spill, WGMMAs that the compiler serialised, a softmax that does not run under P V.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from machine_code import HAS_LOG, KernelReport, inspect, report_of
from score_problems import Gate, RelativeBias
from varlen_problems import signature_with

from benchmarks.cubin import CubinReport, compile_kernel
from docs.examples.documents import Documents
from docs.examples.prefix_lm import PrefixLM
from fa3.kernels import forward_launch as tiling
from fa3.kernels.forward import Forward
from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.costs import H200
from fa3.planning.tilings import (
    TILINGS,
    Tiling,
    choose_config,
    general_tiling,
    halved_tiling,
    takes_fixed_row_max,
)
from fa3.primitives.cache_blocks import CacheLayout
from fa3.primitives.shared_memory import CAPACITY, padded
from fa3.primitives.softmax import GUESSED
from fa3.primitives.wgmma import ROWS, WARPGROUP
from fa3.problem import AttentionSpec, Problem, Window
from fa3.schedules import Dynamic, SingleTile, SplitTiles, StaticPersistent, TileList
from fa3.schedules.ragged import RaggedTiles
from fa3.schedules.recompute import RecomputeRaggedTiles
from fa3.schedules.shared_tiles import MultiSequenceTiles
from fa3.scores.masks import Band, Intersection, Intervals, Mask
from fa3.scores.scores import Alibi, Softcap
from fa3.scores.templates import Template

WGMMA_K = 16  # depth of one WGMMA with 16-bit operands

WIDEST_BOX = 64
"""Columns of one TMA box, the swizzle's width: 128 bytes, or half of it if that divides better."""

LONG = 1 << 14  # queries and keys for which a spec's config is chosen

MASKS = {
    "full": Band(),
    "causal": Band(right=True),
    "window": Band(left=True, right=True),
    "rows": Intervals(),
}

CAP = Template.of(Softcap(30.0))
BEHIND, AROUND = (Template.of(Alibi(torch.zeros(4), behind)) for behind in (True, False))
BEHIND_BY_BATCH, AROUND_BY_BATCH = (
    Template.of(Alibi(torch.zeros(2, 4), behind)) for behind in (True, False)
)
RELATIVE = Template.of(RelativeBias(torch.zeros(4, 33), reach=16))
GATE = Template.of(Gate(torch.zeros(4), hides_odd=True))
DOCUMENTS = Template.of(Documents(*torch.zeros(2, 1, 10).int()))
PREFIX = Template.of(PrefixLM(torch.zeros(2).int()))


def spec_of(
    head_dim: int, mask: str, dtype="bfloat16", head_dim_v: int | None = None
) -> AttentionSpec:
    return AttentionSpec(dtype, head_dim, head_dim_v or head_dim, MASKS[mask])


def spec_for(tiling: Tiling) -> AttentionSpec:
    """A spec for which the planner takes this row of its table.

    Where another row of the same sizes has no buffer for O, a row with one is for
    heads of v that are larger or smaller than those of q.
    """
    shared = any(
        tiling[:2] == other[:2] and tiling.masked in (None, other.masked)
        for other in TILINGS
        if not other.config.own_o
    )
    head_dim = 64 if shared and tiling.config.own_o else tiling.head_dim
    mask = "full" if tiling.masked is False else "causal"
    return spec_of(head_dim, mask, head_dim_v=tiling.head_dim_v)


def is_compiled(row: Tiling) -> bool:
    """Whether a row is compiled: without a mask only if its tile differs from that with one, or at
    heads of 128. Rows for users' functions are those of `MODIFIED`."""

    def size_and_tile(one: Tiling) -> tuple[int, ...]:
        return one.head_dim, one.head_dim_v, one.config.tile_m, one.config.tile_n

    masked = [
        size_and_tile(one) for one in TILINGS if one.masked is not False and not one.functions
    ]
    return not row.functions and (
        row.masked is not False or row[:2] == (128, 128) or size_and_tile(row) not in masked
    )


def cases():
    """Yield (spec, config, schedule type) of everything that is compiled here."""
    seen = set()
    for row in filter(is_compiled, TILINGS):
        spec = spec_for(row)
        is_masked = row.masked is not False
        cluster_m = 1 if is_masked else 2
        config = replace(row.config, cluster_m=cluster_m, fixed_row_max=True)
        if (spec, config) not in seen:
            seen.add((spec, config))
            yield spec, config, TileList if is_masked else StaticPersistent
    # Of heads of 64 and 256 with dropout, which takes more registers: test_dropout_compile. Other
    # schedules: `MODIFIED`, and test_machine_code_of_the_instrumented_kernel.
    for head_dim, mask, schedule_type in (
        (128, "causal", RaggedTiles),
        (256, "window", RecomputeRaggedTiles),
    ):
        spec = spec_of(head_dim, mask)
        fixed = schedule_type is not RecomputeRaggedTiles and takes_fixed_row_max(spec)
        yield spec, replace(general_tiling(spec), fixed_row_max=fixed), schedule_type
    spec = spec_of(256, "rows")
    yield spec, halved_tiling(spec), MultiSequenceTiles
    spec = spec_of(64, "full", dtype="float16")
    yield spec, config_of(spec), SingleTile


def modified(
    head_dim: int, mask: str, scores=(), function=None, sinks=None, head_dim_v=None
) -> AttentionSpec:
    """A spec with scores, a mask of the user's beside the band, and sinks."""
    spec = spec_of(head_dim, mask, head_dim_v=head_dim_v)
    band = spec.mask
    return replace(
        spec, scores=scores, mask=Intersection(band, function) if function else band, sinks=sinks
    )


SIZES = {"64": (64, 64), "128": (128, 128), "192.128": (192, 128), "256": (256, 256)}

MODIFIERS = {
    "softcap": ((CAP,), None, None),
    "softcap-alibi-sinks": ((CAP, BEHIND), None, "bfloat16"),
    "softcap-around-sinks": ((CAP, AROUND_BY_BATCH), None, "float32"),
    "everything": ((CAP, AROUND, RELATIVE), DOCUMENTS, "float32"),
    "everything-prefix": ((CAP, BEHIND_BY_BATCH, GATE), PREFIX, "bfloat16"),
}
"""Scores, a mask of the user's and sinks, by name."""

MODIFIED = (
    ("256", "causal", "softcap-alibi-sinks"),
    ("64", "full", "softcap-around-sinks"),
    ("192.128", "causal", "everything"),
    ("256", "window", "everything-prefix"),
    ("128", "full", "softcap"),
)
"""What is compiled of all combinations of size, band and modifiers."""


def modified_cases():
    """Yield test parameters (spec, config, schedule type) of `MODIFIED`."""
    for size, mask, name in MODIFIED:
        head_dim, head_dim_v = SIZES[size]
        spec = modified(head_dim, mask, *MODIFIERS[name], head_dim_v=head_dim_v)
        schedules = {"full": StaticPersistent, "window": Dynamic}
        case = (spec, config_of(spec), schedules.get(mask, TileList))
        yield pytest.param(case, id=f"d{size}-{mask}-{name}")


def config_of(spec: AttentionSpec) -> ForwardConfig:
    """The planner's config for long sequences."""
    return choose_config(Problem(spec, 1, LONG, LONG, 4, 4, Window()), H200)


def name_of(case) -> str:
    spec, config, schedule_type = case
    (mask,) = (name for name, mask in MASKS.items() if mask == spec.mask)
    tile = f"{config.tile_m}x{config.tile_n}"
    size = f"d{spec.head_dim}" + f"v{spec.head_dim_v}" * (spec.head_dim_v != spec.head_dim)
    parts = [size, tile, mask, spec.dtype, schedule_type.__name__]
    parts += ["cluster"] * (config.cluster_m > 1)
    parts += ["online_max"] * (not config.fixed_row_max)
    return "-".join(parts)


@pytest.mark.compiles
@pytest.mark.parametrize(
    "case", [*(pytest.param(case, id=name_of(case)) for case in cases()), *modified_cases()]
)
def test_machine_code(case):
    spec, config, schedule_type = case
    report = forward_report(Forward(spec, config, schedule_type))
    check_wgmma(report, spec, config)
    check_tma(report, spec, config)
    assert not reads_the_clock(report)
    if has_unmasked_blocks(spec):
        check_overlap(report, spec, config)
    if config.fixed_row_max:
        check_no_maximum(report, spec, config)


@pytest.mark.compiles
def test_machine_code_of_pairs_of_heads():
    spec = spec_of(128, "causal")
    config = replace(config_of(spec), cluster_m=1, cluster_h=2)
    assert config.fixed_row_max
    report = forward_report(Forward(spec, config, TileList))
    check_overlap(report, spec, config)


@pytest.mark.compiles
def test_machine_code_with_out_in_float32():
    """Threads store their rows, without TMA."""
    spec = replace(spec_of(128, "causal"), other_out="float32")
    report = forward_report(Forward(spec, config_of(spec), TileList))
    check_overlap(report, spec, config_of(spec))
    assert report.count("UTMASTG") == 0


@pytest.mark.compiles
def test_machine_code_with_keys_in_a_cache():
    signature = signature_with(spec_of(128, "causal"), cache=CacheLayout(0))
    kernel = signature.launches()[1].kernel
    check_overlap(check_with_cache(kernel), signature.spec, kernel.config)


def check_with_cache(kernel: Forward) -> CubinReport:
    """Check the machine code of a kernel that finds its keys in a cache."""
    report = forward_report(kernel)
    check_wgmma(report, kernel.spec, kernel.config)
    check_tma(report, kernel.spec, kernel.config)
    return report


@pytest.mark.compiles
def test_machine_code_of_functions_with_keys_in_a_cache():
    spec = modified(256, "window", *MODIFIERS["everything"])
    signature = signature_with(spec, has_used_q=True, cache=CacheLayout(16))
    kernel = signature.launches()[1].kernel
    check_with_cache(kernel)


@pytest.mark.parametrize(
    "cache", [CacheLayout(5), CacheLayout(0, batch_indexed=True), CacheLayout(16, left_padded=True)]
)
def test_caches_whose_keys_do_not_come_in_boxes(cache):
    assert not signature_with(spec_of(128, "causal"), cache=cache).finds_keys


def test_the_forward_kernel_takes_boxes_only():
    spec = spec_of(128, "causal")
    with pytest.raises(ValueError, match=r"^cache must have its keys in boxes"):
        Forward(spec, halved_tiling(spec), RaggedTiles, cache=CacheLayout(5))


@pytest.mark.compiles
def test_machine_code_of_the_instrumented_kernel():
    spec = spec_of(64, "causal")
    config = config_of(spec)
    report = forward_report(Forward(spec, config, SplitTiles, is_recorded=True))
    check_wgmma(report, spec, config)
    check_overlap(report, spec, config)
    assert reads_the_clock(report)


def reads_the_clock(report: CubinReport) -> bool:
    """Whether a warp notes the time, as in an instrumented kernel."""
    return any("SR_GLOBALTIMER" in text for text in report.instructions)


def forward_report(kernel: Forward) -> KernelReport:
    """Compile a kernel and return its report: warpgroups exchange registers once."""
    report = report_of(kernel)
    assert report.threads == kernel.config.threads
    assert report.count("USETMAXREG.DEALLOC") == report.count("USETMAXREG.TRY_ALLOC") == 1
    return report


def check_wgmma(report: CubinReport, spec: AttentionSpec, config: ForwardConfig):
    # Q K^T of a tile's first block and P V of its last stand outside of the loops over blocks.
    copies = len(list(report.under_wgmma())) + 1
    assert copies > attend_loops(spec)
    qk = copies * padded(spec.head_dim) // WGMMA_K
    pv = copies * config.tile_n // WGMMA_K
    element = {"bfloat16": ".BF16", "float16": ""}[spec.dtype]
    qk_shape, pv_shape = (
        f"HGMMA.{ROWS}x{n}x{WGMMA_K}.F32{element}" for n in (config.tile_n, padded(spec.head_dim_v))
    )
    if qk_shape == pv_shape:
        assert report.opcodes[qk_shape] == qk + pv
    else:
        assert (report.opcodes[qk_shape], report.opcodes[pv_shape]) == (qk, pv)
    assert report.wgmma == qk + pv
    # Q K^T and P V have a wait each; serialised, every one of their WGMMAs would.
    assert report.wgmma_waits <= 3 * copies


def attend_loops(spec: AttentionSpec) -> int:
    """Loops over key blocks: masked at the end of the keys, unmasked, and with a left bound
    masked at the begin. The compiler may copy a loop's body, and drops loops that the ranges of a
    mask of the user's never enter.
    """
    if isinstance(spec.mask, Intersection | Intervals):
        return 1 + has_unmasked_blocks(spec)
    return 3 if spec.mask.left else 2


def has_unmasked_blocks(spec: AttentionSpec) -> bool:
    """Whether there is a loop without a mask: all blocks are masked if a mask names none."""
    mask = spec.mask
    if isinstance(mask, Intervals):
        return False
    return isinstance(mask, Band) or mask.function.kind.open_range is not Mask.open_range


def boxes(head_dim: int) -> int:
    """TMA boxes side by side that a head of this size takes."""
    columns = padded(head_dim)
    return columns // (WIDEST_BOX if columns % WIDEST_BOX == 0 else WIDEST_BOX // 2)


def check_tma(report: CubinReport, spec: AttentionSpec, config: ForwardConfig):
    q = config.consumers * boxes(spec.head_dim)
    assert report.tma_loads >= q
    if config.cluster == 1:
        assert report.multicast_loads == 0
        assert report.tma_loads > q
    else:
        assert report.tma_loads == q
        assert report.multicast_loads >= boxes(spec.head_dim) + boxes(spec.head_dim_v)
    assert report.tma_stores >= boxes(spec.head_dim_v)


def comparisons(opcodes: Counter[str]) -> int:
    """Integer comparisons: a mask compares columns with a bound."""
    return sum(n for name, n in opcodes.items() if name.startswith("ISETP"))


def check_overlap(report: CubinReport, spec: AttentionSpec, config: ForwardConfig):
    """In the loop without a mask, the softmax of a block runs under P V of the block before."""
    scores = ROWS * config.tile_n // WARPGROUP
    unmasked = min(report.under_wgmma(), key=comparisons)
    assert unmasked["MUFU.EX2"] >= scores


def check_no_maximum(report: CubinReport, spec: AttentionSpec, config: ForwardConfig):
    """Maxima are looked for in a tile's first block, of a few columns unless a row may see others
    alone, and where blocks are masked for rows that have seen no key so far; not in the loop
    without a mask, but for three of each row where P in fp16 makes a row max rise."""
    scores = ROWS * config.tile_n // WARPGROUP
    is_bounded = [score.kind for score in spec.scores] == [Softcap]
    if is_bounded:
        assert report.count("FMNMX") < scores
        return
    assert (scores if spec.mask.left else 2 * (GUESSED - 1)) <= report.count("FMNMX")
    if not isinstance(spec.mask, Intersection):
        unmasked = min(report.under_wgmma(), key=comparisons)
        found = sum(n for name, n in unmasked.items() if name.startswith("FMNMX"))
        assert found == (6 if spec.dtype == "float16" else 0)


@pytest.mark.compiles
def test_spills_are_seen(monkeypatch):
    """Three consumers have 160 registers a thread; S, P and O need 96 + 48 + 32."""
    monkeypatch.setattr(tiling, "OTHER_REGISTERS", -100)
    kernel = compile_kernel(Forward(spec_of(64, "full"), ForwardConfig(192, 192), StaticPersistent))
    report = inspect(kernel.cubin)
    assert report.stack_bytes > 0
    assert report.spill_instructions > 0
    assert ("(C7512)" in kernel.ptxas_log) == HAS_LOG, "ptxas's warnings are not in its log"


@pytest.mark.parametrize("tiling", TILINGS)
def test_every_config_fits_into_shared_memory(tiling: Tiling):
    spec = spec_for(tiling)
    config = tiling.config
    config.validate(spec)
    assert config.smem_bytes(spec) <= CAPACITY


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ForwardConfig(128, 256), "bytes of shared memory"),
        (ForwardConfig(192, 128, q_stages=2, kv_stages=3), "bytes of shared memory"),
        (ForwardConfig(192, 128), "registers"),
        (ForwardConfig(256, 64), "tile_m"),
        (ForwardConfig(128, 72), "tile_n"),
        (ForwardConfig(128, 64, cluster_m=3), "cluster_m"),
    ],
)
def test_validate_rejects(config, message):
    with pytest.raises(ValueError, match=message):
        config.validate(spec_of(128, "causal"))


def test_heads_that_share_keys_by_multicast_must_walk_the_same_blocks():
    """The ranges of a mask of the user's may differ from head to head."""
    config = ForwardConfig(128, 64, cluster_h=2)
    config.validate(modified(64, "causal", (RELATIVE,)))
    with pytest.raises(ValueError, match="cluster_h must be 1 with a mask"):
        config.validate(modified(64, "causal", function=PREFIX))


def test_inspect_rejects_what_is_no_cubin():
    with pytest.raises(ValueError, match="ELF"):
        inspect(b"not a cubin")
