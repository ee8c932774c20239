"""`flash_attn_with_kvcache` on the CPU and on a Hopper GPU, against the reference in float64."""

import math
import runpy
from dataclasses import replace
from itertools import product

import pytest
import torch
from fake_gpu import noting_launches
from gpu_checks import captured, forget_prepared_calls
from invalid_arguments import WRONG_VALUES
from kvcache_problems import CacheProblem, make_call, random_problem
from pairs import combine, pairs, places
from problems import poisoned_allocations
from reference import as_bits, check_call, dense
from valid_calls import INDEXED, PAGED, PLAIN, RAGGED, OnGpu, changed
from varlen_problems import integers

from fa3 import flash_attn_func
from fa3 import settings as fa3_settings
from fa3.calls import values as calls_values
from fa3.calls.attention import flash_attn_with_kvcache
from fa3.calls.call import INTEGERS, TENSORS, describe_tensors, public_name
from fa3.calls.combine import flash_attn_combine
from fa3.calls.options import CACHED, Options
from fa3.calls.scheduler_metadata import get_scheduler_metadata
from fa3.calls.values import values_on_host
from fa3.kernels.decode import Decode
from fa3.kernels.segment_table import SegmentTable
from fa3.kernels.tile_table import TileTableArguments, words_of_table
from fa3.planning import decode as planning

DTYPES = ("bfloat16", "float16")

FAMILIES = 16
"""Sets of options that change the generated code, for each dtype, of the calls on a GPU."""

LENGTHS = (0, 1, 20, 300, 3000)

MODES = {
    "stream": {},
    "whole": {"num_splits": 1},
    "splits": {"num_splits": 5},
    "invariant": {"batch_invariant": True},
}
"""Ways to cut the keys."""


def run(call: dict, **options):
    """Call into NaN memory on copies of the caches; return out, LSE and the caches."""
    caches = call["k_cache"].clone(), call["v_cache"].clone()
    arguments = call | dict(zip(("k_cache", "v_cache"), caches, strict=True)) | options
    with poisoned_allocations():
        out, lse = flash_attn_with_kvcache(**arguments, return_lse=True)
    return out, lse, caches


def check(problem: CacheProblem, where="cpu", seed: int = 0, **options) -> None:
    call = make_call(problem, seed, where)
    check_call(call, *run(call, **options))


def assert_same_bits(results, others) -> None:
    out, lse, caches = results
    other_out, other_lse, other_caches = others
    assert torch.equal(out, other_out) and torch.equal(lse, other_lse)
    for cache, other in zip(caches, other_caches, strict=True):
        assert torch.equal(as_bits(cache), as_bits(other))


def unread(call: dict) -> dict:
    """Return the call with integer tensors that the host does not read."""
    return call | {
        name: value.as_subclass(OnGpu)
        for name, value in call.items()
        if isinstance(value, torch.Tensor) and value.dtype == torch.int32 and value.is_cpu
    }


# ------------------------------------------------------------------------------------ results


@places(
    "seed,dtype,family,lengths",
    cpu=[(n, dtype, n, LENGTHS[:-1]) for n in range(30) for dtype in DTYPES],
    gpu=[(n, dtype, n, LENGTHS) for n in range(FAMILIES) for dtype in DTYPES],
)
def test_random_calls(seed, dtype, family, lengths, where):
    """A quarter of the families for each way to cut the keys, so that none needs all of them."""
    options = tuple(MODES.values())[family % 4]
    check(random_problem(seed, dtype, family, lengths), where, seed, **options)
    if where != "cpu":
        # What is compiled follows from the family.
        for number, longer in ((1, lengths), (2, (100, 1000, 9000))):
            other = seed + number * FAMILIES
            check(random_problem(other, dtype, family, longer), where, other, **options)


CUT = [
    *(
        CacheProblem(seqlens, heads_kv=2, group=4, causal=True, head_dim=128)
        for seqlens in ((1,), (63, 64, 65), (1000, 1, 0, 4097), (0,), (0, 0, 5))
    ),
    *(
        CacheProblem((700, 90), heads_kv=heads_kv, group=group, head_dim=128)
        for heads_kv, group in ((8, 1), (2, 3), (1, 128), (2, 5))
    ),
    *(
        CacheProblem((1, 500, 0, 64, 4113), heads_kv=2, group=4, page_size=page_size, causal=True)
        for page_size in (7, 16, 24, 192)
    ),
    *(
        CacheProblem(
            (333, 65), 4, heads_kv=2, group=4, page_size=page_size, batch_idx=(3, 0), rows=5,
            causal=True,
        )
        for page_size in (7, 16, 24, 192)
    ),
    *(
        CacheProblem(
            (200, 500, 64, 65, 1000, 500), 2, heads_kv=2, group=4, page_size=page_size,
            leftpads=(0, 1, 63, 64, 100, 500), causal=True,
        )
        for page_size in (None, 16)
    ),
    *(
        CacheProblem(
            (1500, 20, 0), 3, heads_kv=2, group=4, softcap=2.0, alibi=1, sinks="float32",
            window=window, head_dim=128,
        )
        for window in ((-1, 0), (300, 0))
    ),
]  # fmt: skip

LARGE = [
    CacheProblem((40_000,), group=16, causal=True, head_dim=128),
    CacheProblem((30_000, 20, 100, 9000), 8, heads_kv=2, group=4, causal=True, head_dim=128),
    *(
        CacheProblem(tuple((0, 1, 70, 200)[37 * n % 11 % 4] for n in range(batch)), group=2)
        for batch in (33, 1000, 1025, 3000)
    ),
]
"""Keys for all CTAs, and sequences for each way to search them."""


@pytest.mark.parametrize("problem", CUT)
def test_every_cut(problem, where):
    """On a GPU in two ways."""
    number = CUT.index(problem)
    for mode in range(number, number + (1 if where == "cpu" else 2)):
        check(problem, where, **tuple(MODES.values())[mode % 4])


@pytest.mark.parametrize("mode", MODES)
def test_large_calls(mode, device):
    for problem in LARGE:
        check(problem, device, **MODES[mode])


def test_keys_that_grow(where):
    """The row max of the softmax grows in every block."""
    call = make_call(CacheProblem((3000,), group=4, causal=True, head_dim=128), device=where)
    factor = torch.linspace(0.1, 8, call["k_cache"].shape[1], device=where)
    call["k_cache"] = (call["k_cache"] * factor[:, None, None]).bfloat16()
    for options in MODES.values():
        check_call(call, *run(call, **options))


@pytest.mark.parametrize("page_size", [None, 1, 2, 16, 48, 64, 128, 256])
def test_lengths(page_size, where):
    for seqlen, counts in product((0, 1, 2, 64, 65, 127, 128, 129, 1000), (None, (2, 2, 2))):
        problem = CacheProblem((seqlen, 5, 300), counts=counts, page_size=page_size, head_dim=128)
        check(replace(problem, heads_kv=2, group=4), where)


@pairs(group=(1, 4, 8, 16), page_size=(None, 16, 64))
def test_rows_of_a_head_may_take_several_tiles(group, page_size, where):
    """The consumer once walked the key blocks of its own rows, the producer those of all."""
    for seqlen_q in (1, 2, 4, 5, 8, 9, 16, 17, 64, 65, 80):
        problem = CacheProblem(
            (300, 10, 0, 64), seqlen_q, heads_kv=2, group=group, page_size=page_size, causal=True
        )
        check(problem, where)


@pairs(
    dtype=DTYPES,
    table_dtype=("same", "float32"),
    interleaved=(False, True),
    dim=(16, 64, 128),
    causal=(False, True),
)
def test_rotary(dtype, table_dtype, interleaved, dim, causal, where):
    """Queries turn to positions of their own only under a mask that tells them apart."""
    table_dtype = dtype if table_dtype == "same" else table_dtype
    problem = CacheProblem(
        (500, 0, 7), 4, (4, 4, 4), dtype=dtype, heads_kv=2, group=4, head_dim=128,
        rotary=(dim, interleaved, table_dtype), causal=causal,
    )  # fmt: skip
    check(problem, where)


def test_a_length_may_be_one_number(where):
    call = make_call(CacheProblem((37, 37), room=0, group=4), device=where)
    for seqlen in (0, 30, None):
        tensor = torch.full((2,), 37 if seqlen is None else seqlen, dtype=torch.int32, device=where)
        assert_same_bits(run(call, cache_seqlens=tensor), run(call, cache_seqlens=seqlen))


def test_empty_tensors(where):
    for problem in (
        CacheProblem((3, 4), seqlen_q=0, counts=(2, 2)),
        CacheProblem((0, 0), room=0),
        CacheProblem((0, 0), room=0, page_size=16),
        CacheProblem((0, 0), room=0, page_size=16, sinks="float32"),
        CacheProblem((3, 4), heads_kv=0),
        CacheProblem((3, 4), counts=(0, 0), rotary=(16, True, "bfloat16")),
        CacheProblem((3, 4), counts=(0, 0), ragged=True),
    ):
        check(problem, where)


def test_a_cache_without_pages_or_rows(where):
    """Lengths on a GPU may say that there is something in it."""
    caches = "k_cache", "v_cache"
    for problem, empty in (
        (CacheProblem((5, 9), 1, (1, 1), page_size=16), caches),
        (CacheProblem((5, 9), page_size=16, sinks="float32"), caches),
        (CacheProblem((5, 9), 1, (1, 1), batch_idx=(1, 0), rows=2), caches),
        (CacheProblem((5, 9), batch_idx=(1, 0), rows=2, page_size=16), ("page_table",)),
    ):
        call = make_call(problem, device=where)
        out, lse, _ = run(unread(call | {name: call[name][:0] for name in empty}))
        sinks = call.get("sinks", torch.tensor([-math.inf], device=where))
        assert (out == 0).all() and (lse == sinks[:, None]).all()


@pytest.mark.parametrize(
    ("kind", "other", "usual"), [("device", "meta", None), ("dtype", torch.float64, torch.float32)]
)
def test_other_defaults_change_nothing(kind, other, usual):
    set_default = getattr(torch, f"set_default_{kind}")
    call = make_call(CacheProblem((150, 9), 2, (2, 2), page_size=16, rotary=(32, False, "float32")))
    before = run(call, num_splits=3, cache_seqlens=9)
    set_default(other)
    try:
        after = run(call, num_splits=3, cache_seqlens=9)
        metadata = get_scheduler_metadata(2, 2, 200, 8, 1, 64, 9)
        full = flash_attn_func(call["q"], call["k"], call["v"])
    finally:
        set_default(usual)
    assert_same_bits(before, after)
    assert metadata == get_scheduler_metadata(2, 2, 200, 8, 1, 64, 9)
    with pytest.raises(TypeError, match="must come from get_scheduler_metadata, got tuple"):
        run(call, scheduler_metadata=tuple(metadata))
    assert torch.equal(full, flash_attn_func(call["q"], call["k"], call["v"]))


@pairs(page_size=(None, 16, 64), group=(1, 8))
def test_batch_invariance(group, page_size, where):
    """A sequence gives the same bits alone and anywhere among others."""
    for seqlen_q, options in (
        *((1, {"batch_invariant": True}), (9, {"batch_invariant": True})),
        *((9, {"num_splits": 1}), (1, {"num_splits": 5})),
    ):
        few, many = (900, 41, 0, 333, 128), (20_000, 41, 0, 3333, 512, 513, *range(1, 2000, 50))
        seqlens = few if where == "cpu" else many
        problem = CacheProblem(
            seqlens, seqlen_q, heads_kv=2, group=group, page_size=page_size, causal=True
        )
        call = make_call(problem, device=where)
        out, lse, _ = run(call, **options)
        by_sequence = ["q", "cache_seqlens"] + (
            ["page_table"] if page_size else ["k_cache", "v_cache"]
        )
        last = len(seqlens) - 1
        for chosen in ([0], [3], [3, 0], [4, 3, 2, 1, 0], [1] * len(seqlens) + [0], [last, 3, 3]):
            some = call | {name: call[name][chosen] for name in by_sequence}
            some_out, some_lse, _ = run(some, **options)
            assert torch.equal(some_out, out[chosen]) and torch.equal(some_lse, lse[chosen])
        fewer_sms_out, fewer_sms_lse, _ = run(call, **options, sm_margin=77)
        assert torch.equal(fewer_sms_out, out) and torch.equal(fewer_sms_lse, lse)


# -------------------------------------------------------------------------------------- merge


def partial_results(num_splits=3, head_dim=64, where="cpu"):
    """Draw parts of which some are hidden; one row is hidden altogether."""
    generator, shape = torch.Generator(where).manual_seed(0), (num_splits, 2, 5, 4)
    out = torch.randn(*shape, head_dim, generator=generator, device=where)
    lse = 5 * torch.randn(num_splits, 2, 4, 5, generator=generator, device=where).transpose(2, 3)
    lse[torch.rand(lse.shape, generator=generator, device=where) < 0.3] = -torch.inf
    lse[:, 0, 0, 0] = -torch.inf
    return out, lse


@places(
    "head_dim,out_dtype",
    cpu=product((8, 512), (None, torch.float32, torch.bfloat16, torch.float16)),
    gpu=[
        *((8, torch.float32), (64, torch.bfloat16), (128, torch.float16), (256, None)),
        *((8, torch.bfloat16), (64, None), (128, torch.float32), (256, torch.float16)),
        *((512, torch.bfloat16), (512, None)),
    ],
)
def test_combine(head_dim, out_dtype, where):
    for num_splits in (1, 2, 40, 300):
        parts, lses = partial_results(num_splits, head_dim, where)
        with poisoned_allocations():
            out, lse = flash_attn_combine(parts, lses, out_dtype=out_dtype)
        assert out.dtype == (out_dtype or torch.float32)
        exact = lses.double().logsumexp(0)
        shares = (lses.double() - exact).exp().nan_to_num(0.0)
        torch.testing.assert_close(lse.double(), exact, rtol=1e-5, atol=1e-5)
        merged = (shares[..., None] * parts.double()).sum(0)
        torch.testing.assert_close(out, merged.to(out.dtype), rtol=2e-2, atol=1e-5)
        assert (out[0, 0, 0] == 0).all() and lse[0, 0, 0] == -math.inf
        given = torch.full_like(out, torch.nan)
        assert flash_attn_combine(parts, lses, given)[0] is given
        assert torch.equal(given, out)


def test_pages_that_are_only_read_may_be_shared():
    call = make_call(PAGED)
    call["page_table"] = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32)
    call["cache_seqlens"] = integers(16, 20)
    for name in ("k_cache", "v_cache"):
        call[name] = torch.randn_like(call[name])
    check_call(call, *run(call))


# -------------------------------------------------------------------- values that lie on a GPU


@pytest.fixture
def assertions(monkeypatch):
    """Have what says that it is on a GPU read back; no graph is being captured."""
    monkeypatch.setattr(calls_values, "ASSERTIONS", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def seen_by_host(call: dict) -> dict[str, list | None]:
    """Return what the host sees of a call's integer tensors."""
    values = {name: call.get(public_name(CACHED, name)) for name in TENSORS}
    described = describe_tensors(values, Options(kind=CACHED))
    return values_on_host(described, {name: values[name] for name in INTEGERS})


@pytest.mark.parametrize(("value", "enabled"), [("0", False), ("1", True)])
def test_the_environment_turns_assertions_on(value, enabled, monkeypatch):
    monkeypatch.setitem(fa3_settings.SETTINGS, "FA3_ASSERTIONS", value)
    assert runpy.run_path(calls_values.__file__)["ASSERTIONS"] is enabled


@pytest.mark.parametrize("problem", [INDEXED, PAGED, RAGGED], ids=["indexed", "paged", "ragged"])
def test_what_is_on_a_gpu_is_not_read(problem, monkeypatch):
    call = make_call(problem)
    monkeypatch.setattr(OnGpu, "tolist", lambda tensor: pytest.fail("was read"))
    counts = None if problem.ragged else list(problem.counts)
    seen = seen_by_host(unread(call))
    assert seen == dict.fromkeys(INTEGERS) | {"counts": counts}


@pytest.mark.parametrize("problem", [INDEXED, PAGED, RAGGED], ids=["indexed", "paged", "ragged"])
def test_assertions_read_it_back(problem, assertions):
    call = make_call(problem)
    assert seen_by_host(unread(call)) == seen_by_host(call)


MARGIN = 1 << 16  # elements around a tensor that is watched


def watched(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy of a tensor with NaN around it, and all of that memory."""
    memory = tensor.new_full((tensor.numel() + 2 * MARGIN,), torch.nan)
    copy = memory[MARGIN:-MARGIN].view(tensor.shape)
    return copy.copy_(tensor), memory


def test_nothing_is_written_outside_of_the_cache(where):
    for problem, changes in WRONG_VALUES:
        call = changed(make_call(problem, device=where), changes)
        call["out"] = torch.zeros_like(call["q"])
        memories = []
        for name in ("k_cache", "v_cache", "out"):
            call[name], memory = watched(call[name])
            memories.append(memory)
        flash_attn_with_kvcache(**unread(call))
        for memory in memories:
            assert memory[:MARGIN].isnan().all() and memory[-MARGIN:].isnan().all()


@pytest.mark.parametrize("page_size", [None, 16])
def test_lengths_and_paddings_count_as_if_cut(page_size, where):
    problem = CacheProblem((300, 30), 2, page_size=page_size, leftpads=(3, 0), room=1000)
    call = make_call(problem, device=where)
    for name in ("k_cache", "v_cache"):
        call[name] = call[name].nan_to_num(1.0)
    if page_size is not None:
        call["page_table"] = call["page_table"].clamp(0, call["k_cache"].shape[0] - 1)
    for value, argument, mode in combine(
        [(-(2**31), -5000, 2**31 - 1), ("cache_seqlens", "cache_leftpad"), tuple(MODES)]
    ):
        wrong = changed(call, {argument: lambda x, value=value: torch.full_like(x, value)})
        cut = changed(wrong, {argument: lambda x: x.clamp(0, problem.capacity)})
        assert_same_bits(run(unread(wrong), **MODES[mode]), run(unread(cut), **MODES[mode]))


def test_assertions_let_right_calls_through(assertions):
    call = make_call(INDEXED)
    check_call(call, *run(unread(call)))


def test_assertions_cannot_be_captured(assertions, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call = make_call(PLAIN)
    complaint = "^cache_seqlens cannot be read back while a CUDA graph is captured: FA3_ASSERTIONS"
    with pytest.raises(RuntimeError, match=complaint):
        flash_attn_with_kvcache(**unread(call))
    run(call)


# ------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("head_dims", "mode", "dtype"),
    [
        *(((size, size), "stream", "bfloat16") for size in range(8, 257, 24)),
        *(
            (sizes, mode, DTYPES[(i + j) % 2])
            for i, sizes in enumerate(((256, 256), (72, 200), (192, 128), (64, 256)))
            for j, mode in enumerate(list(MODES)[1:])
        ),
    ],
)
def test_head_dims(head_dims, mode, dtype, device):
    """What is left of 64 columns in all ways."""
    head_dim, head_dim_v = head_dims
    problem = CacheProblem((513, 3), 2, (2, 2), group=4, causal=True, dtype=dtype)
    problem = replace(problem, head_dim=head_dim, head_dim_v=head_dim_v)
    check(problem, device, **MODES[mode])


@pytest.mark.parametrize("page_size", [None, 16, 256])
@pytest.mark.timeout(600)
def test_long_sequences(page_size, device):
    sizes = {"head_dim": 128, "group": 8}
    for seqlen, num_splits in ((1 << 17, 16), (1 << 17, 1), (1 << 20, 0)):
        problem = CacheProblem((seqlen, 77), counts=(1, 1), page_size=page_size, **sizes)
        check(problem, device, num_splits=num_splits)


@pytest.mark.parametrize(
    ("options", "leftpads"), [({}, None), ({"num_splits": 3}, None), ({"num_splits": 1}, (5, 0, 3))]
)
def test_a_page_table_wider_than_32_bits_count(options, leftpads, device):
    """2,097,152 pages of 1,024 tokens make 2^31; of the sequences few are long."""
    problem = CacheProblem(
        (3000, 0, 1000), 2, (2, 2, 2), heads_kv=2, group=4, page_size=1024, leftpads=leftpads,
        causal=True, rotary=(64, True, "bfloat16"),
    )  # fmt: skip
    call = make_call(problem, device=device)
    check_call(call, *run(call | {"page_table": widened(call["page_table"])}, **options))


def widened(table: torch.Tensor) -> torch.Tensor:
    """Return a page table with 2^21 columns, of which those behind the given ones are no pages."""
    wide = table.new_full((table.shape[0], 1 << 21), -1)
    wide[:, : table.shape[1]] = table
    return wide


MANY = CacheProblem(tuple((37 * n) % 400 for n in range(1500)), group=4, heads_kv=2)
ROWS = CacheProblem((9000, 41, 0, 3333), 30, heads_kv=2, group=8, page_size=16, causal=True)
WINDOW = CacheProblem((5000, 300), 3, heads_kv=3, window=(1000, 0), leftpads=(7, 0), page_size=1)


@pytest.mark.parametrize(
    ("problem", "options"),
    [
        (MANY, {}),
        (ROWS, {}),
        (ROWS, {"num_splits": 1}),
        (ROWS, {"num_splits": 5}),
        (WINDOW, {"batch_invariant": True}),
    ],
    ids=["many", "rows", "whole", "splits", "window"],
)
def test_long_places_change_no_bit(problem, options, device, monkeypatch):
    call = make_call(problem, device=device)
    results = run(call, **options)
    loaded = []

    def with_long_places(*fields):
        loaded.append(replace(Decode(*fields), is_long=True))
        return loaded[-1]

    monkeypatch.setattr(planning, "Decode", with_long_places)
    forget_prepared_calls()
    try:
        assert_same_bits(results, run(call, **options))
    finally:
        forget_prepared_calls()
    assert loaded


@pytest.mark.timeout(600)
def test_more_key_blocks_than_32_bits_count(device):
    """133,120 tiles with 16,384 blocks each, 2.2e9 in all: one page, again and again."""
    generator = torch.Generator(device).manual_seed(0)
    batch, seqlen_q, repeats, page_size, head_dim = 65, 1 << 17, 1 << 10, 1 << 10, 8

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    q = normal(batch, seqlen_q, 1, head_dim)
    k, v = (normal(1, page_size, 1, head_dim) for _ in range(2))
    pages = torch.zeros(batch, repeats, dtype=torch.int32, device=device)
    with poisoned_allocations():
        out, lse = flash_attn_with_kvcache(q, k, v, page_table=pages, return_lse=True)
    for sequence in (0, 1, 33, 64):
        rows = torch.arange(sequence, seqlen_q, 997, device=device)
        expected, expected_lse = dense(q[sequence, rows][None], k, v)
        torch.testing.assert_close(out[sequence, rows].double(), expected[0], rtol=2e-2, atol=5e-3)
        expected_lse = expected_lse[0] + math.log(repeats)
        torch.testing.assert_close(lse[sequence][:, rows].double(), expected_lse, rtol=0, atol=1e-2)


@pytest.mark.parametrize("is_captured", [False, True])
def test_equal_queries_have_lasting_ends(is_captured, monkeypatch):
    """Made once. What is made during a capture lies in the graph's memory, and is not kept.
    Segments of later calls lie in the same memory; a table's size says how many tiles there are."""
    q, k = torch.zeros(3, 512, 8, 128).bfloat16(), torch.zeros(3, 8192, 1, 128).bfloat16()
    with noting_launches() as notes:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_captured)
        for batch in (3, 3, 1):
            flash_attn_with_kvcache(q[:batch], k[:batch], k[:batch], causal=True)
    tables = [TileTableArguments(*x) for one, x in notes.launches if isinstance(one, SegmentTable)]
    assert len({one.segments.data_ptr() for one in tables}) == 1
    assert all(one.table.shape == (words_of_table(one.capacity),) for one in tables)
    ends = [one.cu_seqlens_q for one in tables[:2]]
    assert len(ends) == 2 and (ends[0] is ends[1]) != is_captured
    assert all(one.tolist() == [0, 512, 1024, 1536] for one in ends)


# --------------------------------------------------------------------------------- appending


@pytest.mark.parametrize("page_size", [None, 1, 48])
def test_a_long_prompt_is_appended(page_size, device):
    for counts, ragged in (((900, 0, 333), True), ((900, 900, 900), False)):
        problem = CacheProblem(
            (0, 70, 500), 8, counts, ragged, heads_kv=3, page_size=page_size, causal=True
        )
        check(problem, device)


@pytest.mark.parametrize("page_size", [None, 16])
def test_what_does_not_fit_the_cache_is_dropped(page_size, device):
    """Lengths on the GPU are not checked: they count as if cut to the cache."""
    problem = CacheProblem((30, 9, 0), 2, (4, 4, 4), page_size=page_size, room=0)
    call, capacity = make_call(problem, device=device), problem.capacity
    for name in ("k_cache", "v_cache"):
        call[name] = call[name].nan_to_num(1.0)
    if page_size is not None:
        pages = torch.arange(3 * (capacity // page_size), dtype=torch.int32, device=device)
        call["page_table"] = pages.view(3, -1)
        for name in ("k_cache", "v_cache"):
            call[name] = torch.randn(len(pages), page_size, 1, 64, device=device).bfloat16()
    call["cache_seqlens"] = integers(capacity - 1, capacity + 100, -5).to(device)
    check_call(call, *run(call))


@pytest.mark.parametrize(
    ("problem", "argument", "values"),
    [
        (
            CacheProblem((3, 4), 1, (2, 2), batch_idx=(1, 0), rows=2),
            "cache_batch_idx",
            integers(-1, 2),
        ),
        (
            CacheProblem((3, 4), 1, (2, 2), page_size=16),
            "page_table",
            integers(-1, 1 << 20).view(2, 1),
        ),
    ],
    ids=["rows", "pages"],
)
def test_tokens_without_a_place_are_dropped(problem, argument, values, device):
    call = changed(make_call(problem, device=device), {argument: values})
    _, _, caches = run(call)
    for name, cache in zip(("k_cache", "v_cache"), caches, strict=True):
        assert torch.equal(as_bits(cache), as_bits(call[name]))


def test_values_on_the_cpu_are_checked_and_used(device):
    problem = CacheProblem((30, 60), 2, (2, 2), batch_idx=(3, 1), rows=5, page_size=16)
    call = make_call(problem, device=device)
    names = ("cache_seqlens", "cache_batch_idx", "page_table")
    on_cpu = {name: call[name].cpu() for name in names}
    assert_same_bits(run(call), run(call | on_cpu))
    before = call["k_cache"].clone()
    too_long = on_cpu | {"cache_seqlens": on_cpu["cache_seqlens"] + 30}
    with pytest.raises(ValueError, match=r"^cache_seqlens must be from 0 to 80"):
        flash_attn_with_kvcache(**(call | too_long))
    assert torch.equal(as_bits(before), as_bits(call["k_cache"]))
    with pytest.raises(ValueError, match=r"^cache_seqlens must be on cuda.* or on the CPU"):
        flash_attn_with_kvcache(**(call | {"cache_seqlens": on_cpu["cache_seqlens"].to("meta")}))


# ------------------------------------------------------------------------- bits, and their peers


def test_rows_of_a_merge_that_many_groups_share(device):
    """16 groups work on each of 2^27 rows: 2^31 pairs. The parts are one and the same."""
    rows, parts = (1 << 27) + 5, 61
    part = torch.randn(1, 1, rows, 1, 8, device=device)
    lses = torch.zeros(1, 1, rows, 1, device=device)
    with poisoned_allocations():
        out, lse = flash_attn_combine(
            part.expand(parts, -1, -1, -1, -1), lses.expand(parts, -1, -1, -1),
            out_dtype=torch.bfloat16,
        )  # fmt: skip
    torch.testing.assert_close(out, part[0].bfloat16(), rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(parts)), rtol=1e-5, atol=0.0)


# ------------------------------------------------------------------- streams, graphs and devices


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("mode", MODES)
def test_a_cuda_graph_goes_on_while_lengths_grow(page_size, mode, device):
    """Captured once; sequences grow to the end of the cache, and begin anew."""
    new = 13
    problem = CacheProblem(
        (0, 1, 300, 600), counts=(new,) * 4, heads_kv=2, group=4, page_size=page_size, room=39,
        head_dim=128, causal=True, rotary=(128, True, "bfloat16"),
    )  # fmt: skip
    call, names = make_call(problem, device=device), ("k_cache", "v_cache")
    if page_size is not None:
        pages = call["page_table"].numel()
        table = torch.randperm(pages, device=device).view(4, -1)
        call["page_table"] = table.to(torch.int32)
        for name in names:
            call[name] = torch.randn(pages, page_size, 2, 128, device=device).bfloat16()
    options = MODES[mode] | {"return_lse": True}
    flash_attn_with_kvcache(**call, **options)
    graph, (out, lse) = captured(lambda: flash_attn_with_kvcache(**call, **options))
    generator, lengths = torch.Generator(device).manual_seed(1), call["cache_seqlens"]
    for step in range(60):
        for name in ("q", "k", "v"):
            call[name].normal_(generator=generator)
        before, eager = (call | {name: call[name].clone() for name in names} for _ in range(2))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        eager_out, eager_lse = flash_attn_with_kvcache(**eager, **options)
        assert torch.equal(out, eager_out) and torch.equal(lse, eager_lse)
        assert all(torch.equal(as_bits(call[name]), as_bits(eager[name])) for name in names)
        if step % 6 == 0:
            check_call(before, out, lse, tuple(call[name] for name in names))
        lengths.copy_((lengths + new).where(lengths + 2 * new <= problem.capacity, 0))


def test_calls_in_a_row_wait_for_each_other(device):
    """Layers one after another, each reading what the one before wrote: PDL must not overtake."""
    problem = CacheProblem((2000, 30, 500), counts=(1, 1, 1), heads_kv=2, group=1, page_size=16)
    call = make_call(problem, device=device)

    def layers(wait):
        caches = {name: call[name].clone() for name in ("k_cache", "v_cache")}
        lengths, outputs, x = call["cache_seqlens"].clone(), [], call["q"]
        for _ in range(30):
            token = x[:, :, :2].contiguous()
            arguments = {"q": x, "k": token, "v": token, "cache_seqlens": lengths.clone()}
            x = flash_attn_with_kvcache(**(call | caches | arguments))
            outputs.append(x)
            if wait:
                torch.cuda.synchronize()
        return torch.stack(outputs), caches

    out, caches = layers(wait=True)
    for _ in range(20):
        same_out, same_caches = layers(wait=False)
        assert torch.equal(out, same_out)
        for name, cache in caches.items():
            assert torch.equal(as_bits(cache), as_bits(same_caches[name]))
