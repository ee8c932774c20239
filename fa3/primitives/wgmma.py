"""Warpgroup matrix multiplications (WGMMA): sizes, layouts in shared memory, issue."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

WARP = 32  # threads of a warp
WARPGROUP = 128  # threads of a warpgroup
WARPS = WARPGROUP // WARP  # warps of a warpgroup
ROWS = 64  # rows of one WGMMA

REGISTERS = {2: (24, 240), 3: (32, 160)}
"""Warpgroups that multiply -> registers of a thread after setmaxnreg: producer, others."""

REGISTERS_OF_PAGES = REGISTERS | {2: (40, 232)}  # with pages
REGISTERS_OF_CONVERTERS = {2: (56, 224)}  # with pages in FP8; the sum over warps is the same
ROWS_OF_WARP = ROWS // WARPS  # accumulator rows of a WGMMA that one warp holds

SWIZZLES = {
    64: warpgroup.SmemLayoutAtomKind.K_SW128,
    32: warpgroup.SmemLayoutAtomKind.K_SW64,
    16: warpgroup.SmemLayoutAtomKind.K_SW32,
}
"""Columns of a swizzled unit -> its kind. No operand may begin or end in the middle of a unit."""


def smem_layout(dtype, rows: int, columns: int, count: int, width: int) -> cute.ComposedLayout:
    """(rows, columns, count), swizzled in the largest units that divide `width` columns."""
    kind = next(kind for unit, kind in SWIZZLES.items() if width % unit == 0)
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (rows, columns, count), order=(0, 1, 2))


@cute.jit
def issue(op: cutlass.Constexpr, acc, a, b, accumulate, ends: cutlass.Constexpr = True):
    """Start acc = a b^T (+ acc), which `ends` a commit group.
    The caller waits for it. Makes its own MMA atom: a field set on an atom from outside a dynamic
    loop would escape it."""
    mma = cute.make_tiled_mma(op)
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, True if k > 0 else accumulate)
        cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)
    if cutlass.const_expr(ends):
        warpgroup.commit_group()
