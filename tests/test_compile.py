"""Every kernel that the planner can choose, compiled for sm_90a and read back as machine code.

No GPU is needed. The properties here are those that cost speed without changing a result:
registers that spill, WGMMAs that the compiler serialised, a softmax that does not run under P V.
"""

import re
from collections import Counter
from dataclasses import replace

import pytest

from fa3.compiler import compile_kernel
from fa3.cubin import CubinReport, inspect
from fa3.kernels import forward
from fa3.kernels.forward import ROWS, SMEM_CAPACITY, WARPGROUP, Config
from fa3.masks import Band
from fa3.planner import TILINGS, Tiling
from fa3.problem import AttentionSpec
from fa3.schedules import SingleTile, StaticPersistent, TileList

WGMMA_K = 16
"""Depth of one WGMMA with 16-bit operands."""

TMA_COLUMNS = 64
"""Columns of one TMA box: 128 bytes, the swizzle's width."""

MASKS = {
    "full": Band(),
    "causal": Band(right=True),
    "left": Band(left=True),
    "window": Band(left=True, right=True),
}


def spec_of(head_dim: int, mask: str, dtype="bfloat16", heads=4, lse=True) -> AttentionSpec:
    return AttentionSpec(dtype, head_dim, head_dim, heads, MASKS[mask], lse)


def cases():
    """Yield (spec, config, schedule type) of everything that is compiled here."""
    seen = set()
    for tiling in TILINGS:
        spec = spec_of(tiling.head_dim, "causal" if tiling.masked else "full")
        schedule_type = TileList if tiling.masked else StaticPersistent
        for cluster_m in (1, 2):
            config = replace(tiling.config, cluster_m=cluster_m)
            if (spec, config) not in seen:
                seen.add((spec, config))
                yield spec, config, schedule_type
    for tiling in TILINGS[-2:]:
        spec = spec_of(tiling.head_dim, "causal")
        yield spec, tiling.config, StaticPersistent
        yield spec, tiling.config, SingleTile
    for head_dim in (64, 128, 256):
        spec = spec_of(head_dim, "window", heads=1)
        yield spec, config_of(spec), TileList
    for spec in (
        spec_of(128, "left"),
        spec_of(128, "causal", lse=False),
        spec_of(64, "full", dtype="float16"),
        spec_of(128, "causal", dtype="float16"),
    ):
        yield spec, config_of(spec), TileList


def config_of(spec: AttentionSpec) -> Config:
    """The table's config for the longest sequences."""
    masked = spec.mask.left or spec.mask.right
    return [t for t in TILINGS if (t.head_dim, t.masked) == (spec.head_dim, masked)][-1].config


def name_of(case) -> str:
    spec, config, schedule_type = case
    (mask,) = (name for name, mask in MASKS.items() if mask == spec.mask)
    tile = f"{config.tile_m}x{config.tile_n}"
    parts = [f"d{spec.head_dim}", tile, mask, spec.dtype, schedule_type.__name__]
    parts += ["cluster"] * (config.cluster_m > 1) + ["nolse"] * (not spec.write_lse)
    return "-".join(parts)


@pytest.mark.parametrize("case", list(cases()), ids=name_of)
def test_machine_code(case):
    spec, config, schedule_type = case
    kernel = compile_kernel(spec, config, schedule_type)
    report = inspect(kernel.cubin)
    check_resources(report, kernel.ptxas_log, config)
    check_wgmma(report, spec, config)
    check_tma(report, spec, config)
    check_overlap(report, spec, config)


def check_resources(report: CubinReport, ptxas_log: str, config: Config):
    assert report.threads == config.threads
    assert report.registers * report.threads <= 65536
    assert report.stack_bytes == 0
    assert report.spill_instructions == 0
    assert re.search(r"\bUsed \d+ registers", ptxas_log), "no remarks of ptxas to look at"
    assert not re.findall(r"C75\d\d", ptxas_log), ptxas_log
    assert report.count("USETMAXREG.DEALLOC") == 1
    assert report.count("USETMAXREG.TRY_ALLOC") == 1


def check_wgmma(report: CubinReport, spec: AttentionSpec, config: Config):
    # Q K^T of a tile's first block and P V of its last stand outside of the loops over blocks.
    copies = len(list(report.under_wgmma())) + 1
    assert copies > attend_loops(spec)
    qk = copies * spec.head_dim // WGMMA_K
    pv = copies * config.tile_n // WGMMA_K
    element = {"bfloat16": ".BF16", "float16": ""}[spec.dtype]
    qk_shape, pv_shape = (
        f"HGMMA.{ROWS}x{n}x{WGMMA_K}.F32{element}" for n in (config.tile_n, spec.head_dim_v)
    )
    if qk_shape == pv_shape:
        assert report.opcodes[qk_shape] == qk + pv
    else:
        assert (report.opcodes[qk_shape], report.opcodes[pv_shape]) == (qk, pv)
    assert report.wgmma == qk + pv
    # Serialised WGMMAs would have a wait each.
    assert report.wgmma_waits <= report.wgmma // 4


def attend_loops(spec: AttentionSpec) -> int:
    """Loops over key blocks: masked at the end of the keys, unmasked, and with a left bound
    masked at the begin. The compiler may copy a loop's body.
    """
    return 3 if spec.mask.left else 2


def check_tma(report: CubinReport, spec: AttentionSpec, config: Config):
    q = config.consumers * spec.head_dim // TMA_COLUMNS
    assert report.tma_loads >= q
    if config.cluster_m == 1:
        assert report.multicast_loads == 0
        assert report.tma_loads > q
    else:
        assert report.tma_loads == q
        assert report.multicast_loads >= 2 * spec.head_dim // TMA_COLUMNS
    assert report.tma_stores >= spec.head_dim_v // TMA_COLUMNS


def comparisons(opcodes: Counter[str]) -> int:
    """Integer comparisons: a mask compares columns with a bound."""
    return sum(n for name, n in opcodes.items() if name.startswith("ISETP"))


def check_overlap(report: CubinReport, spec: AttentionSpec, config: Config):
    """In the loop without a mask, the softmax of a block runs under P V of the block before."""
    scores = ROWS * config.tile_n // WARPGROUP
    unmasked = min(report.under_wgmma(), key=comparisons)
    assert unmasked["MUFU.EX2"] >= scores


def test_spills_are_seen(monkeypatch):
    monkeypatch.setattr(forward, "OTHER_REGISTERS", -100)
    """Three consumers have 160 registers a thread; S, P and O need 96 + 48 + 32."""
    kernel = compile_kernel(spec_of(64, "full"), Config(192, 192), StaticPersistent)
    report = inspect(kernel.cubin)
    assert report.stack_bytes > 0
    assert report.spill_instructions > 0


@pytest.mark.parametrize("tiling", TILINGS)
def test_every_config_fits_into_shared_memory(tiling: Tiling):
    spec = spec_of(tiling.head_dim, "causal" if tiling.masked else "full")
    config = tiling.config
    config.validate(spec)
    assert config.smem_bytes(spec) <= SMEM_CAPACITY


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(128, 256), "bytes of shared memory"),
        (Config(192, 128, q_stages=2, kv_stages=3), "bytes of shared memory"),
        (Config(192, 128), "registers"),
        (Config(256, 64), "tile_m"),
        (Config(128, 72), "tile_n"),
        (Config(128, 64, cluster_m=3), "cluster_m"),
    ],
)
def test_validate_rejects(config, message):
    with pytest.raises(ValueError, match=message):
        config.validate(spec_of(128, "causal"))


def test_inspect_rejects_what_is_no_cubin():
    with pytest.raises(ValueError, match="ELF"):
        inspect(b"not a cubin")
