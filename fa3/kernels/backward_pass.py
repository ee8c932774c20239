"""One entry that launches the kernels of a backward pass in turn.

`fa3.calls.backward` calls it; `fa3.planning` chooses the kernels. They always run together and take
mostly the same tensors, which are handed over and checked once here. What they write for each other
is in one buffer, which is cut here.
"""

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa3.kernels.backward import Backward
from fa3.kernels.backward_launch import PassArguments
from fa3.kernels.backward_preprocess import BackwardPreprocess
from fa3.kernels.kernel_base import KernelBase
from fa3.kernels.tile_table import TileTable, TileTableArguments
from fa3.primitives import arguments
from fa3.problem import AttentionSpec


@dataclass(frozen=True)
class BackwardPass(KernelBase):
    """The entry, compiled for kernels of one spec and config."""

    main: Backward
    table: TileTable | None = None  # makes the table of packed sequences; None without

    entry_name: ClassVar[str] = "fa3_backward_pass"
    arguments_type: ClassVar[type] = PassArguments

    @property
    def preprocess(self) -> BackwardPreprocess:
        return BackwardPreprocess(self.main)

    @property
    def spec(self) -> AttentionSpec:
        return self.main.spec

    @property
    def is_storable(self) -> bool:
        return self.main.is_storable

    def arguments(self) -> list:
        """Symbolic arguments of a call, and the stream."""
        return [*PassArguments.symbolic(self.main, self.table), arguments.symbolic_stream()]

    @cute.jit
    def __call__(self, *call):
        """Launch on `PassArguments` and a stream."""
        *call, stream = call
        call = PassArguments(*call)
        if cutlass.const_expr(self.table is not None):
            named = {"total_q": call.q.shape[0], "total_k": call.k.shape[0]}
            named |= {"short_queries": Int32(0), "qhead_per_kvhead": Int32(1), "num_ctas": Int32(1)}
            named["table"] = call.integers(call.table_at, call.counters_at)
            ratio = call.q.shape[-2] // call.k.shape[-2]
            named["line_heads"] = ratio // call.head_parts if self.table.has_lines else None
            self.table(*arguments.operands_of(TileTableArguments, call, **named), stream)
        self.preprocess(*call, stream)
        self.main(*call, stream)
