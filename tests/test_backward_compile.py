"""The backward kernels, compiled for sm_90a and read back as machine code; no GPU is needed.

And where their threads find what: views of shared memory and the order of the sums of dQ are
computed on the CPU, where jit code runs as well.
"""

import re

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32
from cutlass.cute.runtime import from_dlpack
from test_compile import AROUND, BEHIND_BY_BATCH, CAP, DOCUMENTS, modified, spec_of

from fa3.kernels.backward import Backward
from fa3.kernels.backward_begin import BackwardBegin
from fa3.kernels.backward_end import BackwardEnd
from fa3.kernels.backward_launch import BackwardConfig
from fa3.planning.backward import BACKWARD_TILINGS, BackwardPlan, choose_backward_config
from fa3.primitives.gradient_mmas import columns_of, columns_of_keys, rows_of
from fa3.primitives.query_tiles import QueryGradients, QueryPieces, QueryTiles, RowStatistics
from fa3.primitives.shared_memory import CAPACITY, padded
from fa3.primitives.wgmma import ROWS, WARPGROUP
from fa3.problem import Problem, Window
from fa3.running.compiler import compile_kernel
from fa3.schedules import SingleTile
from fa3.tools.cubin import CubinReport, inspect

WGMMA_K = 16

SIZES = ((32, 32), (64, 64), (72, 72), (128, 128), (192, 64), (192, 128), (192, 192), (256, 256))
"""Sizes (of q and k, of v) that are compiled; they take every row of the table, and every width of
a swizzled unit."""

SPECS = (
    *(spec_of(head_dim, "causal", head_dim_v=head_dim_v) for head_dim, head_dim_v in SIZES),
    *(spec_of(head_dim, "full") for head_dim in (64, 128, 256)),
    spec_of(96, "window"),
    spec_of(128, "causal", dtype="float16"),
    modified(64, "causal", (CAP, BEHIND_BY_BATCH)),
    modified(128, "full", (CAP, AROUND)),
    modified(128, "causal", function=DOCUMENTS),
    modified(256, "window", (CAP, BEHIND_BY_BATCH), DOCUMENTS),
)


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
    kernel = compile_kernel(Backward(spec, config, SingleTile))
    report = inspect(kernel.cubin)
    check_resources(report, kernel.ptxas_log, config.threads)
    assert report.count("USETMAXREG.DEALLOC") == 1
    assert report.count("USETMAXREG.TRY_ALLOC") == 1
    check_wgmma(report, spec, config)
    pieces = config.pieces(padded(spec.head_dim))
    assert report.count("REDG.E.ADD.F32x4") == pieces.quads * loops(spec)
    assert report.count("UBLKCP") == 1
    # P stays in registers unless warpgroups share keys; dS does not.
    written = (2 if config.shares_keys else 1) * loops(spec) * ROWS * config.queries
    columns = padded(spec.head_dim) + padded(spec.head_dim_v)
    written += ROWS * columns // config.shares
    assert report.count("STSM") == written // (8 * WARPGROUP)


def loops(spec) -> int:
    """Loops over query blocks: masked at the diagonal or where keys end, unmasked, and with a left
    bound masked at the end."""
    return 2 + spec.mask.left


def check_resources(report: CubinReport, ptxas_log: str, threads: int):
    assert report.threads == threads
    assert report.registers * report.threads <= 65536
    assert report.stack_bytes == 0
    assert report.spill_instructions == 0
    assert re.search(r"\bUsed \d+ registers", ptxas_log), "no remarks of ptxas to look at"
    assert not re.findall(r"C75\d\d", ptxas_log), ptxas_log


def check_wgmma(report: CubinReport, spec, config: BackwardConfig):
    head_dim, head_dim_v = padded(spec.head_dim), padded(spec.head_dim_v)
    of_step = (head_dim + head_dim_v + 2 * config.tile_m + config.tile_n) // WGMMA_K
    assert report.wgmma == of_step * loops(spec)
    # Serialised, each would have a wait of its own.
    assert report.wgmma_waits == 4 * loops(spec)


@pytest.mark.compiles
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 256])
def test_machine_code_of_the_other_kernels(head_dim):
    spec = spec_of(head_dim, "full")
    config = choose_backward_config(spec)
    kernels = (
        *(BackwardBegin(spec, config, has_d_lse) for has_d_lse in (False, True)),
        BackwardEnd(spec, config),
    )
    for kernel in kernels:
        compiled = compile_kernel(kernel)
        report = inspect(compiled.cubin)
        check_resources(report, compiled.ptxas_log, report.threads)
        assert report.count("LDG.E.128") >= 1
        assert report.tma_stores == 0 or isinstance(kernel, BackwardEnd)


@pytest.mark.parametrize("head_dim_v", range(8, 257, 8))
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_size_has_a_config(head_dim, head_dim_v):
    spec = spec_of(head_dim, "causal", head_dim_v=head_dim_v)
    config = choose_backward_config(spec)
    config.validate(spec)
    assert config.smem_bytes(spec) <= CAPACITY


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BackwardConfig(64, 256), "tile_n must be 128"),
        (BackwardConfig(64, 128, shares_keys=True), "tile_n must be 64"),
        (BackwardConfig(96, 128), "tile_m must be 128, or 64"),
        (BackwardConfig(64, 128, groups=4), "groups must be 2 or 3"),
        (BackwardConfig(64, 128, q_stages=0), "q_stages must be 1 or more"),
        (BackwardConfig(128, 128, q_stages=1, do_stages=1), "registers"),
        (BackwardConfig(64, 128, q_stages=6), "bytes of shared memory"),
    ],
)
def test_validate_rejects(config, message):
    with pytest.raises(ValueError, match=message):
        config.validate(spec_of(128, "causal"))


def test_the_table_has_no_row_in_vain():
    sizes = [(d, dv) for d in range(8, 257, 8) for dv in range(8, 257, 8)]
    chosen = {choose_backward_config(spec_of(d, "full", head_dim_v=dv)) for d, dv in sizes}
    assert chosen == {tiling.config for tiling in BACKWARD_TILINGS}


def test_memory_of_a_plan():
    spec = spec_of(96, "full", head_dim_v=64)
    plan = BackwardPlan.of(Problem(spec, 2, 100, 300, 3, 4, Window()), has_d_lse=False)
    assert plan.config.tile_m == 64 and plan.config.tile_n == 128
    assert plan.num_query_tiles == 2 * 12 * 2 and plan.num_key_tiles == 2 * 3 * 3
    assert plan.numbers_of_sums == 2 * 12 * 2 * 64 * 96
    assert plan.numbers_of_statistics == 2 * 12 * 2 * 64 * 2


# ---------------------------------------------------------------------- where threads find what


@cute.jit
def write_views(
    memory: cute.Tensor,
    of_rows: cute.Tensor,
    of_columns: cute.Tensor,
    of_keys: cute.Tensor,
    shape: cutlass.Constexpr,
    size: cutlass.Constexpr,
    stages: cutlass.Constexpr,
):
    """Read a buffer (rows, columns, count), blocked as TMA writes it, through each of its views."""
    rows, columns, count = shape
    blocks = cute.make_layout(
        (rows, (16, columns // 16), count), stride=(16, (1, 16 * rows), rows * columns)
    )
    buffer = cute.make_tensor(memory.iterator, blocks)
    for view, target in (
        (rows_of(buffer, size), of_rows),
        (columns_of(buffer, size), of_columns),
        (columns_of_keys(buffer, size, stages), of_keys),
    ):
        for i in cutlass.range(cute.size(target)):
            target[i] = view[i]


@pytest.mark.compiles
def test_views_of_shared_memory():
    rows, columns, count, size, stages = 64, 96, 6, 32, 2
    memory = torch.empty(rows * columns * count, dtype=torch.int32)
    element = torch.arange(memory.numel(), dtype=torch.int32).view(count, rows, columns)
    # Blocks of 16 columns stand behind one another.
    blocks = element.view(count, rows, columns // 16, 16).transpose(1, 2)
    memory.copy_(blocks.reshape(-1))
    found = [torch.empty_like(memory) for _ in range(3)]
    write_views(*map(from_dlpack, (memory, *found)), (rows, columns, count), size, stages)
    # The first mode of a view is the fastest.
    by_rows = element.view(count, rows // size, size, columns).transpose(2, 3)
    assert torch.equal(found[0].view(by_rows.shape), by_rows)
    by_columns = element.view(count, rows, columns // size, size)
    assert torch.equal(found[1].view(by_columns.shape), by_columns)
    slabs = count // stages
    by_keys = element.view(stages, slabs * rows, columns // size, size)
    assert torch.equal(found[2].view(by_keys.shape), by_keys)


@cute.jit
def write_owners(
    sums: cute.Tensor,
    statistics: cute.Tensor,
    num_m_blocks: Int32,
    num_heads: Int32,
    batch: Int32,
    tile_m: cutlass.Constexpr,
    pieces: cutlass.Constexpr,
):
    """Number what the threads find in the sums, thread by thread; count what is kept of rows."""
    tiles = QueryTiles(num_m_blocks, num_heads)
    number = Int32(0)
    for b in cutlass.range(batch):
        for h in cutlass.range(num_heads):
            for m in cutlass.range(num_m_blocks):
                tile = m, h, b
                for piece in cutlass.range(pieces.count):
                    for thread in cutlass.range(WARPGROUP):
                        quads = QueryGradients(sums, tiles).quads_of(pieces, thread, piece, tile)
                        for i in cutlass.range(cute.size(quads)):
                            quads[i] += number
                            number += 1
                rows = RowStatistics(statistics, tiles).of_tile(tile_m, tile)
                for i in cutlass.range(cute.size(rows)):
                    rows[i] += 1


@pytest.mark.compiles
@pytest.mark.parametrize(("tile_m", "columns"), [(64, 96), (128, 64)])
def test_every_number_of_a_query_tile_has_one_place(tile_m, columns):
    pieces = QueryPieces.of(tile_m, columns, groups=2)
    assert pieces.numbers == tile_m * columns
    num_m_blocks, heads, batch = 3, 2, 2
    count = num_m_blocks * heads * batch
    sums = torch.zeros(count * pieces.numbers, dtype=torch.int32)
    statistics = torch.zeros(count * tile_m * 2, dtype=torch.int32)
    sizes = map(Int32, (num_m_blocks, heads, batch))
    write_owners(*map(from_dlpack, (sums, statistics)), *sizes, tile_m, pieces)
    assert (statistics == 1).all()
    assert torch.equal(sums.sort().values, torch.arange(len(sums), dtype=torch.int32))
    # A warp adds to 512 bytes in a row, 16 of each lane.
    quads = columns // 2 // (1 if tile_m == 128 else 2) // 4
    first = sums[: 32 * 4].view(32, 4)
    expected = torch.arange(32)[:, None] * 4 * quads + torch.arange(4)
    assert torch.equal(first, expected.int())
