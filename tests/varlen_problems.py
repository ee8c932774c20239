"""Calls on packed sequences that tests draw, their tensors, and what should come of them."""

import inspect
import itertools
import random
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from gpu_checks import captured, forget_prepared_calls, used_counters
from problems import DTYPES, poisoned_allocations
from reference import FEW_KEYS, check_attention
from score_problems import Recipe

import fa3
from fa3.calls.execution import EqualQueries, PackedCall
from fa3.calls.prepare import PreparedAttention
from fa3.planning import routes
from fa3.planning.costs import H200
from fa3.planning.routes import CACHE, DECODE, PACKED, Signature
from fa3.problem import NO_BOUND, AttentionSpec, Problem, Window
from fa3.scores.masks import Band

UNCHANGED = Recipe()


@dataclass(frozen=True)
class VarlenProblem:
    """What is asked of `flash_attn_varlen_func`, without tensors.

    Fields:
        seqlens_q, seqlens_k: rows of each sequence.
        used_q, used_k: seqused_q and seqused_k; None if they are not given.
        spare: rows behind the last sequence, in q and in k.
        recipe: what else the call says about its scores.
    """

    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    spare: int = 0
    heads_kv: int = 1
    group: int = 1
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: str = "bfloat16"
    causal: bool = False
    window: tuple[int, int] = (NO_BOUND, NO_BOUND)
    softmax_scale: float | None = None
    recipe: Recipe = UNCHANGED

    @property
    def columns_v(self) -> int:
        """Values are as wide as keys unless told."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def rows(self) -> list["Rows"]:
        """The rows of each sequence that are used."""
        rows_q, rows_k = (
            used(*lengths)
            for lengths in ((self.seqlens_q, self.used_q), (self.seqlens_k, self.used_k))
        )
        return list(map(Rows, rows_q, rows_k))

    @property
    def longest(self) -> Problem:
        """A batch of sequences as long as the longest, for which modifiers are drawn."""
        lengths = [(0, 0), *((len(rows.q), len(rows.k)) for rows in self.rows)]
        spec = AttentionSpec(self.dtype, self.head_dim, self.columns_v, Band())
        sizes = map(max, zip(*lengths, strict=True))
        return Problem(spec, len(self.seqlens_q), *sizes, self.heads_kv, self.group)


class Rows(NamedTuple):
    """Rows of q, and of k and v, that a sequence uses."""

    q: range
    k: range


def share_tiles(monkeypatch, holds) -> None:
    """Have packed sequences share tiles where `holds`, which takes signature and sizes, says so."""
    rules = (
        rule._replace(holds=holds) if rule.name == routes.SHARED else rule
        for rule in routes.RULES[routes.PACKED]
    )
    monkeypatch.setitem(routes.RULES, routes.PACKED, tuple(rules))
    forget_routes(monkeypatch)


def note_attending(monkeypatch) -> list:
    """Have what attends noted for later calls: the most queries of a plan of the decode kernel
    alone, "beside" where it has other sequences than the forward kernel, "forward"."""
    found: list = []

    def of_packed(call, sizes):
        route, _ = call.find(sizes)
        if route.name == DECODE:
            plan = call.signature.decode_plan(route.most_queries, False)
            found.append(plan.sizes.seqlen_q)
        elif route.has_forward:
            found.extend(["beside"] * (route.most_queries > 0) + ["forward"])

    def of_call(call, *_):
        runs = call.run and getattr(call.run, "__self__", call)
        if not isinstance(runs, PackedCall | EqualQueries | None):
            found.append(call.description.seqlen_q)

    def watch(kind: type, note: Callable) -> None:
        attend = kind.attend

        def noted(self, *given, **named):
            note(self, *given)
            return attend(self, *given, **named)

        monkeypatch.setattr(kind, "attend", noted)

    watch(PackedCall, lambda call, values: of_packed(call, call.sizes(values)))
    watch(EqualQueries, lambda call, _: call.prepared and of_packed(call.packed, call.sizes))
    watch(PreparedAttention, of_call)
    forget_prepared_calls()
    return found


def signature_with(spec: AttentionSpec, **fields: object) -> Signature:
    """Return the signature of calls on packed keys, or on a cache, that have this spec."""
    kind = CACHE if "cache" in fields else PACKED
    return Signature(kind, spec, Window(), 4, 4, **{"gpu": H200} | fields)


def forget_routes(monkeypatch) -> None:
    """Have calls choose their route anew each time, by rules that a test has changed."""
    find = PackedCall.find
    anew = property(lambda call: inspect.unwrap(find.__get__(call)), find.__set__)
    monkeypatch.setattr(PackedCall, "find", anew)


def used(seqlens: tuple[int, ...], counts: tuple[int, ...] | None) -> Iterator[range]:
    """Yield the rows of each sequence that are used."""
    begin = 0
    for sequence, seqlen in enumerate(seqlens):
        count = seqlen if counts is None else min(max(0, counts[sequence]), seqlen)
        yield range(begin, begin + count)
        begin += seqlen


def integers(*values: int, device="cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def ends_of(lengths: Iterable[int], device="cpu") -> torch.Tensor:
    """Where sequences with so many rows end."""
    return integers(0, *lengths, device=device).cumsum(0, dtype=torch.int32)


def make_call(problem: VarlenProblem, seed: int = 0, device="cpu") -> dict:
    """Draw the arguments of a call; its tensors are NaN in all rows that are not used."""
    generator = torch.Generator(device).manual_seed(seed)
    heads_q = problem.heads_kv * problem.group

    def packed(rows: list[range], total: int, heads: int, columns: int) -> torch.Tensor:
        shape, dtype = (total, heads, columns), DTYPES[problem.dtype]
        tensor = torch.full(shape, torch.nan, dtype=dtype, device=device)
        for of_sequence in rows:
            part = tensor[of_sequence.start : of_sequence.stop]
            part.copy_(torch.randn(part.shape, generator=generator, device=device))
        return tensor

    rows_q, rows_k = ([getattr(rows, side) for rows in problem.rows] for side in "qk")
    total_q, total_k = (
        sum(seqlens) + problem.spare for seqlens in (problem.seqlens_q, problem.seqlens_k)
    )
    call = {
        "q": packed(rows_q, total_q, heads_q, problem.head_dim),
        "k": packed(rows_k, total_k, problem.heads_kv, problem.head_dim),
        "v": packed(rows_k, total_k, problem.heads_kv, problem.columns_v),
        "cu_seqlens_q": ends_of(problem.seqlens_q, device),
        "cu_seqlens_k": ends_of(problem.seqlens_k, device),
        "max_seqlen_q": max(map(len, rows_q), default=0),
        "max_seqlen_k": max(map(len, rows_k), default=0),
        "softmax_scale": problem.softmax_scale,
        "causal": problem.causal,
        "window_size": problem.window,
    }
    for side, counts in (("q", problem.used_q), ("k", problem.used_k)):
        if counts is not None:
            if torch.device(device).type == "cpu":
                # What is below 0 is refused there.
                counts = [max(0, count) for count in counts]
            call[f"seqused_{side}"] = integers(*counts, device=device)
    return call | problem.recipe.make(problem.longest, call["q"], seed, steepest=0.5)


def on_pages(problem: VarlenProblem, call: dict, page_size: int, capacity: int = 0) -> dict:
    """The call with its keys in pages, in no order. What no sequence uses is NaN, and -1 where the
    table has no page."""
    device, lengths = call["q"].device, [len(rows.k) for rows in problem.rows]
    pages = -(-max(*lengths, capacity, 1) // page_size)
    taken = [-(-length // page_size) for length in lengths]
    free = iter(torch.randperm(sum(taken) + 2, generator=torch.Generator().manual_seed(0)).tolist())
    table = torch.full((len(lengths), pages), -1, dtype=torch.int32)
    for row, count in zip(table, taken, strict=True):
        row[:count] = integers(*(next(free) for _ in range(count)))
    table = table.to(device)
    caches = {}
    for name in "kv":
        packed = call[name]
        cache = packed.new_full((sum(taken) + 2, page_size, *packed.shape[1:]), torch.nan)
        for row, rows in zip(table, problem.rows, strict=True):
            at = torch.arange(len(rows.k), device=device)
            cache[row[at // page_size].long(), at % page_size] = packed[rows.k.start : rows.k.stop]
        caches[name] = cache
    of_pages = {"page_table": table, "seqused_k": integers(*lengths, device=device)}
    return call | caches | of_pages | {"cu_seqlens_k": None}


def on_cache(
    problem: VarlenProblem, call: dict, page_size: int | None, capacity: int = 0,
    is_indexed: bool = False,
) -> dict:  # fmt: skip
    """The call as one of `flash_attn_with_kvcache`. Without pages a sequence has the row of its
    number, or any row if that `is_indexed`."""
    longest = max(capacity, 1, *(len(rows.k) for rows in problem.rows))
    paged = on_pages(problem, call, page_size or longest, capacity)
    table = paged["page_table"]
    names = "q", "cu_seqlens_q", "max_seqlen_q", "softmax_scale", "causal", "window_size"
    arguments = {name: call[name] for name in (*names, "softcap", "alibi_slopes", "sinks")}
    arguments |= {"k_cache": paged["k"], "v_cache": paged["v"], "cache_seqlens": paged["seqused_k"]}
    if page_size is not None:
        return arguments | {"page_table": table}
    # A sequence without keys has a row all the same.
    rows = table[:, 0].clamp(min=0)
    if is_indexed:
        return arguments | {"cache_batch_idx": rows}
    return arguments | {name: arguments[name][rows] for name in ("k_cache", "v_cache")}


@dataclass(frozen=True)
class OfSequence:
    """The torch half of a score or a mask of the user's, for a batch of one sequence."""

    function: fa3.Score | fa3.Mask
    sequence: int

    def reference(self, *arguments):
        *logits, at = arguments
        return self.function.reference(*logits, at._replace(batch=at.batch + self.sequence))


def modifiers_of(call: dict, sequence: int) -> dict:
    """Return what a call says about its scores, for a batch of one of its sequences."""
    slopes, functions = call["alibi_slopes"], {}
    for name in ("score", "mask"):
        function = call[name]
        functions[name] = None if function is None else OfSequence(function, sequence)
    if slopes is not None and slopes.ndim == 2:
        slopes = slopes[sequence : sequence + 1]
    rest = {name: call[name] for name in ("softcap", "sinks")}
    if call.get("dropout_p"):
        rest |= {name: call[name] for name in ("dropout_p", "rng_state")}
        rest["first_batch"] = sequence
    return {"alibi_slopes": slopes, **rest, **functions}


def check_varlen(
    problem: VarlenProblem,
    call: dict,
    out: torch.Tensor,
    lse: torch.Tensor,
    skipped: Container[int] = (),
    few_keys: int = FEW_KEYS,
    **tolerance: float,
) -> None:
    """Assert that a call gave each sequence that is not skipped what dense attention in float64
    gives it.

    Torch's weight of a single key is exactly 1. Beside a fixed reference a weight is any number,
    and rounded to 16 bits, like those of several keys.

    Args:
        few_keys: sequences with fewer may have errors that torch's computation has not: of few
            numbers the largest error is a matter of luck.
    """
    left, right = problem.window
    window = Window(left, 0 if problem.causal else right)
    assert lse.shape == (out.shape[1], out.shape[0])
    eps = torch.finfo(out.dtype).eps if out.is_cuda else 0.0
    for sequence, rows in enumerate(problem.rows):
        if sequence in skipped:
            continue
        of_q, of_k = (slice(part.start, part.stop) for part in rows)
        check_attention(
            out[None, of_q], lse[None, :, of_q], call["q"][None, of_q], call["k"][None, of_k],
            call["v"][None, of_k], problem.softmax_scale, window,
            weight_error=eps if len(rows.k) < few_keys else 0.0, **tolerance,
            **modifiers_of(call, sequence),
        )  # fmt: skip


def unused(problem: VarlenProblem, total: int, device="cpu") -> torch.Tensor:
    """Return which rows of q belong to no query that is used, (total,) bool."""
    found = torch.ones(total, dtype=torch.bool, device=device)
    for rows in problem.rows:
        found[rows.q.start : rows.q.stop] = False
    return found


def attend(call: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Call into NaN memory; return out and the log-sum-exp."""
    is_on_cache = "k_cache" in call
    function = fa3.flash_attn_with_kvcache if is_on_cache else fa3.flash_attn_varlen_func
    with poisoned_allocations():
        return function(**call, return_lse=True)


def check_call(
    problem: VarlenProblem,
    where="cpu",
    seed: int = 0,
    change: Callable[[VarlenProblem, dict], dict] = lambda problem, call: call,
    is_poisoned: bool = False,
    few_keys: int = FEW_KEYS,
    **options,
) -> None:
    """Assert that a call is right in all rows that are used, and writes no others.

    Args:
        change: makes of a problem and its call the one that is checked, with the same result.
        is_poisoned: whether keys and values of some sequences, which are skipped, are not finite.
        options: more arguments of the call.
    """
    call = make_call(problem, seed, where)
    skipped = poison(problem, call) if is_poisoned else ()
    out, lse = attend(change(problem, call) | options)
    check_varlen(problem, call, out, lse, skipped, few_keys)
    untouched = unused(problem, len(out), where)
    assert out[untouched].isnan().all() and lse[:, untouched].isnan().all()


def check_beside_what_is_not_finite(problem: VarlenProblem, where) -> None:
    """Assert that what is not finite in some sequences reaches their outputs, and no others."""
    call = make_call(problem, 0, where)
    poisoned = poison(problem, call)
    assert len(poisoned) >= 3
    for _ in range(1 if where == "cpu" else 2):
        out, lse = attend(call)
        check_varlen(problem, call, out, lse, skipped=poisoned)
        assert all(not out[problem.rows[i].q[-1]].isfinite().all() for i in poisoned)
        assert not used_counters()


WRONG_ENDS = [
    *((0, 200, 100, 300), (-50, 90, 900, 300)),
    *((0, 2**30, -(2**30), 9), (0, 100, -(2**31), 300)),
]
"""Lengths of three sequences that are none."""


def check_wrong_ends(call: dict, **options) -> None:
    """Assert that a call whose lengths are none writes nothing outside of out."""
    device, rows = call["q"].device, len(call["q"])
    around = torch.full((3 * rows, *call["q"].shape[1:]), 7.0, device=device).to(call["q"].dtype)
    function, names = fa3.flash_attn_varlen_func, ["cu_seqlens_q", "cu_seqlens_k"]
    if "k_cache" in call:
        function, names = fa3.flash_attn_with_kvcache, ["cu_seqlens_q"]
        call |= {name: call[name].nan_to_num() for name in ("k_cache", "v_cache")}
    for ends in WRONG_ENDS:
        lengths = dict.fromkeys(names, integers(*ends, device=device))
        function(**call | lengths | options, out=around[rows : 2 * rows])
        torch.cuda.synchronize()
        assert (around[:rows] == 7).all() and (around[2 * rows :] == 7).all()
        assert not used_counters()


LENGTHS_OF_GRAPHS = "cu_seqlens_q", "cu_seqlens_k"


def check_graph(
    problems: list[VarlenProblem],
    device,
    every: int = 0,
    names: tuple[str, ...] = ("q", "k", "v", *LENGTHS_OF_GRAPHS),
    **options,
) -> None:
    """Assert that a graph of the first call serves the tensors of all calls.

    Args:
        every: which sequences are poisoned; 0 for none.
        names: the tensors that the other calls have of their own.
    """
    calls = [make_call(problem, seed, device) for seed, problem in enumerate(problems)]
    values = [{name: call[name].clone() for name in names} for call in calls]
    call = calls[0] | options
    fa3.flash_attn_varlen_func(**call)
    graph, (out, lse) = captured(lambda: fa3.flash_attn_varlen_func(**call, return_lse=True))
    for problem, tensors in zip(problems, values, strict=True):
        for name, tensor in tensors.items():
            call[name].copy_(tensor)
        poisoned = poison(problem, call, every) if every else ()
        graph.replay()
        check_varlen(problem, call, out, lse, skipped=poisoned)


def random_problem(seed: int, dtype: str, family: int, longest: int = 150) -> VarlenProblem:
    """Draw any combination of options.

    What changes the generated code follows from the family, since each takes seconds to compile.
    """
    code, draw = random.Random(f"{family} {dtype}"), random.Random(f"{seed} {dtype}")
    head_dim, head_dim_v = code.choice(
        ((64, 64), (128, 128), (128, 128), (256, 256), (192, 128), (96, 80), (8, 40))
    )
    batch = draw.choice((1, 2, 3, 5))

    def lengths() -> tuple[int, ...]:
        return tuple(draw.choice((0, 1, draw.randint(0, longest))) for _ in range(batch))

    def counts(seqlens: tuple[int, ...], are_given: bool) -> tuple[int, ...] | None:
        # Some are below 0, and some above their sequence's length.
        far = (-3, 0, 2 * longest)
        return (
            tuple(draw.choice((*far, draw.randint(0, seqlen))) for seqlen in seqlens)
            if are_given
            else None
        )

    seqlens_q = lengths()
    seqlens_k = seqlens_q if draw.random() < 0.3 else lengths()
    kind = code.choice(("none", "causal", "causal", "window", "left", "right"))
    bound = draw.choice((0, draw.randint(0, longest), 1 << 40))
    window = {
        "window": (bound, draw.randint(0, 30)),
        "left": (bound, NO_BOUND),
        "right": (NO_BOUND, bound),
    }.get(kind, (NO_BOUND, NO_BOUND))
    recipe = Recipe(
        code.choice((0.0, 0.0, 20.0)),
        code.choice((0, 0, 1, 2)),
        code.choice((None, None, "float32", "q")),
        code.choice((None, None, None, "relative", "gate")),
        code.choice((None, None, None, "documents", "prefix", "span")),
    )
    return VarlenProblem(
        seqlens_q,
        seqlens_k,
        counts(seqlens_q, code.random() < 0.4),
        counts(seqlens_k, code.random() < 0.4),
        draw.choice((0, 0, 7)),
        draw.randint(1, 2),
        code.choice((1, 1, 2, 3)),
        head_dim,
        head_dim_v,
        dtype,
        kind == "causal",
        window,
        draw.choice((None, 0.3)),
        recipe,
    )


def random_short_problem(seed: int, dtype: str, family: int, longest: int = 40) -> VarlenProblem:
    """Draw any combination of options with which sequences may share tiles."""
    problem = random_problem(seed, dtype, family, longest)
    recipe = Recipe(softcap=problem.recipe.softcap, sinks=problem.recipe.sinks)
    return replace(problem, recipe=recipe)


def poison(problem: VarlenProblem, call: dict, every: int = 3) -> set[int]:
    """Write what is not finite into K and V of every third sequence; return which these are.

    Some have it in one place, some everywhere.
    """
    values = itertools.cycle((torch.nan, torch.inf, -torch.inf))
    poisoned = set()
    for sequence, rows in list(enumerate(problem.rows))[::every]:
        if len(rows.k):
            poisoned.add(sequence)
            value, of_keys = next(values), slice(rows.k.start, rows.k.stop)
            if len(poisoned) % 2:
                call["k"][of_keys], call["v"][of_keys] = value, value
            else:
                call["v"][rows.k[-1], -1, -1] = value
    return poisoned
