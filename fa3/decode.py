"""Attention of a few queries to the keys and values of a cache: prepares kernels and runs them.

Two launches on the current stream: `kernels.decode` reads the cache, cut so that all SMs read
equally much; `kernels.combine` merges what it left in parts. What follows from shapes and options
is worked out once and remembered, so that a repeated call costs a look-up, the allocation of the
workspace and the launches. Lengths are read on the device only: a captured graph stays right
while they grow.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fa3.compiler import load_kernel
from fa3.kernels.combine import GROUPS, Combine
from fa3.kernels.decode import Config, Decode
from fa3.lengths import capacity_of
from fa3.masks import Band
from fa3.modifiers import UNMODIFIED, Modifiers, Structure
from fa3.primitives.arithmetic import LARGEST
from fa3.primitives.cache_blocks import CacheLayout
from fa3.primitives.shared_memory import padded
from fa3.primitives.wgmma import ROWS
from fa3.primitives.workspace import UNIT, WorkspaceSize
from fa3.problem import NO_BOUND, REMEMBERED, AttentionSpec, Window
from fa3.schedules.split import StreamK, Units, Whole

TILE_N = 64
"""Keys of a block."""

BYTES_IN_FLIGHT = 128 << 10
"""Bytes of K and V that a CTA loads ahead. Measured on an H200, 2026-11-21, head_dim 128, 16 x 8k,
for 96, 128, 160 and 192 KB: pages of 64 keys 121.4, 122.7, 124.4 and 127.3 us; head_dim 64: 76.8,
64.0, 64.2 and 64.3 us.
"""

MOST_ROWS = 1 << 30
"""Query rows of a key/value head of a sequence."""

MOST_TILES = 1 << 27
"""Tiles of a call: 32 bits must do for all numbers of their records."""


class CacheOperands(NamedTuple):
    """The tensors of one call, on one GPU and already validated.

    Fields:
        q: (batch, seqlen_q, heads_q, head_dim), bfloat16 or float16.
        k_cache: (batch_cache, seqlen_cache, heads_kv, head_dim); with a page table
            (num_pages, page_size, heads_kv, head_dim).
        v_cache: like k_cache with head_dim_v.
        out: (batch, seqlen_q, heads_q, head_dim_v), receives the output.
        lse: (batch, heads_q, seqlen_q) float32, receives the log-sum-exp, or None.
        cache_seqlens: (batch,) int32, keys of each sequence; read on the device only.
        cache_batch_idx: (batch,) int32, the row of the cache that a sequence has; its own if None.
        cache_leftpad: (batch,) int32, keys before this one are not there.
        page_table: (batch, max_pages) int32.
        alibi_slopes: (heads_q,) or (batch, heads_q) float32, or None.
        sinks: (heads_q,) float32 or q's dtype, or None.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    cache_seqlens: torch.Tensor
    cache_batch_idx: torch.Tensor | None = None
    cache_leftpad: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


class Sizes(NamedTuple):
    """Sizes of a call; `capacity` is how many keys a sequence may have."""

    batch: int
    seqlen_q: int
    heads_kv: int
    qhead_per_kvhead: int
    capacity: int

    @property
    def rows(self) -> int:
        """Query rows of a key/value head."""
        return self.seqlen_q * self.qhead_per_kvhead

    @property
    def num_m_blocks(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def num_tiles(self) -> int:
        return self.batch * self.heads_kv * self.num_m_blocks

    def check(self, queries: str) -> None:
        """Raise ValueError if 32 bits do not count the rows, the tiles or the keys of a call.

        Args:
            queries: the argument that has them.
        """
        if self.rows > MOST_ROWS:
            raise ValueError(
                f"{queries} must give a key/value head at most {MOST_ROWS} rows, got {self.rows}"
            )
        if self.num_tiles > MOST_TILES:
            raise ValueError(
                f"{queries} must give at most {MOST_TILES} tiles of {ROWS} rows, got "
                f"{self.num_tiles}: {self.num_m_blocks} for each of {self.heads_kv} key/value "
                f"heads of {self.batch} sequences"
            )
        # A query's last key, counted from the first, with what a window and a block add to it.
        most = (LARGEST - self.capacity) // 2 - ROWS
        if self.seqlen_q > most:
            raise ValueError(
                f"{queries} must have at most {most} queries beside a cache of {self.capacity} "
                f"tokens, got {self.seqlen_q}"
            )


@dataclass(frozen=True, slots=True)
class PreparedDecode:
    """What a call's shapes and options lead to.

    Fields:
        kernel: the compiled decode kernel, and `arguments` what it takes after the scale.
        combine: the compiled combine kernel, and `combine_arguments` what it takes after the
            workspace; None if tiles are never split.
        workspace: numbers of 32 bits.
    """

    kernel: Callable
    arguments: tuple[int, ...]
    combine: Callable | None
    combine_arguments: tuple[int, ...]
    workspace: int


def attend_with_cache(
    operands: CacheOperands,
    softmax_scale: float,
    window: Window,
    softcap: float = 0.0,
    num_splits: int = 0,
    batch_invariant: bool = False,
    sm_margin: int = 0,
) -> None:
    """Attend to a cache on the current stream of the tensors' GPU.

    Args:
        operands: tensors on one GPU, already validated.
        softmax_scale: factor of the scores.
        window: keys that a query sees beside its own position, aligned bottom-right.
        softcap: see `fa3.scores.Softcap`; 0 for none.
        num_splits: 0 cuts keys so that all SMs read equally much; 1 never cuts; n cuts the keys of
            every sequence into n parts.
        batch_invariant: make the bits of a sequence's result independent of the others.
        sm_margin: SMs to leave to other kernels.
    """
    q, k, v, out, lse, seqlens, batch_idx, leftpad, page_table, slopes, sinks = operands
    modifiers = UNMODIFIED
    if softcap or slopes is not None or sinks is not None:
        behind = window.right == 0 or q.shape[1] == 1
        modifiers = Modifiers.of(q, softcap, slopes, sinks, None, None, behind)
    if 0 in out.shape:
        return
    call = prepare(
        q.shape, k.shape, v.shape[-1], q.dtype, q.device,
        None if page_table is None else page_table.shape[1],
        (lse is not None, batch_idx is not None, leftpad is not None),
        modifiers.structure, window, num_splits, batch_invariant, sm_margin,
    )  # fmt: skip
    workspace = None
    if call.combine is not None:
        workspace = torch.empty(call.workspace, dtype=torch.float32, device=q.device)
    call.kernel(
        q, k, v, out, lse, seqlens, batch_idx, leftpad, page_table,
        modifiers.tensors, workspace, softmax_scale, *call.arguments,
    )  # fmt: skip
    if call.combine is not None:
        call.combine(out, lse, sinks, None, None, workspace, *call.combine_arguments)


@functools.lru_cache(maxsize=REMEMBERED)
def prepare(
    q: tuple[int, ...],
    k: tuple[int, ...],
    head_dim_v: int,
    dtype: torch.dtype,
    device: torch.device,
    pages: int | None,
    given: tuple[bool, bool, bool],
    structure: Structure,
    window: Window,
    num_splits: int,
    batch_invariant: bool,
    sm_margin: int,
) -> PreparedDecode:
    """Choose how a call runs, and load its kernels. q and k are shapes."""
    batch, seqlen_q, heads_q, head_dim = q
    _, rows_of_cache, heads_kv, _ = k
    write_lse, batch_indexed, left_padded = given
    capacity = capacity_of(rows_of_cache, 1 if pages is None else pages)
    sizes = Sizes(batch, seqlen_q, heads_kv, heads_q // heads_kv, capacity)
    window = tighten(window, sizes)
    element = str(dtype).removeprefix("torch.")
    spec = AttentionSpec(
        element, head_dim, head_dim_v, sizes.qhead_per_kvhead, Band.of(window), write_lse,
        structure.scores, structure.sinks,
    )  # fmt: skip
    cache = CacheLayout(0 if pages is None else rows_of_cache, batch_indexed, left_padded)
    properties = torch.cuda.get_device_properties(device)
    num_ctas = properties.multi_processor_count - sm_margin
    cut = choose_cut(sizes, window, num_ctas, num_splits, batch_invariant)
    is_long = sizes.num_tiles * most_blocks(sizes, window) > LARGEST
    kernel = load_kernel(Decode(spec, config_of(spec), cache, type(cut), is_long))
    units = (cut.num_splits, cut.unit_blocks, cut.max_parts) if type(cut) is Units else (1, 1, 1)
    arguments = (*window, *units, num_ctas)
    if not cut.has_parts:
        return PreparedDecode(kernel, arguments, None, (), 0)
    size = WorkspaceSize(cut.num_records, cut.num_slots, min(sizes.rows, ROWS))
    check_workspace(size, head_dim_v, capacity, properties.total_memory)
    combine = load_kernel(
        Combine(element, head_dim_v, sizes.qhead_per_kvhead, write_lse, structure.sinks)
    )
    return PreparedDecode(
        kernel, arguments, combine, (*size, sets_of(size, num_ctas)), size.numbers(head_dim_v)
    )


def check_workspace(size: WorkspaceSize, head_dim_v: int, capacity: int, memory: int) -> None:
    """Raise ValueError if a GPU with so many bytes of memory has no room for a call's parts.

    Only `Units` has slots for as many parts as the cache has room for.
    """
    num_bytes = size.numbers(head_dim_v) * torch.float32.itemsize
    if num_bytes > memory or size.num_slots * size.rows > LARGEST - UNIT:
        raise ValueError(
            f"num_splits or batch_invariant takes {num_bytes / 2**30:.1f} GB of workspace, for "
            f"{size.num_slots} parts of sequences of up to {capacity} tokens: give a cache or a "
            "page_table that has room for fewer"
        )


def sets_of(size: WorkspaceSize, num_ctas: int) -> int:
    """CTAs of the combine kernel that share a tile's rows: enough that there is one for each SM."""
    return min(size.rows, max(num_ctas // size.num_records, -(-size.rows // GROUPS)))


def tighten(window: Window, sizes: Sizes) -> Window:
    """The window without bounds that hide nothing at any length."""
    left, right = window
    return Window(
        NO_BOUND if left >= sizes.capacity - 1 else left,
        NO_BOUND if right >= sizes.seqlen_q - 1 else right,
    )


def config_of(spec: AttentionSpec) -> Config:
    """Blocks of 64 keys, as many as are of use."""
    block = 2 * TILE_N * (padded(spec.head_dim) + padded(spec.head_dim_v))
    return Config(TILE_N, max(2, -(-BYTES_IN_FLIGHT // block)), q_stages=2)


def choose_cut(
    sizes: Sizes, window: Window, num_ctas: int, num_splits: int, batch_invariant: bool
) -> StreamK | Units | Whole:
    """What may be cut; see `attend_with_cache`."""
    blocks = most_blocks(sizes, window)
    if num_splits:
        # Follows from a sequence's own length, so it is invariant, too.
        num_splits = min(num_splits, blocks)
        return units_of(sizes, num_splits, 1, num_splits)
    if batch_invariant:
        unit = keys_of_unit(sizes.rows) // TILE_N
        return units_of(sizes, blocks, unit, -(-blocks // unit))
    return StreamK(num_ctas, sizes.num_tiles)


def most_blocks(sizes: Sizes, window: Window) -> int:
    """Key blocks of a tile, at most."""
    keys = sizes.capacity
    if window.left != NO_BOUND:
        # The queries' own blocks, and those before that they see; both ends may share a block.
        keys = min(keys, window.left + sizes.seqlen_q + TILE_N)
    return max(1, -(-keys // TILE_N))


def keys_of_unit(rows: int) -> int:
    """Keys of a unit where bits must not depend on other sequences, by a head's query rows.

    A unit leaves its rows in float32, which costs the more the fewer keys it has: 32 rows on
    16 x 8k keys took 157 us with 512, 127 us with 2048. But short sequences need many units to
    keep the SMs busy: 16 rows on 1 x 8k took 10.7 us with 512, 14.8 us with 1024.
    """
    return 512 if rows <= 16 else 2048


def units_of(sizes: Sizes, num_splits: int, unit_blocks: int, max_parts: int) -> Units | Whole:
    if max_parts == 1:
        return Whole()
    return Units(num_splits, unit_blocks, max_parts, sizes.num_tiles)
