"""The kernels of decode attention, compiled for sm_90a and read back as machine code.

No GPU is needed. Checked are properties that cost speed without changing a result, and those
that a launch needs: registers, shared memory, the dependent launch.
"""

from dataclasses import replace

import pytest
import torch
from cutlass import BFloat16
from machine_code import report_of

from benchmarks.cubin import CubinReport
from docs.examples.documents import Documents
from docs.examples.relative_bias import RelativeBias
from fa3.kernels.append import THREADS, Append, Rotary
from fa3.kernels.combine import GROUPS, IN_FLIGHT, LANES, Combine
from fa3.kernels.decode import Decode
from fa3.kernels.decode_launch import TILE_N, DecodeConfig
from fa3.planning.decode import BYTES_IN_FLIGHT, config_of
from fa3.primitives.cache_blocks import CacheLayout, box_columns
from fa3.primitives.shared_memory import CAPACITY, padded
from fa3.primitives.wgmma import ROWS, WARPGROUP
from fa3.problem import AttentionSpec
from fa3.schedules.stream_k import CtaGroups, FixedSplit, NoSplit, StreamK
from fa3.scores.masks import Band, Intersection
from fa3.scores.scores import Alibi, Softcap
from fa3.scores.templates import Template

WGMMA_K = 16
WARP = 32

MASKS = {"full": Band(), "causal": Band(right=True), "window": Band(left=True, right=True)}
CACHES = {
    "contiguous": CacheLayout(),
    "padded": CacheLayout(0, batch_indexed=True, left_padded=True),
    "page64": CacheLayout(64),
    "page16": CacheLayout(16, batch_indexed=True),
    "page24": CacheLayout(24),
    "page1": CacheLayout(1),
}
HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (96, 96), (40, 40), (192, 128), (64, 256), (72, 200))
SCORES = tuple(map(Template.of, (Softcap(30.0), Alibi(torch.zeros(4), is_causal=True))))


def spec_of(head_dims=(128, 128), mask="full", dtype="bfloat16", **modifiers):
    return AttentionSpec(dtype, *head_dims, MASKS[mask], **modifiers)


RELATIVE = Template.of(RelativeBias(torch.zeros(4, 9), reach=4))
DOCUMENTS = Template.of(Documents(*torch.zeros(2, 1, 4, dtype=torch.int32)))
CAUSAL = spec_of(mask="causal")
MODIFIED = {"scores": SCORES, "sinks": "float32"}


def kernel_of(spec: AttentionSpec, cache: str | CacheLayout, cut=StreamK, **options) -> Decode:
    """The planner's kernel for four query heads of each key/value head."""
    layout = CACHES[cache] if isinstance(cache, str) else cache
    return Decode(spec, config_of(spec, layout, cut), 4, layout, cut, **options)


def kernel_of_functions(spec: AttentionSpec, page_size: int) -> Decode:
    """A kernel with a score or a mask of the user's, for packed queries on pages."""
    return kernel_of(spec, CacheLayout(page_size), is_packed=True, has_used_q=True)


DECODING = {
    "crews": kernel_of(CAUSAL, "contiguous", CtaGroups),
    "crews-page1": kernel_of(spec_of(mask="causal", **MODIFIED), "page1", CtaGroups),
    "contiguous": kernel_of(CAUSAL, "contiguous"),
    "(72, 200)-page24": kernel_of(spec_of((72, 200)), "page24"),
    "NoSplit-padded": kernel_of(CAUSAL, "padded", NoSplit),
    "packed keys, 256": kernel_of(
        spec_of((256, 256), "causal", **MODIFIED),
        CacheLayout(is_packed=True, has_seqlens=True),
        is_packed=True,
        has_used_q=True,
    ),
    "packed queries, window": kernel_of(
        spec_of(mask="window"), "page16", FixedSplit, is_packed=True
    ),
    "mask": kernel_of_functions(
        replace(spec_of(), mask=Intersection(MASKS["causal"], DOCUMENTS)), 1
    ),
    "score, 256": kernel_of_functions(spec_of((256, 256), "causal", scores=(RELATIVE,)), 16),
    # Places in the line take two registers each, and are passed on in two halves.
    "long places": kernel_of(CAUSAL, "page64", CtaGroups, is_long=True),
}


@pytest.mark.compiles
@pytest.mark.parametrize("kernel", DECODING.values(), ids=DECODING)
def test_machine_code_of_decode(kernel):
    report = report_of(kernel, kernel.config.ctas_of_sm)
    # All of a CTA's threads have the registers that they need.
    assert report.count("USETMAXREG") == 0
    producers = WARPGROUP if kernel.cache.box(TILE_N) == 0 else 2 * WARP
    assert report.threads == WARPGROUP + producers
    check_wgmma(report, kernel.spec)
    check_loads(report, kernel.spec, kernel.cache)
    check_dependent_launch(report)


def check_wgmma(report: CubinReport, spec: AttentionSpec):
    """Q K^T and P V stand in the loops, before them and behind; each has a wait."""
    # All blocks of a mask of the user's are masked, in one loop.
    copies = 3 + (spec.mask.left and not spec.mask.templates)
    qk, pv = copies * padded(spec.head_dim) // WGMMA_K, copies * TILE_N // WGMMA_K
    assert report.wgmma == qk + pv
    assert report.wgmma_waits <= 3 * copies
    element = {"bfloat16": ".BF16", "float16": ""}[spec.dtype]
    for n in (TILE_N, padded(spec.head_dim_v)):
        assert report.opcodes[f"HGMMA.{ROWS}x{n}x{WGMMA_K}.F32{element}"] > 0


def check_loads(report: CubinReport, spec: AttentionSpec, cache: CacheLayout):
    columns = padded(spec.head_dim), padded(spec.head_dim_v)
    if cache.box(TILE_N) == 0:
        assert report.tma_loads == 0
        assert report.count("LDGSTS.E.BYPASS.128") + report.count("LDGSTS.E.128") > 0
    else:
        boxes = sum(n // box_columns(n, BFloat16) for n in columns) * TILE_N // cache.box(TILE_N)
        # The first and the last block of a segment stand outside of the loop.
        assert report.tma_loads >= 2 * boxes and report.tma_loads % boxes == 0
        assert report.count("UTMAPF") >= boxes


def check_dependent_launch(report: CubinReport):
    """It waits for the kernel before, and lets the kernel behind be launched."""
    assert report.count("ACQBULK") == 1
    assert report.count("PREEXIT") == 1


@pytest.mark.parametrize("cut", [StreamK, CtaGroups])
@pytest.mark.parametrize("head_dims", HEAD_DIMS)
def test_configs_fit_and_load_far_ahead(head_dims, cut):
    spec = spec_of(head_dims)
    config = config_of(spec, CACHES["contiguous"], cut)
    config.validate(spec)
    assert config.ctas_of_sm * config.smem_bytes(spec) <= CAPACITY
    in_flight = 2 * TILE_N * config.kv_stages * sum(map(padded, head_dims))
    assert config.ctas_of_sm * in_flight >= BYTES_IN_FLIGHT


def test_two_ctas_share_an_sm_where_they_fit_and_no_other_kernel_merges():
    def ctas(cut, head_dims=(128, 128), cache="contiguous"):
        return config_of(spec_of(head_dims), CACHES[cache], cut).ctas_of_sm

    assert ctas(CtaGroups) == ctas(CtaGroups, (64, 64)) == ctas(CtaGroups, cache="page24") == 2
    assert {ctas(cut) for cut in (StreamK, FixedSplit, NoSplit)} == {1}
    assert (
        ctas(CtaGroups, (256, 256))
        == ctas(CtaGroups, (192, 128))
        == ctas(CtaGroups, (64, 256))
        == 1
    )
    assert ctas(CtaGroups, cache="page1") == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [(DecodeConfig(8, 2), "bytes of shared memory"), (DecodeConfig(1, 1), "kv_stages")],
)
def test_validate_rejects(config, message):
    with pytest.raises(ValueError, match=message):
        config.validate(spec_of())


COMBINES = (
    Combine("float16", 256, 1, "float32"),
    Combine("bfloat16", 8, 2, None),
    Combine("bfloat16", 128, 4, None, is_packed=True),
    Combine("float32", 72, None, None),
)


@pytest.mark.compiles
@pytest.mark.parametrize("kernel", COMBINES, ids=str)
def test_machine_code_of_combine(kernel):
    report = report_of(kernel)
    assert report.threads == GROUPS * LANES
    assert report.registers <= REGISTERS_BESIDE_DECODE
    # Every part's 16 bytes of a lane at once.
    assert report.opcodes["LDG.E.128"] == IN_FLIGHT
    check_dependent_launch(report)


REGISTERS_BESIDE_DECODE = 80
"""A CTA of the decode kernel (head_dim 128, 168 registers) leaves room for two of the other."""

PLAIN = Append(
    "bfloat16", 128, 128, paged=False, batch_indexed=False, ragged=False, rotary=None
)  # fmt: skip

KERNELS = {
    "plain": PLAIN,
    "8-256": replace(PLAIN, head_dim=8, head_dim_v=256),
    "pairs-of-some": replace(PLAIN, paged=True, rotary=Rotary(64, True, "float32")),
    "halves-of-some": replace(PLAIN, dtype="float16", rotary=Rotary(16, False, "float32")),
    "packed": replace(
        PLAIN, rotary=Rotary(128, False, "bfloat16"), packed=True, turned=True, writes_lengths=True
    ),
    "lengths": replace(PLAIN, rotary=Rotary(128, False, "bfloat16"), writes_lengths=True),
    "everything": replace(
        PLAIN,
        paged=True,
        batch_indexed=True,
        ragged=True,
        rotary=Rotary(128, False, "float32"),
        writes_lengths=True,
    ),
}


@pytest.mark.compiles
@pytest.mark.parametrize("name", KERNELS)
def test_machine_code(name):
    kernel = KERNELS[name]
    report = report_of(kernel, ctas_of_sm=4)
    count = report.opcodes
    assert report.threads == THREADS
    # Everything of 16 bits moves 16 bytes at a time; k, v and with a rotary embedding q.
    assert count["STG.E.128"] == (2 if kernel.rotary is None else 3)
    assert not [opcode for opcode in count if opcode.startswith(("LDG.E.U16", "STG.E.U16"))]
    # Waits for the kernel before, and lets the one behind be launched.
    assert count["ACQBULK"] >= 1 and count["PREEXIT"] == 1


def test_kernels_differ_in_repr():
    assert len({repr(kernel) for kernel in KERNELS.values()}) == len(KERNELS)
