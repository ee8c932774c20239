"""One entry that launches the kernels of a backward pass one after another on a stream.

`fa3.calls.backward` calls it; `fa3.planning` chooses the kernels. They always run together and take
mostly the same tensors, which are handed over and checked once here. What they write for each other
is in one buffer, which is cut here.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from fa3.kernels.backward import Backward
from fa3.kernels.backward_launch import (
    BackwardArguments,
    CallSizes,
    PreprocessArguments,
    SplitArguments,
)
from fa3.kernels.backward_preprocess import BackwardPreprocess
from fa3.kernels.tile_table import TileTable, TileTableArguments
from fa3.primitives import arguments
from fa3.primitives.dropout import DropoutArguments
from fa3.problem import AttentionSpec


class PassArguments(NamedTuple):
    """The arguments of a backward pass, in this order; the stream comes last.
    Arguments without a comment belong to a kernel, and have the name that it gives them."""

    q: object
    k: object
    v: object
    out: object
    lse: object
    d_out: object
    d_lse: object
    dq: object
    dk: object
    dv: object
    # float32, for what the kernels write for each other: statistics, the dQ accumulator, the table
    # of packed sequences, counters, flags of the accumulator.
    buffer: object
    modifiers: tuple | None
    softmax_scale: float
    has_d_lse: int
    dq_is_zeroed: int
    window_left: int
    window_right: int
    heads_per_group: int
    num_clusters: int
    # Where the last four begin, multiples of 4; as far as they exist. Without a table `table_at` is
    # `counters_at`.
    dq_at: int
    table_at: int
    counters_at: int
    dq_flags_at: int
    dropout: DropoutArguments | None
    groups_preprocessed: int  # head groups that `BackwardPreprocess` does
    # Of packed sequences; None without.
    capacity: int | None = None
    shift: int | None = None
    cu_seqlens_q: object = None
    cu_seqlens_k: object = None
    seqused_q: object = None
    seqused_k: object = None
    # Of a split, see `SplitArguments`; where its counters, after the others, and its sums begin.
    head_parts: int | None = None
    block_parts: int | None = None
    part_counters_at: int | None = None
    parts_at: int | None = None
    alternates: int | None = None

    @classmethod
    def symbolic(cls, entry: "BackwardPass") -> "PassArguments":
        """Types of a pass's arguments without sizes; equal sizes share a symbol."""
        sizes = CallSizes.symbolic(entry.table is not None)
        named = (
            PreprocessArguments.symbolic(
                entry.spec, sizes, entry.main.has_dq_flags, *entry.kind
            )._asdict()
            | BackwardArguments.symbolic(entry.main, sizes)._asdict()
            | ({} if entry.table is None else TileTableArguments.symbolic(entry.table)._asdict())
            | {"buffer": arguments.float32_buffer(), "groups_preprocessed": Int32(0)}
            | dict.fromkeys(("dq_at", "table_at", "counters_at", "dq_flags_at"), Int64(0))
        )
        if entry.main.splits:
            named |= dict.fromkeys(("head_parts", "block_parts"), Int32(0))
            named |= dict.fromkeys(("part_counters_at", "parts_at"), Int64(0))
        return cls(**{name: named[name] for name in cls._fields if name in named})


@dataclass(frozen=True)
class BackwardPass:
    """The entry, compiled for kernels of one spec and config."""

    preprocess: BackwardPreprocess
    main: Backward
    table: TileTable | None = None  # makes the table of packed sequences; None without

    entry_name: ClassVar[str] = "fa3_backward_pass"

    @property
    def spec(self) -> AttentionSpec:
        return self.main.spec

    @property
    def kind(self) -> tuple[bool, bool]:
        """Whether sequences are packed, and whether these have `seqused_q`."""
        return self.preprocess.is_ragged, self.preprocess.has_used_q

    @property
    def is_storable(self) -> bool:
        return self.main.is_storable

    def arguments(self) -> list:
        """Symbolic arguments of a call, and the stream."""
        return [*PassArguments.symbolic(self), arguments.symbolic_stream()]

    @cute.jit
    def __call__(self, *call):
        """Launch on `PassArguments` and a stream."""
        *call, stream = call
        call = PassArguments(*call)
        buffer = call.buffer.iterator
        named = call._asdict() | {
            "statistics": numbers_from(buffer, call.dq_at),
            "dq_accumulator": numbers_from(buffer + call.dq_at, call.table_at - call.dq_at),
            "dq_flags": None,
            "kept": None,
            "table": None,
            "num_sequences": None,
            "split": None,
        }
        if cutlass.const_expr(self.main.has_dq_flags):
            count = call.buffer.shape[0] - call.dq_flags_at
            named["dq_flags"] = integers_from(buffer + call.dq_flags_at, count)
        if cutlass.const_expr(self.spec.has_dropout):
            named["kept"] = DropoutArguments(*call.dropout).kept
        counters, state = (
            integers_from(buffer + begin, Int32(end - begin))
            for begin, end in (
                (call.counters_at, call.dq_flags_at),
                (call.table_at, call.counters_at),
            )
        )
        named |= {"counters": counters, "schedule_state": counters}
        if cutlass.const_expr(self.table is not None):
            named |= {
                "table": state,
                "schedule_state": state,
                "num_sequences": call.cu_seqlens_q.shape[0] - 1,
                "total_q": call.q.shape[0],
                "total_k": call.k.shape[0],
                "short_queries": Int32(0),
                "qhead_per_kvhead": Int32(1),
                "num_ctas": Int32(1),
            }
            self.table(*chosen(TileTableArguments, named), stream)
        if cutlass.const_expr(self.main.splits):
            count = Int32(call.dq_flags_at - call.part_counters_at)
            named["split"] = SplitArguments(
                call.head_parts,
                call.block_parts,
                numbers_from(buffer + call.parts_at, call.buffer.shape[0] - call.parts_at),
                integers_from(buffer + call.part_counters_at, count),
            )
        sizes = call.heads_per_group, named["num_sequences"], named["split"]
        groups = self.main.query_head_groups(call.q, call.k, *sizes)
        named["num_tiles"] = groups.tiles_before(call.groups_preprocessed)
        named["preprocess"] = PreprocessArguments(*chosen(PreprocessArguments, named))
        self.preprocess(*chosen(PreprocessArguments, named), stream)
        self.main(*chosen(BackwardArguments, named), stream)


def numbers_from(first: cute.Pointer, count) -> cute.Tensor:
    """A tensor of `count` numbers from the first on."""
    return cute.make_tensor(first, cute.make_layout((count,)))


def integers_from(first: cute.Pointer, count) -> cute.Tensor:
    """The same, as int32."""
    return numbers_from(cute.recast_ptr(first, dtype=Int32), count)


def chosen(kind: type, named: dict) -> tuple:
    """The arguments of a launch of this kind."""
    return kind(**{name: named[name] for name in kind._fields})
