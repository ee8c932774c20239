"""How calls on many short packed sequences run: their rows share tiles (`fa3.schedules.joined`).

A tile of `fa3.planning.ragged` has rows of one sequence. If sequences have a few rows each, such a
tile is mostly empty and takes its time all the same. `MultiSequencePlan` is the other way; `suits`
says which one is faster, from what the host knows of lengths. `fa3.calls.packed_calls` launches the
kernels, `fa3.reference.joined` walks the same tiles on the CPU.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from fa3.kernels.forward import Forward
from fa3.kernels.forward_launch import ForwardConfig
from fa3.kernels.joined_table import MultiSequenceTable, MultiSequenceTableArguments
from fa3.planning.gpu import Gpu
from fa3.planning.launch import Launch, template_of
from fa3.planning.ragged import launch_on_packed
from fa3.planning.tilings import general_tiling, halved_tiling
from fa3.problem import AttentionSpec, Window
from fa3.schedules.joined import MultiSequenceTiles
from fa3.schedules.marked import RecomputeRaggedTiles
from fa3.scores.intervals import Intervals
from fa3.scores.scores import Softcap

BLOCKS_OF_TILE = 2
"""Key blocks that take as long as the rest of a tile: its first loads, prologue and epilogue."""

MOST_SHARED_TILE_KEYS = 256
"""Keys of a sequence up to which sequences are joined: all rows of a tile wait for all of them."""

MOST_SHARED_TILE_ROWS = 1 << 28
"""Rows of q up to which sequences are joined: 32 bits count the words of their records."""


class PackedSizes(NamedTuple):
    """What the host knows of the lengths of packed sequences.

    Fields:
        batch: number of sequences.
        heads: query heads.
        total_q, total_k: rows of q and of k.
        max_seqlen_q, max_seqlen_k: no sequence has more queries or keys.
    """

    batch: int
    heads: int
    total_q: int
    total_k: int
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True, slots=True)
class MultiSequencePlan:
    """The kernels of a call on packed sequences that share tiles.

    Fields:
        spec: of the call, whose mask is a band.
        has_used_q, has_used_k: whether the call has `seqused_q` and `seqused_k`.
        gpu: what the forward kernel may use of it.
        config: the tiling, with online softmax: tiles are too short to gain by a fixed row max.
    """

    spec: AttentionSpec
    has_used_q: bool
    has_used_k: bool
    gpu: Gpu
    config: ForwardConfig

    @classmethod
    def of(
        cls, spec: AttentionSpec, has_used_q: bool, has_used_k: bool, gpu: Gpu
    ) -> "MultiSequencePlan | None":
        """The plan; None where scores, a mask or dropout ask for a row's place in its sequence."""
        of_rows = spec.mask.templates or any(score.kind is not Softcap for score in spec.scores)
        if of_rows or spec.has_dropout:
            return None
        return cls(spec, has_used_q, has_used_k, gpu, halved_tiling(line_of(spec)))

    @property
    def line(self) -> AttentionSpec:
        """What the kernel for sequences that share tiles is compiled for."""
        return line_of(self.spec)

    def kernels(self) -> tuple[Forward, Forward]:
        """The forward kernel, then the one for rows that are not finite, sequence by sequence,
        which `RaggedPlan` has too."""
        again = Forward(self.spec, general_tiling(self.spec), RecomputeRaggedTiles)
        return Forward(self.line, self.config, MultiSequenceTiles), again

    def joined_table(self) -> MultiSequenceTable:
        """The kernel that makes the tables."""
        return MultiSequenceTable(
            self.config.tile_m, self.spec.mask, self.has_used_q, self.has_used_k
        )

    def launches(self, window: Window, rows_of_section: int) -> list[Launch]:
        """Return the launches of a call: the tables, the forward kernel, recompute."""
        rows = {"window_left": window.left, "window_right": window.right}
        table = Launch(self.joined_table(), template_of(MultiSequenceTableArguments, **rows))
        kernels = (launch_on_packed(kernel, window, rows_of_section) for kernel in self.kernels())
        return [table, *kernels]

    def num_tiles(self, total_q: int) -> int:
        """Tiles of a head."""
        return -(-total_q // self.config.tile_m)

    def suits(self, sizes: PackedSizes) -> bool:
        """Whether sequences that share tiles are likely to take less time than each by itself."""
        tile_m, tile_n = self.config.tile_m, self.config.tile_n
        batch, heads, total_q, total_k, longest_q, longest_k = sizes
        if (
            longest_q > tile_m // 2
            or longest_k > MOST_SHARED_TILE_KEYS
            or total_q > MOST_SHARED_TILE_ROWS
        ):
            return False
        if batch * heads <= self.gpu.num_sms:
            # Each tile has an SM to itself, and reads the keys of one sequence only.
            return False
        # The sequences at both ends of a tile have rows in another one too.
        keys_of_tile = total_k * tile_m // total_q + longest_k
        joined = self.time_of(self.num_tiles(total_q) * heads, -(-keys_of_tile // tile_n))
        return joined < self.time_of(batch * heads, -(-total_k // (batch * tile_n)))

    def time_of(self, tiles: int, blocks: int) -> int:
        """The time of so many tiles with so many key blocks each, in blocks."""
        return -(-tiles // self.gpu.num_sms) * (BLOCKS_OF_TILE + blocks)


def line_of(spec: AttentionSpec) -> AttentionSpec:
    """The spec of sequences that are one line: what rows see is in a table, whatever the band."""
    return replace(spec, mask=Intervals())
