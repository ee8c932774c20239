"""Transpose: writes V of FP8 calls as V^T, in the key order.

A CTA loads blocks of keys of one head of a sequence into registers, and writes them with the keys
of a column side by side. No group of 16 keys has keys of two sequences.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute

from fa3.kernels.kernel_base import KernelBase
from fa3.kernels.quantize import QUANTIZE_THREADS, VECTORS_AT_ONCE, UnitVectors, rows_of_unit
from fa3.primitives import arguments
from fa3.primitives.ragged_lengths import RaggedLengths, first_group
from fa3.primitives.vectors import VECTOR
from fa3.problem import FP8, KEYS_OF_GROUP

BLOCK = QUANTIZE_THREADS * VECTORS_AT_ONCE * VECTOR  # elements that a CTA holds at once


class TransposeArguments(NamedTuple):
    """The arguments of a launch, in this order; the stream comes last."""

    v: object  # (batch, seqlen, heads, head_dim_v), or (total, heads, head_dim_v) if packed
    # (batch, heads, head_dim_v, groups of 16 keys, 16), written. Packed sequences are in a batch of
    # one, each from its `first_group`.
    transposed_v: object
    # cu_seqlens_k, seqused_k: (batch + 1,) and (batch,) int32 of packed sequences, or None.
    cu_seqlens_k: object
    seqused_k: object

    @classmethod
    def symbolic(cls, kernel: "Transpose") -> "TransposeArguments":
        """Types of a kernel's arguments without sizes; equal sizes share a symbol."""
        batch, heads, columns = cute.sym_int(), cute.sym_int(), kernel.head_dim_v
        rows = (cute.sym_int(),) if kernel.is_packed else (batch, cute.sym_int())
        return cls(
            arguments.tma_tensor(FP8, (*rows, heads, columns)),
            arguments.tma_tensor(FP8, (batch, heads, columns, cute.sym_int(), KEYS_OF_GROUP)),
            arguments.int32_vector(exists=kernel.is_packed),
            arguments.int32_vector(exists=kernel.has_used),
        )


@dataclass(frozen=True)
class Transpose(KernelBase):
    """The transpose kernel."""

    head_dim_v: int
    is_packed: bool = False
    has_used: bool = False  # whether `seqused_k` says how many keys of a sequence count

    entry_name: ClassVar[str] = "fa3_transpose"
    arguments_type: ClassVar[type] = TransposeArguments

    @cute.jit
    def launch(self, call: TransposeArguments, stream):
        sequences, heads, columns, groups, keys = call.transposed_v.shape
        if cutlass.const_expr(self.is_packed):
            sequences = call.cu_seqlens_k.shape[0] - 1
            groups = cute.ceil_div(groups, sequences)  # in the mean
        ctas = cute.ceil_div(groups, BLOCK // (columns * keys))
        self.kernel(call, ctas).launch(
            grid=(ctas * sequences * heads, 1, 1),
            block=(QUANTIZE_THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=8,
            preferred_smem_carveout=10,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, call: TransposeArguments, ctas):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        block, _, _ = cute.arch.block_idx()
        unit, heads = block // ctas, call.transposed_v.shape[1]
        batch, head = unit // heads, unit % heads
        rows = rows_of_unit(call.v, call.cu_seqlens_k, call.seqused_k, batch, head)
        written = call.transposed_v[0 if self.is_packed else batch, head, None, None, None]
        if cutlass.const_expr(self.is_packed):
            begin = RaggedLengths(call.cu_seqlens_k, None, call.v.shape[0]).begin(batch)
            written = cute.domain_offset((0, first_group(begin, batch), 0), written)
        vectors = UnitVectors.of(rows, None, False, is_transposed=True)
        blocks = cute.ceil_div(rows.shape[0][1], vectors.height)
        raw = cute.make_rmem_tensor((VECTOR, VECTORS_AT_ONCE), rows.element_type)
        for i in cutlass.range(block % ctas, blocks, ctas, unroll=1):
            vectors.load(rows, i, blocks, raw)
            vectors.write_transposed(rows, i, raw, written)
