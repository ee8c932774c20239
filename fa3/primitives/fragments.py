"""WGMMA register fragments: views, which move no data, conversion to 16 bits, and the way to shared
memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32
from cutlass.cute.nvgpu import warp


def as_rows_and_columns(acc: cute.Tensor) -> cute.Tensor:
    """View an accumulator ((2, 2, N/8), 1, 1) as (2 rows, N/4 columns) of this thread."""
    (two, rows, chunks), m, n = acc.layout.shape
    (s_two, s_rows, s_chunks), s_m, s_n = acc.layout.stride
    return cute.make_tensor(
        acc.iterator,
        cute.make_layout(
            ((rows, m), (two, chunks, n)), stride=((s_rows, s_m), (s_two, s_chunks, s_n))
        ),
    )


def as_operand_a(acc: cute.Tensor) -> cute.Tensor:
    """View a 16-bit accumulator ((2, 2, N/8), m, n) as the A operand ((2, 2, 2), m, (N/16, n))."""
    layout = cute.logical_divide(acc.layout, ((None, None, 2), None, None))
    (two, rows, (pair, chunks)), m, n = layout.shape
    (s_two, s_rows, (s_pair, s_chunks)), s_m, s_n = layout.stride
    return cute.make_tensor(
        acc.iterator,
        cute.make_layout(
            ((two, rows, pair), m, (chunks, n)),
            stride=((s_two, s_rows, s_pair), s_m, (s_chunks, s_n)),
        ),
    )


PACKED_TYPES = {"BFloat16": "bf16x2", "Float16": "f16x2"}
"""A 16-bit type -> what PTX calls two of it in a word."""

WIDENING = {
    "BFloat16": "{.reg .b32 l, h; shl.b32 l, {$r0}, 16; and.b32 h, {$r0}, 0xffff0000; "
    "mov.b32 {$w0}, l; mov.b32 {$w1}, h;}",
    "Float16": "{.reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.f32.f16 {$w0}, l; "
    "cvt.f32.f16 {$w1}, h;}",
}
"""A 16-bit type -> PTX that makes two fp32 numbers of a word."""


@cute.jit
def convert(source: cute.Tensor, target: cute.Tensor):
    """Convert registers to the target's 16-bit type; both have the same layout.
    Converts eight at a time. Converting a whole fragment whose size is not a power of two takes
    three times the instructions: elements are converted one by one and packed afterwards."""
    source, target = (
        cute.logical_divide(cute.flatten(t), cute.make_layout(8)) for t in (source, target)
    )
    for i in cutlass.range_constexpr(cute.size(source, mode=[1])):
        target[None, i].store(source[None, i].load().to(target.element_type))


def convert_words(source: cute.Tensor, target: cute.Tensor) -> None:
    """Convert fp32 registers to the target's 16-bit type, two at once; layouts are the same."""
    packed = PACKED_TYPES[target.element_type.__name__]
    source, words = cute.flatten(source), words_of(target)
    for i in range(cute.size(words)):
        words[i] = cute.arch.inline_ptx(
            f"cvt.rn.{packed}.f32 {{$w0}}, {{$r1}}, {{$r0}};",
            write_only_types=[Uint32],
            read_only_args=[source[2 * i], source[2 * i + 1]],
        )


def widen_words(source: cute.Tensor, target: cute.Tensor) -> None:
    """Convert registers of a 16-bit type to fp32, two at once; both have the same layout."""
    code = WIDENING[source.element_type.__name__]
    words, target = words_of(source), cute.flatten(target)
    for i in range(cute.size(words)):
        target[2 * i], target[2 * i + 1] = cute.arch.inline_ptx(
            code, write_only_types=[Float32, Float32], read_only_args=[words[i]]
        )


def words_of(fragment: cute.Tensor) -> cute.Tensor:
    """View registers of a 16-bit type as words of two."""
    return cute.recast_tensor(cute.flatten(fragment), Uint32)


@cute.jit
def write_fragment(fragment: cute.Tensor, tiled_mma: cute.TiledMma, thread, target: cute.Tensor):
    """Write a thread's part of a 16-bit accumulator to shared memory, (rows, columns)."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), fragment.element_type)
    copy = cute.make_tiled_copy_C(atom, tiled_mma).get_slice(thread)
    cute.copy(atom, copy.retile(fragment), copy.partition_D(target))
