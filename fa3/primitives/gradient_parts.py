"""Key tiles that CTAs share in the backward kernel, and their sums.

With few key/value heads there are fewer key tiles than SMs. Then several CTAs take the same key
tile, each with a stretch of the query blocks of its query heads (`KeySplit`).
Each has a part of dK and dV, and `GradientParts` adds the parts up in a binary tree:

    parts         0   1   2   3   4          A warp that finishes a node of the tree looks at the
    first level   0 + 1   2 + 3   4          node's sibling. If the sibling's sum is in memory, the
    second level  0 ....+ 2       4          warp adds it and goes up. Otherwise the warp writes its
    third level   0 ............+ 4          own sum to memory and is done.

So no warp waits for another. The last warp at the root writes dK and dV. A sum of two numbers does
not depend on their order, so the bits do not depend on which warp is last.

Each warp adds up its own accumulator rows: the same warps of all CTAs have counters of their own.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from fa3.primitives.arithmetic import Divisor, larger, smaller
from fa3.primitives.dq_accumulator import in_quads, quads_of_lane
from fa3.primitives.fragments import as_rows_and_columns
from fa3.primitives.key_line import KeyLine
from fa3.primitives.query_tiles import PAIR, PackedQueryTiles, QueryTiles
from fa3.primitives.vectors import QUAD, vector_of
from fa3.primitives.wgmma import ROWS, ROWS_OF_WARP, WARP, WARPS

HEAD = 1 << 12
"""Units of a query head's blocks, in which the ends of parts are counted."""

RISE = 1 << 10  # `KeySplit.rise` is counted in parts of a part


class KeyWork(NamedTuple):
    """What a CTA does of a key tile."""

    # n_block, head_kv, batch: the key tile.
    n_block: Int32
    head_kv: Int32
    batch: Int32
    # first_head, num_heads: its query heads; of the first and of the last one perhaps only some
    # blocks.
    first_head: Int32
    num_heads: Int32
    # part, parts: which part of the key tile, and how many it has; 0 and 1 without a split.
    part: Int32 = 0
    parts: Int32 = 1
    # begin, end: its stretch of blocks, in parts of `HEAD` of a head, from the first head on.
    begin: Int32 = 0
    end: Int32 = 0


class KeySplit(NamedTuple):
    """How CTAs share a key tile, whose query heads are in sets.
    Sets are equal. The blocks of a set's heads, one head after another, are divided into equal
    parts, at most `block_parts`. Key tiles that few others follow have fewer parts, as they have
    less work under a causal mask."""

    sets: Divisor  # sets of a key/value head
    block_parts: Int32  # most parts of a set
    rise: Int32  # parts of a set for each key tile from this one to the last one, times `RISE`
    num_heads: Int32  # query heads of a set

    def work(self, n_block, set_number, batch, part_of_set: tuple, qhead_per_kvhead) -> KeyWork:
        """The work of a part of a set: (its index, parts of the set)."""
        (index, count), head_kv = part_of_set, self.sets.quotient(set_number)
        set_of_head, units = set_number - head_kv * self.sets.value, self.num_heads * HEAD
        width = (units + count - 1) // count
        begin, end = (smaller(width * n, units) for n in (index, index + 1))
        first, num_heads = begin // HEAD, (end + HEAD - 1) // HEAD - begin // HEAD
        first_head = head_kv * qhead_per_kvhead + set_of_head * self.num_heads + first
        part, parts = set_of_head * count + index, self.sets.value * count
        ends = begin - first * HEAD, end - first * HEAD
        return KeyWork(n_block, head_kv, batch, first_head, num_heads, part, parts, *ends)


def parts_of_tile(block_parts, rise, after):
    """Parts of a head set for a key tile: see `KeySplit`."""
    return smaller(block_parts, (rise * (after + 1) + RISE - 1) // RISE)


@cute.jit
def parts_of_last(block_parts, rise, count) -> Int32:
    """Parts of a head set for a sequence's last `count` key tiles."""
    parts, after, rising = Int32(0), Int32(0), parts_of_tile(block_parts, rise, 0)
    while after < count and rising < block_parts:
        parts += rising
        after += 1
        rising = parts_of_tile(block_parts, rise, after)
    return parts + (count - after) * block_parts


@cute.jit
def find_part(block_parts, rise, left) -> tuple[Int32, Int32, Int32]:
    """Find the key tile of the part that `left` parts follow.
    Returns how many tiles of the sequence follow that tile, and parts: theirs, and its own."""
    after, before = 0 * left, 0 * left
    parts = parts_of_tile(block_parts, rise, after)
    while parts < block_parts and before + parts <= left:
        before += parts
        after += 1
        parts = parts_of_tile(block_parts, rise, after)
    # All tiles before that one have `block_parts`.
    more = (left - before) // parts
    return after + more, before + more * parts, parts


def blocks_of_head(work: KeyWork, h, blocks, first, count):
    """A part's query blocks of its head `h`, `fa3.scores.masks.Blocks`, perhaps none.
    What parts divide are the `count` blocks from `first` on."""
    ends = (smaller(larger(end - h * HEAD, 0), HEAD) for end in (work.begin, work.end))
    # So that 32 bits hold the products, however many blocks there are.
    many, few = count // HEAD, count % HEAD
    cuts = (first + many * end + few * end // HEAD for end in ends)
    return blocks.walked(*(smaller(larger(cut, blocks.begin), blocks.end) for cut in cuts))


class SharedKeyTiles(NamedTuple):
    """The global tensors of key tiles that CTAs share."""

    split: KeySplit
    line: KeyLine | None  # where parts are of lines; else None
    tiles: QueryTiles | PackedQueryTiles  # numbers the key tiles (n_block, head_kv, batch)
    # Float32; a slot for each part, with a run for each warp, with quads of each thread.
    buffer: cute.Tensor
    # Int32, 0 before the kernel; one for each part and warp. The counter of a node of the tree is
    # the counter of its right child's first part.
    counters: cute.Tensor
    # dk, dv: (batch, rows, heads_kv, head_dim), receive the gradients.
    dk: cute.Tensor
    dv: cute.Tensor


class KeyRows(NamedTuple):
    """Where the keys of a sequence are in dK and dV."""

    # batch, begin, length: its batch entry, its first row there and the number of its rows.
    batch: Int32
    begin: Int32
    length: Int32


@dataclass(frozen=True)
class GradientParts:
    """Sums of dK and dV of shared key tiles, for one warp."""

    tensors: SharedKeyTiles  # the buffers and the gradients
    warp: Int32  # this warp among the MMA warps of a CTA, and `warps` their number
    warps: int
    warpgroups_share_keys: bool  # see `fa3.kernels.backward_launch.BackwardConfig`

    @cute.jit
    def finish(self, accs: tuple, work: KeyWork, tiles, rows: KeyRows):
        """Add this warp's rows of dK and dV; the last warp writes."""
        parts, part, lane = work.parts, work.part, cute.arch.lane_idx()
        number = Int32(tiles.number((work.n_block, work.head_kv, work.batch)))
        first_slot = number * (self.tensors.split.sets.value * self.tensors.split.block_parts)
        # A node is a range of parts: [first, first + span), or less where the parts end.
        first, span, is_last = part, Int32(1), Boolean(True)
        while is_last and span < parts:
            left, right, sibling = family_of(first, span)
            if right < parts:
                slots = (first_slot + number for number in (first, sibling, right))
                is_last = self.join(accs, lane, *slots)
            first = left
            span = span * 2
        if is_last:
            self.write(accs[0], lane, self.tensors.dk, work, rows)
            self.write(accs[1], lane, self.tensors.dv, work, rows)
        # What follows multiplies, for which lanes must be together.
        cute.arch.sync_warp()

    @cute.jit
    def join(self, accs: tuple, lane, slot, sibling, node) -> Boolean:
        """Add the sibling's sum, or leave this warp's; return which.
        The counter of the part `node` tells whether one of the sums is in memory."""
        counter = self.tensors.counters.iterator + (node * self.warps + self.warp)
        count = Int32(0)
        if lane == 0:
            count = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
        count = cute.arch.shuffle_sync(count, 0)
        if count == 0:
            self.move(accs, lane, slot, is_store=True)
            cute.arch.sync_warp()
            if lane == 0:
                count = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
            count = cute.arch.shuffle_sync(count, 0)
        # Lane 0 has acquired; other lanes read what it has seen only after this.
        cute.arch.sync_warp()
        if count != 0:
            self.move(accs, lane, sibling, is_store=False)
        return count != 0

    @cute.jit
    def move(self, accs: tuple, lane, slot, is_store: cutlass.Constexpr):
        """Store the accumulators to a slot, or add the slot to them."""
        quads = [quad for acc in accs for quad in quads_of(acc)]
        run = (Int64(slot) * self.warps + self.warp) * (len(quads) * WARP * QUAD)
        first = self.tensors.buffer.iterator + run
        memory = quads_of_lane(first, lane, len(quads))
        other = cute.make_rmem_tensor(QUAD, Float32)
        for i in cutlass.range_constexpr(len(quads)):
            if cutlass.const_expr(is_store):
                cute.autovec_copy(quads[i], memory[None, i])
            else:
                cute.autovec_copy(memory[None, i], other)
                quads[i].store(quads[i].load() + other.load())

    @cute.jit
    def write(self, acc: cute.Tensor, lane, target: cute.Tensor, work: KeyWork, rows: KeyRows):
        """Write this warp's rows of an accumulator to a gradient."""
        group, fragment = self.warp // WARPS, as_rows_and_columns(acc)
        slab, share = work.n_block * (self.warps // WARPS) + group, 0
        if cutlass.const_expr(self.warpgroups_share_keys):
            slab, share = work.n_block, group
        pairs = cute.size(fragment, mode=[1]) // PAIR
        first = share * pairs * 4 + lane % 4
        for r in cutlass.range_constexpr(2):
            row = slab * ROWS + self.warp % WARPS * ROWS_OF_WARP + lane // 4 + 8 * r
            if row < rows.length:
                gradient_row = target[rows.batch, rows.begin + row, work.head_kv, None]
                for i in cutlass.range_constexpr(pairs):
                    pair = cute.make_rmem_tensor(PAIR, target.element_type)
                    for j in cutlass.range_constexpr(PAIR):
                        pair[j] = fragment[r, PAIR * i + j].to(target.element_type)
                    # Columns of padding have no place in the gradient.
                    if (first + 4 * i) * PAIR < gradient_row.shape[0]:
                        cute.autovec_copy(pair, vector_of(gradient_row, first + 4 * i, PAIR))


def family_of(first, span):
    """Return first parts of a node's parent's children, and its sibling's.
    The node's parts are [first, first + span), where `span` is a power of two."""
    left = first - (first & span)
    return left, left + span, first ^ span


def quads_of(acc: cute.Tensor) -> list[cute.Tensor]:
    """The quads of an accumulator."""
    quads = in_quads(acc)
    return [quads[None, i] for i in range(cute.size(quads, mode=[1]))]
