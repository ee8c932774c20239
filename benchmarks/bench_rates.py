"""How fast tensor cores and other instructions are beside each other:
`python -m benchmarks.bench_rates`.

A CTA on each SM runs one loop in each warpgroup. The clock counts what an iteration takes. Operands
are zero, so the power cap does not matter. The rates bound what a softmax under WGMMAs can reach.
"""

import os
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.utils import hopper_helpers as sm90
from rich.console import Console
from rich.table import Table

from fa3.primitives.shared_memory import LayoutEnum, SmemAllocator
from fa3.primitives.wgmma import ROWS, WARPGROUP

BYTES_OF_ROW = 128  # of the operands, so K is 128 in FP8 and 64 in 16 bits
CHAINS = 4  # products over all of K that a warpgroup starts before it waits
VALUES = 32  # registers on which the other loops work
ITERATIONS = 300
RESULTS = 8  # words of the output: one that keeps results alive, then a time for each warpgroup

LOOPS = {
    "WGMMA": "m64n128, A from shared memory",
    "WGMMA RS": "m64n128, A from registers",
    "exp2": f"{VALUES} MUFU.EX2",
    "FFMA": f"{4 * VALUES} FFMA",
    "max": f"{4 * VALUES} FMNMX",
    "softmax": f"{VALUES} MUFU.EX2 and {2 * VALUES} FFMA",
    "e4m3": f"{4 * VALUES} F2FP, each to two fp16 numbers from e4m3",
    "nothing": "",
}
"""What a warpgroup does in an iteration."""

PAIRS = [
    *((name, "nothing") for name in LOOPS if name != "nothing"),
    *((name, name) for name in ("WGMMA", "WGMMA RS", "exp2", "FFMA", "max", "softmax", "e4m3")),
    *(("WGMMA", name) for name in ("exp2", "FFMA", "max", "softmax", "e4m3")),
    ("WGMMA RS", "softmax"),
]


def clock() -> Int32:
    """The SM's clock. `cute.arch.inline_ptx` would take its % for an operand."""
    word, code = ir.IntegerType.get_signless(32), "mov.u32 $0, %clock;"
    return Int32(llvm.inline_asm(word, [], code, "=r", has_side_effects=True))


def widened(value: Float32) -> Float32:
    """Two numbers in fp16 of two in e4m3, the lower half of a word."""
    code = "{.reg .b16 l, h; mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 $0, l;}"
    kind = ir.F32Type.get()
    operand = [Float32(value).ir_value()]
    return Float32(llvm.inline_asm(kind, operand, code, "=f,f", has_side_effects=False))


class Rates(NamedTuple):
    """The kernel in which each warpgroup runs one of `LOOPS`."""

    dtype: type
    loops: tuple[str, str]
    columns: int = 128

    @cute.jit
    def __call__(self, results: cute.Tensor, stream):
        threads = WARPGROUP * len(self.loops)
        self.kernel(results).launch(
            grid=(132, 1, 1), block=(threads, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, results: cute.Tensor):
        shape = ROWS, self.columns, BYTES_OF_ROW * 8 // self.dtype.width
        groups = len(self.loops)
        layout_a = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, shape, self.dtype, groups)
        layout_b = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, self.dtype, 1)

        @cute.struct
        class Storage:
            a: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_a)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_b)], 1024]

        storage = SmemAllocator().allocate(Storage)
        a = storage.a.get_tensor(layout_a.outer, swizzle=layout_a.inner)
        b = storage.b.get_tensor(layout_b.outer, swizzle=layout_b.inner)
        thread, _, _ = cute.arch.thread_idx()
        words = (ROWS * groups + self.columns) * BYTES_OF_ROW // 4
        start = cute.recast_ptr(storage.a.data_ptr(), dtype=Int32)
        memory = cute.make_tensor(start, cute.make_layout(words))
        for i in cutlass.range(thread, words, WARPGROUP * groups, unroll=1):
            memory[i] = 0
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        for g in cutlass.range_constexpr(groups):
            if group == g:
                if cutlass.const_expr(self.loops[g].startswith("WGMMA")):
                    self.multiply(g, a, b, results, thread)
                elif cutlass.const_expr(self.loops[g] != "nothing"):
                    self.compute(g, results, thread)

    @cute.jit
    def multiply(self, g: cutlass.Constexpr, a, b, results: cute.Tensor, thread):
        """Run WGMMAs."""
        in_registers = self.loops[g] == "WGMMA RS"
        source = warpgroup.OperandSource.RMEM if in_registers else warpgroup.OperandSource.SMEM
        major = OperandMajorMode.K
        tiled = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, major, major, Float32, (1, 1, 1), (ROWS, self.columns), source
        )
        slices = tiled.get_slice(0)
        operand_b = tiled.make_fragment_B(slices.partition_B(b))[None, None, None, 0]
        acc = cute.make_rmem_tensor(tiled.partition_shape_C((ROWS, self.columns)), Float32)
        acc.fill(0.0)
        if cutlass.const_expr(in_registers):
            shape = tiled.partition_shape_A((ROWS, BYTES_OF_ROW * 8 // self.dtype.width))
            operand_a = cute.make_rmem_tensor(shape, self.dtype)
            cute.recast_tensor(operand_a, Int32).fill(0)
        else:
            operand_a = tiled.make_fragment_A(slices.partition_A(a))[None, None, None, g]
        began = clock()
        for _ in cutlass.range(ITERATIONS, unroll=1):
            mma = cute.make_tiled_mma(tiled.op)
            warpgroup.fence()
            for _chain in cutlass.range_constexpr(CHAINS):
                for k in cutlass.range_constexpr(cute.size(operand_b, mode=[2])):
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                    step = None, None, k
                    cute.gemm(mma, acc, operand_a[step], operand_b[step], acc)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
        self.note(g, clock() - began, acc, results, thread)

    @cute.jit
    def compute(self, g: cutlass.Constexpr, results: cute.Tensor, thread):
        """Run instructions on registers."""
        values = cute.make_rmem_tensor(VALUES, Float32)
        for i in cutlass.range_constexpr(VALUES):
            values[i] = Float32(thread) * 0.001 + i
        factor, loop = Float32(thread) * 1e-6, self.loops[g]
        began = clock()
        for _ in cutlass.range(ITERATIONS, unroll=1):
            if cutlass.const_expr(loop == "exp2"):
                for i in cutlass.range_constexpr(VALUES):
                    values[i] = cute.math.exp2(values[i], fastmath=True)
            elif cutlass.const_expr(loop == "softmax"):
                for i in cutlass.range_constexpr(VALUES):
                    values[i] = cute.math.exp2(values[i] * factor - factor, fastmath=True)
                for i in cutlass.range_constexpr(VALUES):
                    values[i] = values[i] * factor + values[(i + 5) % VALUES]
            else:
                for _repeat in cutlass.range_constexpr(4):
                    for i in cutlass.range_constexpr(VALUES):
                        if cutlass.const_expr(loop == "e4m3"):
                            values[i] = widened(values[i])
                        elif cutlass.const_expr(loop == "FFMA"):
                            values[i] = values[i] * factor + factor
                        else:
                            values[i] = cute.arch.fmax(values[i], values[(i + 7) % VALUES])
        self.note(g, clock() - began, values, results, thread)

    @cute.jit
    def note(self, g: cutlass.Constexpr, clocks, values: cute.Tensor, results, thread):
        """Write the time of a warpgroup; read all values, so that none is left out."""
        total = Float32(0.0)
        for i in cutlass.range_constexpr(cute.size(values)):
            total = total + values[i]
        if total == 123.0:
            results[0] = 1
        block, _, _ = cute.arch.block_idx()
        if block == 0 and thread % WARPGROUP == 0:
            results[1 + g] = clocks


def compiled(rates: Rates):
    """The kernel's callable."""
    results = make_fake_compact_tensor(Int32, (RESULTS,))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = "--enable-tvm-ffi --gpu-arch sm_90a"
    return cute.compile(rates, results, stream, options=options)


def clocks_of(rates: Rates) -> list[float]:
    """Clocks that an iteration takes in each warpgroup; for WGMMAs, that one WGMMA takes."""
    run, results = compiled(rates), torch.zeros(RESULTS, dtype=torch.int32, device="cuda")
    for _ in range(2):
        run(results)
    wgmmas = CHAINS * BYTES_OF_ROW // 32
    counts = [wgmmas if loop.startswith("WGMMA") else 1 for loop in rates.loops]
    return [t / ITERATIONS / n for t, n in zip(results.tolist()[1:], counts, strict=False)]


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("needs a Hopper GPU: torch sees no CUDA device")
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    table = Table("type", "first warpgroup", "clocks", "second warpgroup", "clocks")
    for dtype in (Float8E4M3FN, BFloat16):
        for loops in PAIRS:
            if dtype is BFloat16 and "WGMMA" not in loops[0]:
                continue
            first, second = clocks_of(Rates(dtype, loops))
            cells = loops[0], f"{first:.0f}", loops[1], f"{second:.0f}" if second else ""
            table.add_row(dtype.__name__, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
