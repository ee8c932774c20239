"""The backward kernels, compiled for sm_90a and read back as machine code; no GPU is needed.

And where threads have which numbers: views of shared memory and the layout of the dQ accumulator
are computed on the CPU, where jit code runs as well.
"""

import re
from dataclasses import replace

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32, Int32
from cutlass.cute.runtime import from_dlpack
from machine_code import report_of
from reference import visible
from test_compile import AROUND, BEHIND_BY_BATCH, CAP, DOCUMENTS, modified, spec_of

from benchmarks.cubin import CubinReport
from fa3.kernels.backward import Backward
from fa3.kernels.backward_launch import MMA_GROUPS, WIDEST_PIECE, BackwardConfig
from fa3.kernels.backward_queries import BackwardPreprocess
from fa3.kernels.backward_roles import score_coords, visited_blocks
from fa3.planning.backward import (
    BACKWARD_TILINGS,
    BackwardPlan,
    backward_pass,
    choose_backward_config,
)
from fa3.primitives.dq_accumulator import DqPieces
from fa3.primitives.gradient_mmas import GradientMmas
from fa3.primitives.query_tiles import number_of_packed_tiles
from fa3.primitives.shared_memory import CAPACITY, padded
from fa3.primitives.wgmma import ROWS, WARPGROUP
from fa3.problem import Problem, Window
from fa3.schedules import Dynamic, Tile
from fa3.schedules.ragged import RaggedKeyTiles
from fa3.scores.masks import Band, Sequence

WGMMA_K = 16

OPTIONS = "--gpu-arch sm_90a"

SIZES = (192, 64), (192, 192), (256, 16)
"""Sizes (of q and k, of v) that are compiled without scores. Of 16 columns or fewer, a warpgroup
that has the second half has only padding."""

SPECS = (
    *(spec_of(head_dim, "causal", head_dim_v=head_dim_v) for head_dim, head_dim_v in SIZES),
    spec_of(192, "window", head_dim_v=128),
    spec_of(160, "window"),  # with a swizzle of 32 columns
    modified(64, "window", (AROUND,)),
    modified(256, "window", (CAP, BEHIND_BY_BATCH), DOCUMENTS),
)
"""Plain heads of 64: test_machine_code_for_packed_sequences; with dropout, and plain heads of 128:
test_dropout_compile."""


def name_of(spec) -> str:
    scores = "".join(f"-{score.kind.__name__}" for score in spec.scores)
    mask = "-mask" if spec.mask.templates else ""
    bounds = getattr(spec.mask, "band", spec.mask)
    sides = f"-{'L' * bounds.left}{'R' * bounds.right}"
    return f"d{spec.head_dim}v{spec.head_dim_v}-{spec.dtype}{sides}{scores}{mask}"


# --------------------------------------------------------------------------------- machine code


@pytest.mark.compiles
@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_machine_code(spec):
    config = choose_backward_config(spec)
    report = report_of(Backward(spec, config, Dynamic))
    check_roles(report, config)
    assert report.count("USETMAXREG.DEALLOC") == 2
    assert report.count("USETMAXREG.TRY_ALLOC") == 1
    check_wgmma(report, spec, config)
    # A piece of dQ is stored by the CTA that claims a query tile first, and added by all others,
    # which wait for it; then its flag says so.
    assert report.count("UBLKRED") == report.count("UBLKCP.G.S") == 1
    assert report.count("ATOMG.E.OR") == report.count("REDG.E.OR") == 1
    # Flags of a head group: what a warp has preprocessed, which the producer waits for, and key
    # tiles that have added, which the conversion waits for, too, in two places; there it loads a
    # tile's flag as well.
    assert report.count("REDG") == report.count("MEMBAR.ALL.GPU") == 1 + 2
    assert report.count("LDG.E.STRONG.GPU") == 1 + 1 + 2 * 3
    assert report.count("UBLKCP") == 2
    # P stays in registers unless warpgroups share keys; dS does not.
    written = (2 if config.warpgroups_share_keys else 1) * loops(spec) * ROWS * config.queries
    # Parts of a block are one piece of code.
    columns = padded(spec.head_dim) + padded(spec.head_dim_v)
    written += ROWS * columns // config.column_splits
    assert report.count("STSM") == written // (8 * WARPGROUP)


@pytest.mark.compiles
def test_machine_code_where_ctas_share_key_tiles():
    """In a fixed order, too, with two accumulators; in equal parts and in parts of lines."""
    spec = spec_of(128, "causal")
    config = choose_backward_config(spec)
    for schedule, has_lines in ((Dynamic, False), (Dynamic, True), (RaggedKeyTiles, True)):
        options = {"accumulators": 2, "has_lines": has_lines}
        kernel = Backward(spec, config, schedule, is_ordered=True, splits=True, **options)
        report = report_of(kernel)
        check_roles(report, config)
        check_wgmma(report, spec, config, kernel.may_alternate)
        # No TMA store: the last warp of a tree of sums writes dK and dV from its registers.
        assert report.count("UTMASTG") == 0
        # A sum is stored, or read and added, in vectors of 16 bytes; all columns of dK and dV.
        quads = (padded(spec.head_dim) + padded(spec.head_dim_v)) * ROWS // WARPGROUP // 4
        assert report.count("STG.E.128") >= quads // config.column_splits
        assert report.count("LDG.E.128") >= quads // config.column_splits


@pytest.mark.compiles
def test_machine_code_with_gradients_in_fp32():
    """All gradients leave registers in pairs of fp32, without a TMA store."""
    spec = replace(spec_of(256, "causal"), other_out="float32")
    config = choose_backward_config(spec)
    kernel = Backward(spec, config, RaggedKeyTiles, splits=True, writes_fp32=True)
    report = report_of(kernel)
    check_wgmma(report, spec, config)
    assert report.count("UTMASTG") == 0
    pairs = padded(spec.head_dim) * ROWS // WARPGROUP // config.column_splits
    assert report.count("STG.E.64") >= pairs


def check_roles(report: CubinReport, config: BackwardConfig):
    """Warps stay within their registers.

    ptxas does not count registers without a value: a store of four words, of which two had none,
    named registers that a producer warp does not have, and stopped the kernel.
    """
    roles = [i for i, text in enumerate(report.instructions) if "USETMAXREG" in text]
    limits = [int(report.instructions[i].split()[-1], 16) for i in roles]
    assert sorted(limits) == sorted(config.registers_of_roles)
    for begin, end, limit in zip(roles, [*roles[1:], None], limits, strict=True):
        named = max(map(last_register, report.instructions[begin:end]))
        # Two of them are the hardware's.
        assert named < limit - 2


def last_register(text: str) -> int:
    """The last register that a vector of an instruction's first operands takes; 0 without."""
    numbers = [int(number) for number in re.findall(r"\bR(\d+)\b", text)]
    if text.startswith("HGMMA") or not numbers:
        return max(numbers, default=0)
    width = {"64": 2, "128": 4}.get(text.split()[0].rpartition(".")[2], 1)
    is_store = text.startswith(("STS", "STG"))
    return max(*numbers, numbers[-1 if is_store else 0] + width - 1)


def loops(spec, may_alternate: bool = False) -> int:
    """How often a step stands in the code: in loops over query blocks that are masked at the
    diagonal or where keys end, not masked, and masked at the end, with a left bound or where blocks
    may be walked downwards.
    """
    return 2 + (spec.mask.left or may_alternate)


def check_wgmma(report: CubinReport, spec, config: BackwardConfig, may_alternate: bool = False):
    assert report.threads == config.threads
    num_loops = loops(spec, may_alternate)
    head_dim, head_dim_v = padded(spec.head_dim), padded(spec.head_dim_v)
    of_step = (head_dim + head_dim_v + 2 * config.tile_m // config.q_splits) // WGMMA_K
    # dQ stands in the code once, for one piece after another.
    assert report.wgmma == of_step * num_loops + config.tile_n // WGMMA_K
    # Serialised, each would have a wait of its own. Parts are waited for as a whole.
    assert report.wgmma_waits == (4 if config.q_splits == 1 else 3) * num_loops + 1


@pytest.mark.compiles
def test_machine_code_for_packed_sequences():
    spec = spec_of(64, "causal")
    plan = backward_pass(spec, is_packed=True, has_used_q=True, has_used_k=True)
    for kernel in (plan.table, plan.preprocess, plan.main):
        report = report_of(kernel)
        # Each waits for the one before, and lets the next one come.
        assert report.count("ACQBULK") >= 1 and report.count("PREEXIT") == 1
        if isinstance(kernel, Backward):
            check_wgmma(report, spec, kernel.config)
            check_roles(report, kernel.config)


@pytest.mark.compiles
def test_machine_code_with_sums_in_order():
    spec = spec_of(160, "causal")
    config = choose_backward_config(spec)
    kernel = Backward(spec, config, RaggedKeyTiles, is_ordered=True)
    report = report_of(kernel)
    check_wgmma(report, spec, config, kernel.may_alternate)
    check_roles(report, config)
    # The reduce warp loads the next semaphore, waits for it, and another warp raises it; others
    # wait for flags of head groups, and would load a tile's flag in two places. The first key tile
    # stores, the others add.
    assert report.count("LDG.E.STRONG.GPU") == 1 + 6 + 2
    assert report.count("REDG.E.MAX") == 1
    assert (report.count("UBLKRED"), report.count("UBLKCP")) == (1, 2)


@pytest.mark.compiles
def test_machine_code_of_the_kernel_before():
    spec = spec_of(8, "full")
    main = Backward(spec, choose_backward_config(spec), Dynamic)
    report = report_of(BackwardPreprocess(main))
    assert report.count("LDG.E.128") >= 1
    assert report.tma_stores == 0


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_size_has_a_config(head_dim):
    for head_dim_v in range(8, 257, 8):
        spec = spec_of(head_dim, "causal", head_dim_v=head_dim_v)
        config = choose_backward_config(spec)
        assert config.fits(spec)
        assert config.smem_bytes(spec) <= CAPACITY


@pytest.mark.parametrize(
    ("config", "spec"),
    [
        pytest.param(BackwardConfig(128, 128), spec_of(128, "causal"), id="pieces"),
        pytest.param(BackwardConfig(128, 128), modified(64, "causal", (CAP,)), id="registers"),
        pytest.param(
            BackwardConfig(64, 64, warpgroups_share_keys=True), spec_of(256, "full"), id="memory"
        ),
    ],
)
def test_what_does_not_fit(config, spec):
    assert not config.fits(spec)


def test_the_table_has_no_row_in_vain():
    sizes = [(d, dv) for d in range(8, 257, 8) for dv in range(8, 257, 8)]
    specs = [spec_of(d, "full", head_dim_v=dv) for d, dv in sizes]
    specs.append(modified(64, "window", (AROUND,)))
    specs += [spec_of(d, "window", head_dim_v=dv) for d, dv in ((192, 128), (128, 192), (160, 160))]
    chosen = set(map(choose_backward_config, specs))
    assert chosen == {config for _, _, config in BACKWARD_TILINGS}


def test_what_has_no_registers_is_said_so():
    spec = replace(modified(256, "full", (CAP,), DOCUMENTS), has_dropout=True)
    with pytest.raises(NotImplementedError, match="no tiling of the backward kernel"):
        choose_backward_config(spec)


def test_memory_of_a_plan():
    spec = spec_of(96, "full", head_dim_v=64)
    plan = BackwardPlan.of(Problem(spec, 2, 100, 300, 3, 4, Window()))
    assert plan.config.tile_m == 64 and plan.config.tile_n == 128
    assert plan.num_query_tiles == 2 * 12 * 2 and plan.num_key_tiles == 2 * 3 * 3
    layout = plan.layout
    assert layout.dq_at == 2 * 12 * 2 * 64 * 2
    assert layout.table_at - layout.dq_at == 2 * 12 * 2 * 64 * 96


@pytest.mark.parametrize("lengths", [(0,), (1,), (64,), (65, 0, 63, 128), (1,) * 300, (0, 0, 70)])
@pytest.mark.parametrize("spare", [0, 1, 64, 100])
def test_tiles_of_packed_sequences_are_apart(lengths, spare):
    owned = [*lengths[:-1], lengths[-1] + spare]
    begins = [sum(lengths[:i]) for i in range(len(lengths))]
    firsts = [number_of_packed_tiles(begin, batch, 64) for batch, begin in enumerate(begins)]
    ends = [*firsts[1:], number_of_packed_tiles(sum(owned), len(lengths), 64)]
    for first, end, rows in zip(firsts, ends, owned, strict=True):
        # A sequence without rows has a tile too: keys without queries walk one block.
        assert first + max(1, -(-rows // 64)) <= end


# ---------------------------------------------------------------------- where threads find what


@pytest.mark.parametrize("widest", WIDEST_PIECE.values())
@pytest.mark.parametrize("columns", range(32, 257, 32))
def test_pieces_of_dq(columns, widest):
    pieces = DqPieces.of(64, columns, widest)
    assert pieces.columns * pieces.width == columns
    assert pieces.width <= widest and pieces.width % 16 == 0
    assert 1 <= pieces.in_flight <= pieces.count


@cute.jit
def write_masks(
    blocks: cute.Tensor, hidden: cute.Tensor, kernel: cutlass.Constexpr, sizes: tuple[Int32, ...]
):
    """Write the query blocks of every tile of keys, and which scores a mask hides: 1 is left, 2 is
    hidden."""
    seqlen_q, seqlen_k, left, right = sizes
    sequence = Sequence(seqlen_q, seqlen_k, Window(left, right))
    config = kernel.config
    for n_block in cutlass.range(blocks.shape[0]):
        found = visited_blocks(kernel, kernel.spec.mask, n_block, sequence)
        for i in cutlass.range_constexpr(4):
            blocks[n_block, i] = found[i]
    mmas = GradientMmas.of(kernel.dtype, config, kernel.columns, kernel.columns_v)
    _, num_blocks, num_tiles = hidden.shape
    for n_block in cutlass.range(num_tiles):
        for m_block in cutlass.range(num_blocks):
            for group in cutlass.range_constexpr(MMA_GROUPS):
                for thread in cutlass.range(WARPGROUP):
                    tile = Tile(n_block, Int32(0), Int32(0))
                    first = score_coords(config, mmas, thread, group, tile)
                    for part in cutlass.range(config.q_splits):
                        coords = first.shifted(part * config.queries)
                        rows, columns = len(coords.row_steps), len(coords.column_steps)
                        scores = cute.make_rmem_tensor((rows, columns), Float32)
                        scores.fill(0.0)
                        kernel.spec.mask.apply_transposed(scores, coords, m_block, sequence)
                        for r in cutlass.range_constexpr(rows):
                            for c in cutlass.range_constexpr(columns):
                                key = coords.row_at(r) - n_block * config.tile_n
                                query = coords.column + coords.column_steps[c]
                                at = key * config.tile_m + query
                                hidden[at, m_block, n_block] += Int32(1 + (scores[r, c] != 0.0))


WINDOWS = (Window(), Window(right=0), Window(60, 20), Window(left=70), Window(right=150))


def masks_of(kernel: Backward, window: Window, lengths, unused: int = 0):
    """Yield for sequences of these lengths: query blocks of key tiles, which scores a mask leaves
    and which are visible, (queries, keys), and which rows are queries.

    Args:
        unused: tiles after the last key.
    """
    tile_m, tile_n = kernel.config.tile_m, kernel.config.tile_n
    run = None
    for seqlen_q, seqlen_k in lengths:
        num_tiles, num_blocks = -(-seqlen_k // tile_n) + unused, max(1, -(-seqlen_q // tile_m))
        blocks = torch.full((num_tiles, 4), -1, dtype=torch.int32)
        hidden = torch.zeros(tile_n * tile_m, num_blocks, num_tiles, dtype=torch.int32)
        sizes = tuple(map(Int32, (seqlen_q, seqlen_k, *window)))
        tensors = [from_dlpack(x).mark_layout_dynamic(x.ndim - 1) for x in (blocks, hidden)]
        # With the architecture of the kernel: its WGMMAs say which scores a thread has.
        run = run or cute.compile(write_masks, *tensors, kernel, sizes, options=OPTIONS)
        run(*tensors, sizes)
        is_query = torch.arange(num_blocks * tile_m) < seqlen_q
        seen = torch.zeros(num_blocks * tile_m, num_tiles * tile_n, dtype=torch.bool)
        seen[:seqlen_q, :seqlen_k] = visible(seqlen_q, seqlen_k, window)
        left = hidden.view(tile_n, tile_m, num_blocks, num_tiles).permute(2, 1, 3, 0)
        # Each score has one thread.
        assert ((left == 1) | (left == 2)).all()
        yield blocks, (left == 1).reshape(seen.shape), seen, is_query
        check_order(blocks, seen, tile_m, tile_n)


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("head_dim", "window"),
    [(64, WINDOWS[2]), (64, WINDOWS[3]), (192, WINDOWS[0]), (256, WINDOWS[1])],
)
def test_query_blocks_and_masks(head_dim, window):
    """Every visible pair is in a block that is touched; and scores of blocks without a mask, and
    those that a mask leaves, are visible, but for queries that are none."""
    spec = replace(spec_of(head_dim, "full", head_dim_v=min(head_dim, 128)), mask=Band.of(window))
    kernel = Backward(spec, choose_backward_config(spec), Dynamic)
    tile_m, tile_n = kernel.config.tile_m, kernel.config.tile_n
    lengths = ((1, 1), (64, 128), (63, 300), (300, 63), (257, 257), (130, 400))
    for blocks, left, seen, is_query in masks_of(kernel, window, lengths):
        assert torch.equal(left[is_query], seen[is_query])
        for n_block, (begin, full_begin, full_end, end) in enumerate(blocks.tolist()):
            assert 0 <= begin <= full_begin <= full_end <= end <= len(seen) // tile_m
            assert begin < end
            of_tile = seen[:, n_block * tile_n : (n_block + 1) * tile_n]
            assert not of_tile[: begin * tile_m].any() and not of_tile[end * tile_m :].any()
            full = slice(full_begin * tile_m, full_end * tile_m)
            assert of_tile[full][is_query[full]].all()


def check_order(blocks: torch.Tensor, seen: torch.Tensor, tile_m: int, tile_n: int) -> None:
    """Assert that key tiles with something to add to a query block wait for each other in a row.

    A tile waits for the next one if that walks the block too. In between no tile is missing that
    walks it.
    """
    num_blocks = len(seen) // tile_m
    by_tile = seen.view(num_blocks, tile_m, -1, tile_n).any(dim=3).any(dim=1)
    for m_block in range(num_blocks):
        walked = [begin <= m_block < end for begin, _, _, end in blocks.tolist()]
        adding = by_tile[m_block].nonzero().flatten().tolist()
        if adding:
            assert all(walked[adding[0] : adding[-1] + 1])


@pytest.mark.compiles
def test_key_tiles_that_are_not_used():
    """Of packed sequences such tiles walk one block, all of it masked."""
    window, unused = WINDOWS[2], 3
    spec = replace(spec_of(128, "full"), mask=Band.of(window))
    kernel = Backward(spec, choose_backward_config(spec), RaggedKeyTiles)
    lengths = ((300, 0), (0, 100), (300, 129), (64, 128), (1000, 300), (100, 500))
    for blocks, left, seen, is_query in masks_of(kernel, window, lengths, unused):
        assert torch.equal(left[is_query], seen[is_query])
        for begin, full_begin, full_end, end in blocks[-unused:].tolist():
            assert 0 <= begin < end == begin + 1 <= len(seen) // kernel.config.tile_m
            assert full_begin == full_end == end
