"""The walker: attention and gradients in torch on CPUs, segment by segment.

`steps` turns the segments of a plan into steps: rows that attend to key blocks. Tiles, their order
and key blocks are as on a GPU. What differs from `fa3.kernels` is what happens at once: there, the
CTAs of a GPU work at the same time, a tile's rows are spread over warpgroups that skip blocks which
none of their rows sees, and P V of one block overlaps Q K^T of the next. Here the row max is always
online, so no tile is recomputed. A packed sequence runs through the plan that it would get as a
batch of one, where on a GPU short ones may share tiles.

    for step in steps(plan):  # watch the walk
        print(step)
    execute(plan, {"q": q, "k": k, "v": v, "o": out, "lse": lse, "softmax_scale": 0.1})

`Walker.run` computes the steps as a kernel does, with online softmax in base 2 and fp32 sums, and
merges the parts of tiles in the order of their keys. `fa3.reference.backward` lets query blocks
pass key tiles. Both passes compute a block's scores in `Walker.logits`, and both round P to the
input dtype.

Scores and masks are called by their torch halves. A user's method may raise anything, or return
what no kernel would get; the error names the argument of the call, the class and the method. On a
GPU `fa3.scores.diagnostics` does the same.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from fa3.complaints import shown
from fa3.planning.decode import TILE_N, DecodePlan
from fa3.planning.planner import Plan, plan_forward
from fa3.planning.routes import Signature
from fa3.primitives import softmax
from fa3.primitives.cache_blocks import CacheTables, Keys
from fa3.primitives.fragments import Position
from fa3.primitives.ragged_lengths import RaggedLengths
from fa3.primitives.tma import RANK
from fa3.primitives.wgmma import ROWS
from fa3.problem import AttentionSpec, Problem, Window
from fa3.reference.quantize import in_rows
from fa3.schedules import walk
from fa3.schedules.order import Segment
from fa3.schedules.sequences import Cached, capacity_of
from fa3.schedules.stream_k import segments
from fa3.scores.masks import Blocks, Intersection, Mask, Sequence
from fa3.scores.scores import Score, bind
from fa3.settings import SETTINGS


@contextmanager
def naming_argument(argument: str, function: object, method: str) -> Iterator[None]:
    """Name argument and method in a ValueError if the method fails inside.
    NotImplementedError is passed on: the class does not define the method."""
    try:
        yield
    except NotImplementedError:
        raise
    except Exception as error:
        raise ValueError(
            f"{argument} does not work: {type(function).__name__}.{method} raised "
            f"{type(error).__name__}: {error}"
        ) from error


def apply_score(score: Score, logits: torch.Tensor, at: Position) -> torch.Tensor:
    """Return the logits after a score; raise ValueError for other results."""
    with naming_argument("score", score, "reference"):
        result = score.reference(logits, at)
    return as_matrix("score", score, result, logits.shape, "floats")


def apply_mask(mask: Mask, at: Position, shape: tuple[int, ...]) -> torch.Tensor:
    """Return which (queries, keys), so many each, a mask lets through.
    Raises ValueError if the mask's method does not return that."""
    with naming_argument("mask", mask, "reference"):
        result = mask.reference(at)
    if isinstance(result, bool):
        result = torch.tensor(result, device=at.query.device)
    return as_matrix("mask", mask, result, shape, "bools")


def as_matrix(
    argument: str, function: object, result: object, shape: tuple[int, ...], elements: str
) -> torch.Tensor:
    """A method's result as a matrix; raise ValueError if it is none."""
    if isinstance(result, torch.Tensor):
        types = {"floats": result.is_floating_point(), "bools": result.dtype == torch.bool}
        # Sizes from the right that are 1 or the same.
        sizes = zip(reversed(result.shape), reversed(shape), strict=False)
        fits = result.ndim <= len(shape) and all(one in (1, size) for one, size in sizes)
        if types[elements] and fits:
            return result.expand(shape)
        got = f"a tensor of {result.dtype} with shape {tuple(result.shape)}"
    else:
        got = shown(result)
    raise ValueError(
        f"{argument} must have a {type(function).__name__}.reference that returns a tensor of "
        f"{elements} which broadcasts to (queries, keys), here {tuple(shape)}, got {got}"
    )


NO_BLOCKS = Blocks(0, 0, 0, 0)

CPU = torch.device("cpu")  # where new tensors are, whatever default the caller has set


class HostTensor:
    """A tensor of Python numbers, as a mask's ranges read it."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def __getitem__(self, index) -> int | float:
        return self.tensor[index].item()


class BlockRows(NamedTuple):
    """Query rows that are computed together."""

    place: tuple  # their index in q and out: batch entry, rows, heads
    at: Position  # their positions: `head` a number or (rows, 1), `query` (rows, 1), no key
    # first_key, end_key: the keys that the band shows each row, (rows, 1).
    first_key: torch.Tensor
    end_key: torch.Tensor


class SequenceRows(NamedTuple):
    """Where the rows of a sequence are."""

    batch: int  # its number, by which scores, mask and dropout know it
    # q, k: its rows in a batch entry of q, and of k; in a cache, its keys.
    q: range
    k: range
    entry_q: int = 0  # the batch entry of q
    entry_k: int = 0  # the batch entry of k and v, or the row of the page table
    first_key: int = 0  # no key before it may be read

    @classmethod
    def dense(cls, batch: int, seqlen_q: int, seqlen_k: int) -> list["SequenceRows"]:
        """The sequences of a dense call."""
        return [cls(i, range(seqlen_q), range(seqlen_k), i, i) for i in range(batch)]

    def sequence(self, window: Window) -> Sequence:
        """The sequence for a mask."""
        return Sequence(len(self.q), len(self.k), window)

    def keys(self, head: int) -> Keys:
        """Where the keys of a key/value head are."""
        return Keys(self.entry_k, head, self.k.start, self.first_key, len(self.k) - 1)


class PackedLengths(NamedTuple):
    """Which rows belong to which sequence."""

    # cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, where sequences begin and end. Without
    # cu_seqlens_k, sequences have their keys in a cache.
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor | None
    # seqused_q, seqused_k: (batch,) int32, rows of each sequence that count; all if None.
    seqused_q: torch.Tensor | None
    seqused_k: torch.Tensor | None

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.cu_seqlens_q.shape[0] - 1

    def sequences(self) -> list[SequenceRows]:
        """Where each sequence's rows are that count, on the CPU."""
        used_q, used_k = (None if x is None else x.tolist() for x in self[2:])
        queries = used_rows(self.cu_seqlens_q.tolist(), used_q)
        if self.cu_seqlens_k is None:
            caches = enumerate(zip(queries, map(range, used_k or ()), strict=True))
            return [SequenceRows(i, *rows, entry_k=i) for i, rows in caches]
        keys = used_rows(self.cu_seqlens_k.tolist(), used_k)
        return list(map(SequenceRows, itertools.count(), queries, keys))


def used_rows(ends: list[int], used: list[int] | None) -> list[range]:
    """Return each sequence's rows that count; all if `used` is None."""
    rows = list(itertools.starmap(range, itertools.pairwise(ends)))
    if used is None:
        return rows
    return [one[: max(0, count)] for one, count in zip(rows, used, strict=True)]


class Step(NamedTuple):
    """What a CTA does of a tile at once."""

    segment: Segment  # what the CTA's cluster works on
    place: SequenceRows  # where the rows of the tile's sequence are
    rows: range  # the CTA's rows; none where its part of the tile is past the end
    head: int  # the query head. If several heads take turns in the rows, the key/value head.
    blocks: Blocks  # the key blocks, for all rows of the cluster
    tile_n: int  # keys of a block
    # cluster, rank: the CTA's cluster, and its rank there.
    cluster: int = 0
    rank: int = 0
    heads: int = 1  # query heads that take turns in the rows; all of a key/value head, or one


class Walker:
    """The tensors of a call, and what is computed with them."""

    def __init__(
        self,
        spec: AttentionSpec,
        window: Window,  # of the mask, keys that a query sees before and after its own position
        values: Mapping[str, Any],
    ):
        """Bind scores, mask and sinks to their tensors.

        Args:
            values: of a call, by name: q (batch, rows, heads, head_dim), bfloat16 or float16; k and
                v (batch, rows, heads_kv, columns), with pages (pages, page_size, ...); o (batch,
                rows, heads, head_dim_v) and lse (batch, heads, rows), float32 or None, which are
                written. Packed ones have no batch, and get one here. softmax_scale, the factor of
                q k^T before the softmax. Where there are any: modifiers, the tensors of the spec's
                scores, mask and sinks; dropout; page_table, (sequences, pages) int32; descales,
                what keys, values and, if they are FP8, queries are multiplied by, each
                (sequences, heads_kv).
        """
        if values["v"].dim() > RANK:  # V^T
            values = {**values, "v": in_rows(values["v"], values["k"].shape[1])}
        tensors, self.descales = values.get("modifiers"), values.get("descales")
        operands = map(values.get, ("q", "k", "v", "o", "lse"))
        self.q, self.k, self.v, self.out, self.lse = batched(operands)
        self.spec, self.window, self.tensors = spec, window, tensors or ()
        self.scores, self.mask, self.sinks = bind(spec, tensors)
        self.function = getattr(self.mask, "function", None)
        self.softmax_scale = values["softmax_scale"]
        self.dropout, self.page_table = values.get("dropout"), values.get("page_table")
        # Blocks of an FP8 cache are multiplied in fp16.
        is_fp8_cache = self.descales is not None and not spec.is_fp8
        self.rounded_to = torch.float16 if is_fp8_cache else self.q.dtype
        self.slack = softmax.FP8_SLACK if spec.is_fp8 else softmax.SLACK
        self.is_linear = spec.is_fp8 and SETTINGS["FA3_FP8_EXP"] == "linear"

    # As in the kernels, sums are in fp32, whatever the caller computes in.
    @torch.autocast("cpu", enabled=False)
    def run(self, steps: Iterable[Step]) -> None:
        """Write the output and the log-sum-exp of the rows of all steps."""
        parts: dict[tuple, dict[int, tuple[torch.Tensor, torch.Tensor]]] = defaultdict(dict)
        for step in steps:
            rows, part = self.rows(*step[1:4], step.heads), step.segment.part
            tile = parts[step.segment.tile, step.rank]
            tile[part.slot] = self.attend(step, rows)
            if len(tile) < part.num_parts:
                continue
            results, (batch, row, head) = [tile[slot] for slot in sorted(tile)], rows.place
            if self.sinks is not None:
                # As if a part had nothing but the sink.
                out, lse = results[0]
                sinks = self.sinks[head].float().flatten().expand_as(lse)
                results.append((torch.zeros_like(out), sinks))
            out, lse = results[0] if len(results) == 1 else merge_outputs(results)
            self.out[batch, row, head] = out.to(self.out.dtype)
            if self.lse is not None:
                self.lse[batch, head, row] = lse
            del parts[step.segment.tile, step.rank]

    def rows(self, place: SequenceRows, numbers: range, head: int, heads: int = 1) -> BlockRows:
        """A sequence's rows with these numbers; the arguments are as in `Step`."""
        number = torch.arange(numbers.start, numbers.stop, device=CPU)
        query, turn = number // heads, number % heads
        seen = self.mask.key_range(query.numpy(), place.sequence(self.window))
        first, end = (torch.as_tensor(x, device=CPU).expand(len(query))[:, None] for x in seen)
        index: Any = head if heads == 1 else head * heads + turn
        column = index if heads == 1 else index[:, None]
        at = Position(place.batch, column, query[:, None], None, len(place.q), len(place.k))
        return BlockRows((place.entry_q, place.q.start + query, index), at, first, end)

    def attend(self, step: Step, rows: BlockRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Output (rows, head_dim_v) and log-sum-exp (rows,) of a step, in fp32, without sinks.
        Keys are taken from the last block to the first. With dropout the sums are of all
        probabilities, the output of those that are kept."""
        q, blocks = self.q[rows.place].float(), step.blocks
        head_kv = step.head * step.heads * self.k.shape[2] // self.q.shape[2]
        # None, or scales of keys and values, perhaps of queries; a scale that is missing is 1.
        descales = (one[step.place.batch, head_kv] for one in self.descales or ())
        scale_k, scale_v, scale_q, *_ = *descales, 1.0, 1.0, 1.0
        scale = 1.0 if self.scores else self.softmax_scale
        scale_log2, factor = scale * softmax.LOG2_E, self.softmax_scale / scale
        # In fp32, whatever default dtype the caller has set.
        row_max = q.new_full((len(q), 1), -torch.inf)
        row_sum, acc_O = q.new_zeros(len(q), 1), q.new_zeros(len(q), self.v.shape[3])
        for n_block in reversed(range(blocks.begin, blocks.end)):
            keys = range(n_block * step.tile_n, (n_block + 1) * step.tile_n)
            k, v = self.load(step.place.keys(head_kv), keys)
            is_masked = not blocks.full_begin <= n_block < blocks.full_end
            scaled_k = k * (scale_q * scale_k)
            values, kept, _ = self.logits(rows, keys, q, scaled_k, factor, is_masked)
            values, before = values * scale_log2, row_max
            largest = values.amax(dim=1, keepdim=True)
            lowered = largest - self.offset(values, largest)
            row_max = torch.where(largest - before > self.slack, lowered, before)
            # A row hidden so far has row max -inf; exp2(-inf - 0) is the 0 that it needs.
            finite = row_max.masked_fill(row_max == -torch.inf, 0.0)
            correction, p = torch.exp2(before - finite), torch.exp2(values - finite)
            p = self.codes(p) if self.is_linear else p
            row_sum = row_sum * correction + p.sum(dim=1, keepdim=True)
            acc_O = acc_O * correction + self.rounded(p * kept) @ v
        is_hidden = row_sum == 0.0
        excess = self.is_linear * softmax.EXCESS
        lse = (row_max + torch.log2(row_sum) - excess) * math.log(2.0)
        out = (acc_O * scale_v / row_sum).masked_fill(is_hidden, 0.0)
        if self.dropout is not None:
            out = out / self.dropout.kept
        return out, lse.masked_fill(is_hidden, -torch.inf).squeeze(1)

    def load(self, keys: Keys, positions: range) -> list[torch.Tensor]:
        """K and V of a head at consecutive positions, in fp32.
        Zeros stand for what may not be read: it may be anything, and 0 * NaN is not 0."""
        first = min(max(positions.start, keys.first), positions.stop)
        end = max(first, min(positions.stop, keys.last + 1))
        # What the host did not check may name a row or a page that does not exist.
        row = min(max(keys.row, 0), len(self.k) - 1)
        place: tuple = row, slice(keys.leftpad + first, keys.leftpad + end)
        if self.page_table is not None:
            tokens = torch.arange(keys.leftpad + first, keys.leftpad + end, device=CPU)
            page, token = on_pages(self.page_table[keys.row], tokens, self.k.shape[1])
            place = page.clamp(0, len(self.k) - 1), token
        place = *place, keys.head
        hidden = 0, 0, first - positions.start, positions.stop - end
        return [pad(x[place], hidden).float() for x in (self.k, self.v)]

    def logits(
        self,
        rows: BlockRows,
        positions: range,  # of the keys
        # q, k: the block's rows and keys.
        q: torch.Tensor,
        k: torch.Tensor,
        factor: float,  # of Q K^T
        is_masked: bool,
        has_slope: bool = False,  # whether the slope is wanted
    ) -> tuple[torch.Tensor, torch.Tensor | float, torch.Tensor | float]:
        """Return the scores of a block, (rows, keys), after scores and mask.
        Then 1 where dropout keeps the weight, else 0, and the slope of the scores in `factor` Q
        K^T."""
        key = torch.arange(positions.start, positions.stop, device=CPU)
        at = rows.at._replace(key=key.clamp(max=max(rows.at.seqlen_k - 1, 0)))
        values, slope = q @ k.T * factor, 1.0
        for score in self.scores:
            slope = slope * score.derivative(values, at) if has_slope else slope
            values = apply_score(score, values, at)
        if is_masked:
            seen = (key >= rows.first_key) & (key < rows.end_key)
            if self.function is not None:
                seen = seen & apply_mask(self.function, at, seen.shape)
            values = values.masked_fill(~seen, -torch.inf)
        return values, 1.0 if self.dropout is None else self.dropout.keeps(at).float(), slope

    def offset(self, values: torch.Tensor, largest: torch.Tensor) -> torch.Tensor | float:
        """Powers of two by which row maxima lie below the `largest` scores."""
        if not self.spec.is_fp8:
            return 0.0
        # Two of eight columns in turn are a thread's.
        least = values.unflatten(1, (-1, 4, 2)).amax(dim=(1, 3)).amin(dim=1, keepdim=True)
        is_outlier = (largest - least > softmax.OUTLIER) & (least > -torch.inf)
        offset = softmax.LINEAR_OFFSET if self.is_linear else softmax.FP8_OFFSET
        return offset + is_outlier * softmax.OUTLIER_OFFSET

    def codes(self, p: torch.Tensor) -> torch.Tensor:
        """What linear codes of P stand for; 127 is NaN."""
        x = p.log2()
        codes = torch.maximum(8 * (x + 7), 2 * (x + 9)).clamp(min=0).round().nan_to_num(127.0)
        return codes.to(torch.uint8).view(self.rounded_to).float()

    def rounded(self, operand: torch.Tensor) -> torch.Tensor:
        """An operand of a product as the tensor cores would get it."""
        return operand.to(self.rounded_to).float()


def batched(operands: Iterable[torch.Tensor | None]) -> list[Any]:
    """q, k, v, out, lse and gradients of out and lse, batched."""
    return [
        x if x is None or x.ndim == ndim else x[None]
        for x, ndim in zip(operands, (4, 4, 4, 4, 3, 4, 3), strict=False)
    ]


def on_pages(
    pages: torch.Tensor, positions: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages in which a sequence has these positions, and their places there."""
    return pages[positions // page_size].long(), positions % page_size


def merge_outputs(parts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Merge outputs (rows, head_dim_v) and log-sum-exps (rows,) over parts of the keys."""
    outs, lses = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    lse = lses.logsumexp(dim=0)
    weights = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0))
    return (outs * weights[..., None]).sum(dim=0), lse


# ------------------------------------------------------------------------ the steps of plans


def steps(
    plan: Plan,
    # Of the scores, mask and sinks. Without them a mask of the user's cannot say which blocks it
    # hides, and only the window limits the blocks.
    tensors: Iterable[torch.Tensor] = (),
    # Where the rows of the problem's sequences are, if they are no dense batch.
    sequences: list[SequenceRows] | None = None,
) -> Iterator[Step]:
    """Yield a plan's work, cluster by cluster."""
    problem, schedule, config = plan.problem, plan.schedule, plan.config
    if sequences is None:
        sequences = SequenceRows.dense(problem.batch, problem.seqlen_q, problem.seqlen_k)
    mask = problem.spec.mask
    if tensors or not problem.spec.modifier_types:
        _, mask, _ = bind(problem.spec, map(HostTensor, tensors))
    function = mask.function if isinstance(mask, Intersection) else mask
    num_rows = config.cluster_m * config.tile_m
    clusters = range(schedule.num_clusters)
    for cluster, segment in ((c, one) for c in clusters for one in walk(schedule, c)):
        place = sequences[segment.tile.batch]
        sequence, blocks = place.sequence(problem.window), NO_BLOCKS
        begin, head = segment.tile.m_block * num_rows, segment.tile.head * config.cluster_h
        if sequence.seqlen_k:
            with naming_argument("mask", function, "key_range or open_range"):
                blocks = mask.at(place.batch, head).key_blocks(
                    begin, num_rows, config.tile_n, sequence
                )
            if schedule.splits:
                blocks = blocks.between(segment.begin, segment.end)
        for rank in range(config.cluster):
            head_rank, row_rank = divmod(rank, config.cluster_m)
            first = row_rank * config.tile_m
            queries = range(begin, sequence.seqlen_q)[first : first + config.tile_m]
            work = place, queries, head + head_rank, blocks
            yield Step(segment, *work, config.tile_n, cluster, rank)


def execute(plan: Plan, values: Mapping[str, Any]) -> None:
    """Run a plan on its problem's CPU tensors, which `Walker` names.
    A row that sees no key gets 0 with log-sum-exp -inf, or with its sink."""
    call = Walker(plan.problem.spec, plan.problem.window, values)
    call.run(steps(plan, call.tensors))


def execute_packed(signature: Signature, values: Mapping[str, Any], short_queries: int = 0) -> None:
    """Attend inside of each sequence of CPU tensors.
    `values` are as `Walker` names them, and the `PackedLengths`. Without cu_seqlens_k, k and v are
    a cache. Sequences with `short_queries` or fewer are left out."""
    spec, window = signature.spec, signature.window
    walk = Walker(spec, window, values)
    lengths = PackedLengths(*(values[name] for name in PackedLengths._fields))
    has_cache = lengths.cu_seqlens_k is None
    heads_q, heads_kv = walk.q.shape[2], walk.k.shape[2]
    if has_cache and lengths.seqused_k is not None:
        # The host may not have checked them.
        pages = 1 if walk.page_table is None else walk.page_table.shape[1]
        lengths = lengths._replace(
            cu_seqlens_q=lengths.cu_seqlens_q.clamp(0, len(values["q"])),
            seqused_k=lengths.seqused_k.clamp(0, capacity_of(walk.k.shape[1], pages)),
        )
    for one in lengths.sequences():
        if len(one.q) <= short_queries:
            continue
        if has_cache:
            # Pages before the window may hold anything.
            first, _ = spec.mask.key_range(0, one.sequence(window))
            one = one._replace(first_key=first)
        sizes = 1, len(one.q), len(one.k), heads_kv, heads_q // heads_kv
        plan = plan_forward(Problem(spec, *sizes, window))
        walk.run(steps(plan, walk.tensors, [one]))


def execute_decode(plan: DecodePlan, values: Mapping[str, Any], max_seqlen_k: int) -> None:
    """Run a plan on CPU tensors; sequences have `max_seqlen_k` keys at most.
    `values` are as `Walker` names them, the `PackedLengths` and `CacheTables`, and seqlen_new, keys
    that each sequence has in addition to seqused_k. Of packed sequences those are left out that
    have more queries than the plan has room for. Without cu_seqlens_k, k and v are a cache, which
    is full without seqused_k. Without cu_seqlens_q, sequences have equally many queries."""
    ends_q, ends_k, used_q, used_k = map(values.get, PackedLengths._fields)
    sizes, queries, keys = plan.sizes, None, None
    batch = sizes.batch if ends_q is None else len(ends_q) - 1
    if ends_q is not None:
        queries = RaggedLengths(HostTensor(ends_q), host_tensor(used_q), len(values["q"]))
    if ends_k is not None:
        keys = RaggedLengths(HostTensor(ends_k), host_tensor(used_k), len(values["k"]))
    tables = CacheTables(*(host_tensor(values[name]) for name in CacheTables._fields))
    sequences = Cached(
        batch, host_tensor(used_k), values["seqlen_new"], tables, plan.spec.mask, sizes.seqlen_q,
        max_seqlen_k, plan.window, TILE_N, packed=queries,
        rows_of_query=sizes.qhead_per_kvhead, packed_keys=keys,
    )  # fmt: skip
    walk = Walker(plan.spec, plan.window, values)
    walk.run(steps_of_decode(plan, sequences))


def host_tensor(tensor: torch.Tensor | None) -> HostTensor | None:
    """A table that the host reads."""
    return None if tensor is None else HostTensor(tensor)


def steps_of_decode(plan: DecodePlan, sequences: Cached) -> Iterator[Step]:
    """Yield a decode plan's work, CTA by CTA."""
    sizes, group, packed = plan.sizes, plan.sizes.qhead_per_kvhead, sequences.packed
    lengths = list(map(sequences.read, range(sequences.num_sequences)))
    work = plan.cut, sequences, sizes.num_m_blocks, sizes.heads_kv, plan.num_ctas
    for cta, segment in segments(*work):
        tile, length = segment.tile, lengths[segment.tile.batch]
        keys, seqlen_k = sequences.keys(tile, length), sequences.sequence(length).seqlen_k
        first, seqlen_q = sequences.queries(length)
        place = SequenceRows(
            tile.batch,
            range(first, first + seqlen_q),
            range(keys.leftpad, keys.leftpad + seqlen_k),
            # Packed rows are one batch entry.
            tile.batch if packed is None else 0,
            keys.row if sequences.packed_keys is None else 0,
            keys.first,
        )
        rows = range(seqlen_q * group)[tile.m_block * ROWS :][:ROWS]
        blocks = Blocks(segment.begin, segment.begin, segment.begin, segment.end)
        yield Step(segment, place, rows, tile.head, blocks, TILE_N, cta, heads=group)
