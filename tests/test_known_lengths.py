"""Lengths that the host knows: tables made on the host, metadata, and calls that use them."""

import copy
import heapq
import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from cuda_graphs import captured
from free_counters import used_counters
from pairs import places
from problems import poisoned_allocations
from score_problems import Recipe
from test_varlen import caches
from torch.fx.experimental.proxy_tensor import make_fx
from valid_calls import OnGpu
from varlen_problems import (
    VarlenProblem,
    check_varlen,
    integers,
    make_call,
    random_problem,
    unused,
)

from fa3 import flash_attn_varlen_func, flash_attn_with_kvcache, get_scheduler_metadata
from fa3.calls import launcher, packed_calls, scheduler_metadata
from fa3.calls.known_lengths import RECENT_LENGTHS, HostSeqlens, seqlens_on_host
from fa3.calls.launcher import PartMemory
from fa3.kernels.forward_launch import ForwardArguments
from fa3.kernels.tile_table import AMOUNTS
from fa3.planning.gpu import H200
from fa3.planning.host_table import TableKind
from fa3.planning.ragged import BITS_OF_AMOUNTS, RaggedPlan, shift_of_work
from fa3.problem import AttentionSpec, Window
from fa3.reference.varlen import RaggedOperands
from fa3.running.counters import Reserve, StreamCounters
from fa3.running.tables import Table
from fa3.schedules.marked import words_of_marks
from fa3.schedules.ragged import CTAS_BESIDE, NUM_RECORDS, RECORD, TABLE_HEADER, TileRecord
from fa3.scores.masks import Band, Sequence

MIXED = VarlenProblem((70, 0, 1, 200, 9), (90, 5, 900, 2000, 700), heads_kv=2, group=2, causal=True)
ON_HOST = {
    f"{name}_cpu": name for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
}


def known(problem: VarlenProblem) -> HostSeqlens:
    """The lengths of a problem."""
    ends = (np.cumsum([0, *seqlens]) for seqlens in (problem.seqlens_q, problem.seqlens_k))
    used = (None if one is None else np.array(one) for one in (problem.used_q, problem.used_k))
    return HostSeqlens.packed(*ends, *used)


def records_of(table: np.ndarray) -> list[TileRecord]:
    words = table[TABLE_HEADER:].reshape(-1, RECORD)[: table[NUM_RECORDS]].tolist()
    return [TileRecord(*record[: len(TileRecord._fields)]) for record in words]


def on_device(problem: VarlenProblem, kind: TableKind, shift: int) -> list[TileRecord]:
    """The records that the kernel would write, if it took sequences in order of their number."""
    sequences = []
    for batch, rows in enumerate(problem.rows):
        if len(rows.q) > kind.short_queries:
            num_tiles = -(-len(rows.q) // kind.tile_m)
            work = max(blocks_of(kind, rows, tile) for tile in (0, num_tiles - 1)) >> shift
            sequences.append((-min(work, AMOUNTS - 1), batch, rows, num_tiles))
    return [
        TileRecord(tile, batch, rows.q.start, len(rows.q), rows.k.start, len(rows.k), num_tiles)
        for _, batch, rows, num_tiles in sorted(sequences, key=lambda one: one[0])
        for tile in reversed(range(num_tiles))
    ]


def blocks_of(kind: TableKind, rows, tile: int) -> int:
    sequence = Sequence(len(rows.q), len(rows.k), kind.window)
    found = kind.band.key_blocks(tile * kind.tile_m, kind.tile_m, kind.tile_n, sequence)
    return found.end - found.begin


def makespan(problem: VarlenProblem, kind: TableKind, records: list[TileRecord]) -> float:
    """The end of the last tile, if each CTA takes the next one when it is done."""
    free = [0.0] * 7
    for record in records:
        blocks = blocks_of(kind, problem.rows[record.batch], record.m_block)
        heapq.heapreplace(free, free[0] + blocks + 1.5)
    return max(free)


# ------------------------------------------------------------------------------------- calls


def metadata_of(call: dict, **options):
    """Metadata of a call on packed keys."""
    _, heads_q, head_dim = call["q"].shape
    _, heads_kv, head_dim_v = call["v"].shape
    given = {
        "qkv_dtype": call["q"].dtype,
        "headdim_v": head_dim_v,
        "cu_seqlens_q": call["cu_seqlens_q"],
        "cu_seqlens_k": call["cu_seqlens_k"],
        "seqused_q": call.get("seqused_q"),
        "causal": call["causal"],
        "window_size": call["window_size"],
        "has_softcap": bool(call["softcap"]),
    }
    longest = max(1, call["max_seqlen_q"]), call["max_seqlen_k"]
    sizes = len(call["cu_seqlens_q"]) - 1, *longest, heads_q, heads_kv, head_dim
    return get_scheduler_metadata(*sizes, call.get("seqused_k"), **given | options)


def on_host(call: dict) -> dict:
    """The lengths of a call once more."""
    return {name: call[other] for name, other in ON_HOST.items() if call.get(other) is not None}


def cached_call(lengths_q, lengths_k, page_size: int = 16, where="cpu") -> dict:
    """A call on pages."""
    torch.manual_seed(0)
    pages = -(-max(lengths_k) // page_size)
    table = torch.randperm(len(lengths_k) * pages).view(len(lengths_k), pages).int()
    caches = torch.randn(2, table.numel(), page_size, 2, 64).bfloat16()
    call = {
        "q": torch.randn(sum(lengths_q), 4, 64).bfloat16(),
        "k_cache": caches[0], "v_cache": caches[1], "page_table": table, "causal": True,
        "cache_seqlens": integers(*lengths_k), "max_seqlen_q": max(lengths_q),
        "cu_seqlens_q": integers(0, *np.cumsum(lengths_q).tolist()),
    }  # fmt: skip
    return {k: v.to(where) if isinstance(v, torch.Tensor) else v for k, v in call.items()}


def metadata_of_cache(call: dict, **options):
    sizes = len(call["cache_seqlens"]), call["max_seqlen_q"], 1 << 12, 4, 2, 64
    given = {"cu_seqlens_q": call["cu_seqlens_q"], "page_size": 16, "causal": True}
    return get_scheduler_metadata(*sizes, call["cache_seqlens"], **given | options)


# ------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("seed", range(96))
def test_the_table_is_that_of_the_kernel(seed):
    problem = random_problem(seed, "bfloat16", seed, longest=(40, 700, 3000)[seed % 3])
    window = Window(problem.window[0], 0 if problem.causal else problem.window[1])
    window = window.tighten(1 << 29, 1 << 29)
    short = (0, 1, 32)[seed % 3]
    kind = TableKind(128, 96, Band.of(window), window, short, problem.group, 132)
    table = known(problem).make(kind)
    assert table.dtype == np.int32 and table[0] == table[1] == 0
    found = records_of(table)
    assert found == on_device(problem, kind, 0)
    # Where the kernel cannot tell all amounts of work apart.
    coarse = on_device(problem, kind, 3)
    assert sorted(found) == sorted(coarse)
    assert makespan(problem, kind, found) <= makespan(problem, kind, coarse)
    has_short = any(0 < len(rows.q) <= short for rows in problem.rows)
    assert (0 < table[CTAS_BESIDE] <= 132) == has_short


def test_decode_gets_a_share_of_the_ctas_for_its_share_of_the_work():
    kind = TableKind(128, 112, Band(right=True), Window(right=0), 32, 4, 132)
    counts = []
    for decoding in (0, 8, 16, 64, 4096):
        lengths_q, lengths_k = (512,) * 7 + (1,) * decoding, (4096,) * (7 + decoding)
        table = known(VarlenProblem(lengths_q, lengths_k)).make(kind)
        counts.append(int(table[CTAS_BESIDE]))
    assert counts[0] == 0 and counts[-1] == 132 and counts == sorted(counts)
    assert 0 < counts[1] < counts[2] < 66


def test_longest_first_where_the_kernel_tells_no_difference():
    lengths = (1 << 20, *range(96 * AMOUNTS, 96 * AMOUNTS + 900, 96))
    assert shift_of_work(1 << 20, 96) == (-(-(1 << 20) // 96)).bit_length() - BITS_OF_AMOUNTS > 0
    kind = TableKind(128, 96, Band(), Window(), 0, 1, 132)
    table = known(VarlenProblem((1,) * len(lengths), lengths)).make(kind)
    assert [one.seqlen_k for one in records_of(table)] == sorted(lengths, reverse=True)


# ------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("is_of_call", [False, True])
@pytest.mark.parametrize("side", ["q", "k"])
def test_rows_that_are_used_are_said_to_both_or_none(side, is_of_call):
    """A call sees that also where it does not see how many."""
    used = replace(MIXED, **{f"used_{side}": getattr(MIXED, f"seqlens_{side}")})
    problems = (MIXED, used)[:: 1 if is_of_call else -1]
    of_metadata, call = map(make_call, problems)
    names = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"
    call |= {name: call[name].as_subclass(OnGpu) for name in names if name in call}
    made, came = ("None", "it")[:: 1 if is_of_call else -1]
    complaint = f"scheduler_metadata was made for seqused_{side} {made}, the call has {came}"
    with pytest.raises(ValueError, match=f"^{complaint}$"):
        flash_attn_varlen_func(**call, scheduler_metadata=metadata_of(of_metadata))


@pytest.mark.parametrize("name", ["scheduler_metadata", "cu_seqlens_q_cpu"])
def test_graphs_have_none_of_it(name):
    call = make_call(MIXED)
    given = {"scheduler_metadata": metadata_of(call)} | on_host(call)

    def attend(q):
        return flash_attn_varlen_func(**call | {"q": q, name: given[name]})

    with pytest.raises(NotImplementedError, match=f"^{name} must be None while a graph is traced"):
        make_fx(attend)(call["q"])


# ------------------------------------------------------------------------------ what is kept


@pytest.mark.parametrize("softcap", [0.0, 30.0, 50.0])
def test_calls_walk_the_table_that_metadata_has(softcap, monkeypatch):
    """Also if they have a softcap, of which metadata does not know the size."""
    kinds, make = [], HostSeqlens.make
    monkeypatch.setattr(scheduler_metadata, "gpu_of_calls", lambda _: H200)
    monkeypatch.setattr(scheduler_metadata, "upload", lambda _, kind: kinds.append(kind))
    call = make_call(VarlenProblem((300,), (900,), causal=True, recipe=Recipe(softcap)))
    metadata = metadata_of(call)
    monkeypatch.setattr(
        HostSeqlens, "make", lambda known, kind: kinds.append(kind) or make(known, kind)
    )
    flash_attn_varlen_func(**call, scheduler_metadata=metadata)
    of_metadata, of_call = kinds
    assert of_metadata.cutting is not None and of_metadata == of_call


def test_lengths_on_a_gpu_decide_nothing():
    call = make_call(MIXED)
    call |= {name: call[name].as_subclass(OnGpu) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    assert metadata_of(call).lengths is None
    cached = cached_call((40, 1), (300, 90))
    cached["cu_seqlens_q"] = cached["cu_seqlens_q"].as_subclass(OnGpu)
    assert metadata_of_cache(cached).lengths is None


def test_recent_lengths_are_kept_and_no_others():
    names = tuple(ON_HOST)
    ends, others = integers(0, 3, 9), integers(0, 4, 9)
    first = seqlens_on_host(names, (ends, ends, None, None), 2, False)
    assert seqlens_on_host(names, (ends.clone(), ends, None, None), 2, False) is first
    cut = seqlens_on_host(names, (ends, ends, None, None), 2, True)
    assert cut is not first and cut.may_cut and not first.may_cut
    first = seqlens_on_host(names, (ends, ends, None, None), 2, False)
    ends[1] = 4
    assert seqlens_on_host(names, (ends, others, None, None), 2, False) is not first
    assert first.queries.cu.tolist() == [0, 3, 9]


def test_no_length_is_remembered():
    draw = random.Random(0)

    def call(use_metadata: bool) -> None:
        lengths = tuple(draw.randint(1, 200) for _ in range(3))
        made = make_call(VarlenProblem(lengths, lengths, head_dim=8, causal=True))
        made |= {"max_seqlen_q": 200, "max_seqlen_k": 200}
        given = {"scheduler_metadata": metadata_of(made)} if use_metadata else on_host(made)
        flash_attn_varlen_func(**made, **given)

    def sizes() -> dict:
        # The reference plans each sequence by itself.
        return {name: size for name, size in caches().items() if name.startswith("fa3.calls.")}

    for use_metadata in (*[False] * (RECENT_LENGTHS + 1), True):
        call(use_metadata)
    before = sizes()
    for turn in range(20):
        call(turn % 2 == 0)
    assert sizes() == before


# ------------------------------------------------------------------------------------ launches


class Kernel:
    """Stands for a kernel, and notes what it is launched on."""

    def __init__(self):
        self.given = []

    def __call__(self, *given):
        self.given.append(given)


@pytest.fixture
def launches(monkeypatch):
    """Kernels of a plan, launched on CPU tensors; streams and captures are what a test says."""
    plan = RaggedPlan(AttentionSpec("bfloat16", 64, 64, Band(right=True)), False, False, H200)
    monkeypatch.setattr(packed_calls, "load_kernel", lambda kernel: Kernel())
    kernels = packed_calls.prepare_alone(plan, Window(right=0))
    state = {"stream": 7, "capture": None, "streams": {}}
    monkeypatch.setattr(launcher, "current_device", lambda: None)
    monkeypatch.setattr(launcher, "current_stream", lambda index: state["stream"])
    monkeypatch.setattr(launcher, "capture_of", lambda stream: state["capture"])

    def counters_of(device, stream, capture):
        return state["streams"].setdefault((stream, capture), StreamCounters(device, Reserve()))

    monkeypatch.setattr(launcher, "counters_of", counters_of)
    monkeypatch.setattr(
        Table, "upload", classmethod(lambda cls, table, device: cls(torch.tensor(table)))
    )
    monkeypatch.setattr(Table, "on", lambda table, stream, capture: table.numbers)
    return kernels, state


def launch(kernels, lengths: HostSeqlens | None, problem=MIXED, may_cut: bool = False) -> tuple:
    """Launch a call; what the forward kernel got for its counters, marks and table."""
    call = make_call(problem)
    ends = call["cu_seqlens_q"], call["cu_seqlens_k"]
    operands = RaggedOperands(*(call[name] for name in "qkv"), call["q"], None, *ends, None, None)
    forward, count = (
        kernels.split()[0] if may_cut else kernels.launches[0],
        len(kernels.launches[0].kernel.given),
    )
    kernels.launch(operands, len(call["k"]), 2000, None, 1.0, known=lengths, may_cut=may_cut)
    assert not may_cut or len(kernels.launches[0].kernel.given) == count
    given = ForwardArguments(*forward.kernel.given[-1])
    taken, marks, table = given.schedule_state, given.marks, given.table
    return taken, marks, table


def test_a_table_that_is_known_is_not_made_again(launches):
    kernels, state = launches
    lengths = known(MIXED)
    taken, marks, table = launch(kernels, lengths)
    assert not kernels.tile_table.kernel.given
    assert records_of(table.numpy())[0].seqlen_k == 2000
    assert taken is not marks and taken is not table
    heads, records = 4, int(table[NUM_RECORDS])
    assert len(marks) >= words_of_marks(records * heads)
    launched = ForwardArguments(*kernels.launches[0].kernel.given[0])
    assert launched.num_clusters == min(132, records * heads)
    again = launch(kernels, lengths)
    assert again[2] is table
    # Counters are the stream's, each for the same purpose.
    assert again[0] is taken and again[1] is marks
    state["stream"] = 8
    other = launch(kernels, lengths)
    assert other[2] is table and other[0] is not taken and other[1] is not marks
    taken, _, table = launch(kernels, None)
    assert taken is table and len(kernels.tile_table.kernel.given) == 1


def test_tiles_that_are_cut(launches):
    """Their segments and the memory of their parts are the kernel's; counters go back."""
    kernels, _ = launches
    problem = VarlenProblem((300, 100), (9000, 9000), heads_kv=2, group=2, causal=True)
    lengths = known(problem)
    state, marks, table = launch(kernels, lengths, problem, may_cut=True)
    given = ForwardArguments(*kernels.split()[0].kernel.given[0])
    tiles = lengths.latest[-1]
    assert state is tiles.segments.numbers and table is tiles.table.numbers
    assert 0 < given.num_clusters <= 132 and given.num_slots > given.num_clusters // 2
    memory = PartMemory.of(given.num_slots, kernels.plan.config.tile_m, 64)
    assert tiles.memory == memory and len(given.part_buffer) == memory.numbers
    assert len(given.part_counters) >= memory.num_counters
    assert given.part_counters is not marks
    launch(kernels, lengths, problem, may_cut=True)
    again = ForwardArguments(*kernels.split()[0].kernel.given[1])
    assert again.part_counters is given.part_counters and again.marks is marks
    # As calls that want gradients have them.
    whole = launch(kernels, lengths, problem)
    assert whole[2] is not table and torch.equal(whole[2], table)


def test_captures_take_tables_that_there_are(launches):
    kernels, state = launches
    lengths = known(MIXED)
    state["capture"] = "first"
    taken, _, table = launch(kernels, lengths)
    assert taken is table and len(kernels.tile_table.kernel.given) == 1
    state["capture"] = None
    made = launch(kernels, lengths)[2]
    state["capture"] = "second"
    taken, _, table = launch(kernels, lengths)
    assert table is made and taken is not table and len(kernels.tile_table.kernel.given) == 1


def test_kernels_without_work_are_not_launched(launches):
    kernels, _ = launches
    started = []

    def start(table):
        started.append(table)
        return lambda: started.append("merged")

    problem = VarlenProblem((1, 2, 1), (500, 600, 0))
    call = make_call(problem)
    ends = call["cu_seqlens_q"], call["cu_seqlens_k"]
    operands = RaggedOperands(*(call[name] for name in "qkv"), call["q"], None, *ends, None, None)
    short = packed_calls.DecodeLaunch(32, start)
    kernels.launch(operands, 1100, 600, None, 1.0, short, known=known(problem))
    assert not (
        kernels.launches[0].kernel.given
        or kernels.launches[1].kernel.given
        or kernels.tile_table.kernel.given
    )
    assert started[0][CTAS_BESIDE] == 132 and started[1] == "merged"


# ------------------------------------------------------------------------------------- results


class OfThisProcess:
    """Stands for a kernel that was loaded, which nobody can copy."""

    def __reduce_ex__(self, protocol: int):
        raise TypeError("cannot be pickled")


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda metadata: pickle.loads(pickle.dumps(metadata)),
}


@pytest.mark.parametrize("way", COPIES)
def test_copies_have_the_lengths_and_no_kernels(way):
    call = make_call(MIXED)
    metadata = metadata_of(call)
    expected = flash_attn_varlen_func(**call, scheduler_metadata=metadata)
    lengths = metadata.lengths
    metadata.fitting = OfThisProcess()
    lengths.latest = OfThisProcess(), 0, True, None
    lengths.route = OfThisProcess(), False, None
    lengths.tables = {(OfThisProcess(), None): None}
    found = COPIES[way](metadata)
    assert found.fitting is None and found.calls == metadata.calls
    if way != "copy":
        assert found.lengths is not lengths and not found.lengths.tables
        assert torch.equal(flash_attn_varlen_func(**call, scheduler_metadata=found), expected)


def test_metadata_of_equal_queries_can_be_copied():
    metadata = get_scheduler_metadata(2, 1, 64, 4, 2, 64, integers(3, 64))
    for way in COPIES.values():
        assert way(metadata) == metadata


FAMILIES = 14
"""Sets of options that change the generated code; the dtypes take turns."""

SKEWED = VarlenProblem(
    (700, 5, 0, 1300, 130, 64), (700, 900, 3, 1300, 4000, 64), heads_kv=2, group=2, causal=True,
    head_dim=128,
)  # fmt: skip

CHUNK = VarlenProblem((500,), (9000,), group=8, causal=True, head_dim=128)
"""Has few tiles, which metadata cuts."""


def on_cpu(call: dict) -> dict:
    """The call with its lengths on the CPU, as metadata wants them."""
    return {
        name: value.cpu().clamp(min=0)
        if name.startswith(("cu_seq", "seqused", "cache_seq"))
        else value
        for name, value in call.items()
    }


def made_for(call: dict, **options):
    return metadata_of(on_cpu(call), **options)


def run(call: dict, **given):
    """Call into NaN memory."""
    with poisoned_allocations():
        return flash_attn_varlen_func(**call, **given, return_lse=True)


def check_same(problem: VarlenProblem, where, seed: int = 0, **options) -> None:
    """Assert that calls of three layers with metadata, and one with lengths, have a call's bits."""
    call = make_call(problem, seed, where)
    out, lse = run(call)
    rows, metadata = ~unused(problem, len(out), where), made_for(call, **options)
    for given in (*[{"scheduler_metadata": metadata}] * 3, on_host(on_cpu(call))):
        again, of_again = run(call, **given)
        assert torch.equal(again[rows], out[rows])
        assert torch.equal(of_again[:, rows], lse[:, rows])
    assert not used_counters()


@places(
    "seed,family,longest",
    cpu=[(seed, seed // 2, 150) for seed in range(60)],
    gpu=[(seed, seed % FAMILIES, 40 if seed % 3 else 700) for seed in range(2 * FAMILIES)],
)
def test_calls_have_the_bits_of_calls_without(seed, family, longest, where):
    problem = random_problem(seed, ("bfloat16", "float16")[seed % 2], family, longest)
    # By rows of no sequence, the plain call may take other kernels.
    options = {} if where == "cpu" else {"num_splits": 1}
    check_same(replace(problem, spare=0), where, seed, **options)


def test_decode_rows_beside_long_ones():
    check_same(MIXED, "cpu")


@places(
    "problem",
    cpu=[replace(MIXED, seqlens_k=MIXED.seqlens_q)],
    gpu=[replace(SKEWED, seqlens_k=SKEWED.seqlens_q)],
)
def test_gradients(problem, where):
    gradients = []
    for given in ({}, made_for, lambda call: on_host(on_cpu(call))):
        call = make_call(problem, 0, where)
        if given is made_for:
            given = {"scheduler_metadata": made_for(call)}
        elif given:
            given = given(call)
        leaves = [call[name].requires_grad_() for name in "qkv"]
        out = flash_attn_varlen_func(**call, **given, deterministic=True)
        gradients.append(torch.autograd.grad(out.float().square().sum(), leaves))
    for found in gradients[1:]:
        assert all(map(torch.equal, gradients[0], found))


@pytest.mark.parametrize(
    "lengths_q", [(100, 1, 40, 1), (100, 90, 80, 70), (3, 1, 1, 2)], ids=["mixed", "long", "short"]
)
@pytest.mark.parametrize("page_size", [16, 64])
def test_calls_on_pages(lengths_q, page_size, where):
    call = cached_call(lengths_q, (300, 90, 80, 500), page_size, where)
    call["max_seqlen_q"] = 128
    metadata = metadata_of_cache(on_cpu(call), page_size=page_size)
    assert metadata.lengths.tables or where == "cpu"
    out = flash_attn_with_kvcache(**call)
    for _ in range(3):
        assert torch.equal(out, flash_attn_with_kvcache(**call, scheduler_metadata=metadata))
    assert len(metadata.lengths.tables) == (where != "cpu") and not used_counters()
    packed = {name: call[name] for name in ("q", "page_table", "causal", "max_seqlen_q")}
    packed |= {"k": call["k_cache"], "v": call["v_cache"], "seqused_k": call["cache_seqlens"]}
    packed |= {"cu_seqlens_q": call["cu_seqlens_q"], "cu_seqlens_k": None, "max_seqlen_k": 500}
    assert torch.equal(out, flash_attn_varlen_func(**packed, scheduler_metadata=metadata))


def test_new_tokens_count():
    call = cached_call((40, 1), (300, 90))
    room = integers(200, 80)
    new = {"k": torch.randn(2, 5, 2, 64).bfloat16(), "v": torch.randn(2, 5, 2, 64).bfloat16()}
    call |= {"cache_seqlens": room, **new}
    metadata = metadata_of_cache(call, max_seqlen_k_new=5)
    assert metadata.lengths.longest_k == 205
    out = flash_attn_with_kvcache(**call)
    assert torch.equal(out, flash_attn_with_kvcache(**call, scheduler_metadata=metadata))
    wrong = metadata_of_cache(call, max_seqlen_k_new=4)
    with pytest.raises(
        ValueError, match=r"^scheduler_metadata was made for cache_seqlens with 204"
    ):
        flash_attn_with_kvcache(**call, scheduler_metadata=wrong)


@pytest.mark.parametrize("problem", [SKEWED, CHUNK], ids=["skewed", "chunk"])
def test_rows_whose_reference_fails_are_computed_again(problem, device):
    """Tiles are whole, and cut."""
    call = make_call(problem, 0, device)
    call["q"][::3] *= 40
    metadata = made_for(call)
    for _ in range(3):
        out, lse = run(call, scheduler_metadata=metadata)
        check_varlen(problem, call, out, lse)
    assert not used_counters()


def test_two_streams_at_once(device):
    call = make_call(SKEWED, 0, device)
    expected = run(call)
    metadata = made_for(call)
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream(device) for _ in range(3)], []
    for turn in range(60):
        with torch.cuda.stream(streams[turn % 3]):
            found.append(
                flash_attn_varlen_func(**call, scheduler_metadata=metadata, return_lse=True)
            )
    torch.cuda.synchronize()
    for pair in found:
        assert all(map(torch.equal, pair, expected))
    assert not used_counters()


def test_captured_graphs(device):
    """Two graphs of three layers share a table, replayed beside each other and plain calls."""
    call = make_call(SKEWED, 0, device)
    expected, _ = run(call)
    metadata = made_for(call)
    run(call, scheduler_metadata=metadata)
    given, graphs, outs = call | {"scheduler_metadata": metadata}, [], []
    for _ in range(2):
        graph, results = captured(lambda: [flash_attn_varlen_func(**given) for _ in range(3)])
        graphs.append(graph)
        outs += results
    # The graphs keep their table.
    given.clear()
    del metadata
    streams = [torch.cuda.Stream(device) for _ in graphs]
    for _ in range(20):
        for out in outs:
            out.fill_(7.0)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        plain = flash_attn_varlen_func(**call)
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in (*outs, plain))


def test_a_graph_that_is_captured_before_there_is_a_table_makes_its_own(device):
    call = make_call(SKEWED, 0, device)
    expected, _ = run(call)
    lengths = on_host(on_cpu(call))
    graph, out = captured(lambda: flash_attn_varlen_func(**call, **lengths))
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("seed", range(4))
def test_other_lengths_than_planned_touch_nothing_outside(seed, device):
    """Undefined what they give, but it lies in out."""
    call = make_call(SKEWED, 0, device)
    metadata, draw = made_for(call), random.Random(seed)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        total = int(call[name][-1])
        cuts = sorted(draw.randint(-9, 2 * total) for _ in range(len(call[name]) - 1))
        call[name] = integers(0, *cuts, device=device)
    rows = len(call["q"])
    around = torch.full((3 * rows, *call["q"].shape[1:]), 7.0, device=device).bfloat16()
    flash_attn_varlen_func(**call, out=around[rows : 2 * rows], scheduler_metadata=metadata)
    torch.cuda.synchronize()
    assert (around[:rows] == 7).all() and (around[2 * rows :] == 7).all()
    assert not used_counters()


def test_metadata_of_ever_new_lengths_keeps_no_memory(device):
    draw = random.Random(0)

    def sweep(turns: int) -> int:
        for _ in range(turns):
            lengths = tuple(draw.randint(1, 400) for _ in range(9))
            problem = VarlenProblem(lengths, lengths, causal=True)
            call = make_call(problem, 0, device) | {"max_seqlen_q": 400, "max_seqlen_k": 400}
            flash_attn_varlen_func(**call, scheduler_metadata=made_for(call))
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    sizes = [sweep(100) for _ in range(4)]
    assert sizes[-1] - sizes[0] < 1 << 20
