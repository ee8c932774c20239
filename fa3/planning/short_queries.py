"""Which sequences of a call are the decode kernel's, and which the forward kernel's.

A tile of the forward kernel has 128 queries of one head, a tile of the decode kernel 64 rows of all
heads that share keys, and the decode kernel cuts the keys so that all SMs read equally many. A
sequence with few queries is therefore the decode kernel's. Lengths are known on the GPU only, so
both kernels are launched, and each leaves out the sequences of the other: the decode kernel those
with more than `short_queries` (`fa3.schedules.sequences.Cached`), the table of the forward kernel's
tiles the rest (`fa3.kernels.tile_table`). They run at the same time: one waits for memory most of
the time, the other for the tensor cores. The table says how many CTAs the decode kernel gets.

Where all tiles that the forward kernel can have leave half of the SMs idle, as for a chunk of
one prompt and few heads, all sequences are the decode kernel's: in a cache always, packed
ones if the call lets long sequences be split. Bounds that the host has say so, no length does.

`ShortPlan` is how the decode kernel runs on packed keys. `fa3.calls.packed_calls` asks it, and runs
what it plans on a GPU or on the CPU.
"""

from dataclasses import dataclass

from fa3.kernels.forward_launch import FEWEST_ROWS
from fa3.planning.decode import TILE_N, DecodePlan, Sizes, choose_cut
from fa3.planning.gpu import Gpu
from fa3.planning.joined import PackedSizes
from fa3.primitives.arithmetic import LARGEST
from fa3.primitives.cache_blocks import CacheLayout
from fa3.primitives.wgmma import ROWS
from fa3.problem import NO_BOUND, AttentionSpec, Window

MOST_SHORT_ROWS = 2 * ROWS
"""Rows of a key/value head up to which a sequence is short: with more the keys are read, and
multiplied, by more than two tiles of one warpgroup each."""

FEWEST_EARLIER_KEYS = 4096
"""Keys beyond one for each query from which on a call with long sequences has two kernels: fewer
take the forward kernel no longer than the launch of another one. Also the keys that a sequence must
have room for where few tiles are the decode kernel's: to split fewer does not pay."""

IDLE_SHARE = 0.5
"""Share of the SMs that have a tile of the forward kernel, up to which the others count as idle.
The decode kernel takes 1.6 times as long for a query and a key, but cuts the keys."""


def leaves_sms_idle(total_q: int, batch: int, heads: int, num_sms: int) -> bool:
    """Whether the forward kernel has few tiles, whatever the lengths of the sequences are."""
    return (total_q // FEWEST_ROWS + batch) * heads <= IDLE_SHARE * num_sms


def most_queries_of_few(heads: int, num_sms: int) -> int:
    """No sequence of a call whose tiles are few has more queries."""
    return max(1, int(IDLE_SHARE * num_sms) // heads * FEWEST_ROWS)


def short_queries(qhead_per_kvhead: int) -> int:
    """The most queries of a short sequence; at least 1.

    Without heads to pack, more than one tile of rows is as much work for either kernel.
    """
    return max(1, min(ROWS, MOST_SHORT_ROWS // qhead_per_kvhead))


@dataclass(frozen=True, slots=True)
class ShortPlan:
    """How the decode kernel attends to packed keys from sequences with few queries.

    Fields:
        spec: of the call.
        heads_kv, qhead_per_kvhead: key/value heads, and query heads of each.
        has_used_q, has_used_k: whether the call has `seqused_q` and `seqused_k`.
        gpu: what the kernel may use of it.
    """

    spec: AttentionSpec
    heads_kv: int
    qhead_per_kvhead: int
    has_used_q: bool
    has_used_k: bool
    gpu: Gpu

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        heads_q: int,
        heads_kv: int,
        has_used_q: bool,
        has_used_k: bool,
        gpu: Gpu,
    ) -> "ShortPlan | None":
        """The plan; None without heads, for functions of the user's, and with dropout."""
        if heads_q == 0 or spec.has_user_functions or spec.has_dropout:
            return None
        return cls(spec, heads_kv, heads_q // heads_kv, has_used_q, has_used_k, gpu)

    def most_queries(self, sizes: PackedSizes) -> int:
        """The most queries of a sequence that is the decode kernel's; 0 if none is to be.

        All sequences are its own if that is `max_seqlen_q`.
        """
        longest = min(short_queries(self.qhead_per_kvhead), sizes.max_seqlen_q)
        earlier_keys = sizes.total_k - sizes.total_q
        has_long = sizes.max_seqlen_q > longest
        if earlier_keys <= 0 or (has_long and earlier_keys < FEWEST_EARLIER_KEYS):
            return 0
        if has_long and not self.has_used_q and sizes.total_q >= sizes.batch * sizes.max_seqlen_q:
            # All sequences are as long as the longest.
            return 0
        return longest if self.are_counted(sizes, longest) else 0

    def most_queries_of_idle(self, sizes: PackedSizes, window: Window) -> int:
        """The most queries of a sequence where the forward kernel would leave SMs idle, so that all
        sequences are to be the decode kernel's, which splits their keys; 0 if it would not, or
        there are too few keys to split."""
        num_sms, longest_k = self.gpu.num_sms, sizes.max_seqlen_k
        if window.left != NO_BOUND:
            # All other keys are hidden from all queries of a sequence.
            longest_k = min(longest_k, window.left + sizes.max_seqlen_q)
        if longest_k < FEWEST_EARLIER_KEYS:
            return 0
        if not leaves_sms_idle(sizes.total_q, sizes.batch, sizes.heads, num_sms):
            return 0
        # Not `max_seqlen_q`, so that calls of all lengths have one plan.
        most = most_queries_of_few(sizes.heads, num_sms)
        return most if self.are_counted(sizes, most) else 0

    def are_counted(self, sizes: PackedSizes, most_queries: int) -> bool:
        """Whether 32 bits count the key blocks of all tiles, whatever the lengths are.

        Args:
            most_queries: of a sequence.
        """
        tiles = sizes.batch * self.heads_kv * -(-most_queries * self.qhead_per_kvhead // ROWS)
        return tiles * -(-sizes.max_seqlen_k // TILE_N) <= LARGEST

    def plan(self, most_queries: int, overlaps_forward: bool, window: Window) -> DecodePlan:
        """The plan of all calls whose short sequences have so many queries or fewer, whatever the
        number of sequences and keys.

        Args:
            overlaps_forward: whether there are others.
        """
        sizes = Sizes(1, most_queries, self.heads_kv, self.qhead_per_kvhead, TILE_N)
        num_ctas = self.gpu.num_sms
        return DecodePlan(
            self.spec, CacheLayout(is_packed=True, has_seqlens=self.has_used_k), sizes, window,
            choose_cut(sizes, window, num_ctas, is_packed=True), num_ctas, True, self.has_used_q,
            overlaps_forward,
        )  # fmt: skip
