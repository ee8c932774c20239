"""Views of WGMMA register fragments, which move no data, and conversion to 16 bits."""

import cutlass
import cutlass.cute as cute
from cutlass import Uint32


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


@cute.jit
def convert(source: cute.Tensor, target: cute.Tensor):
    """Convert registers to the target's 16-bit type; both have the same layout.

    Converts eight at a time. Converting a whole fragment whose size is not a power of two takes
    three times the instructions: elements are converted one by one and packed afterwards.
    """
    source, target = (
        cute.logical_divide(cute.flatten(t), cute.make_layout(8)) for t in (source, target)
    )
    for i in cutlass.range_constexpr(cute.size(source, mode=[1])):
        target[None, i].store(source[None, i].load().to(target.element_type))


def convert_positive(source: cute.Tensor, target: cute.Tensor) -> None:
    """Convert fp32 registers to the target's 16-bit type, and negative numbers to 0."""
    packed = PACKED_TYPES[target.element_type.__name__]
    source, words = cute.flatten(source), cute.recast_tensor(cute.flatten(target), Uint32)
    for i in range(cute.size(words)):
        words[i] = cute.arch.inline_ptx(
            f"cvt.rn.relu.{packed}.f32 {{$w0}}, {{$r1}}, {{$r0}};",
            write_only_types=[Uint32],
            read_only_args=[source[2 * i], source[2 * i + 1]],
        )
