"""`flash_attn_varlen_func`: its arguments, what it launches and what it remembers."""

import functools
import gc
import random
import resource
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from score_problems import Recipe
from test_remembered import operand, packed_operands
from valid_calls import OnGpu
from varlen_problems import VarlenProblem, check_varlen, integers, make_call

from fa3 import flash_attn_varlen_func
from fa3.calls import assertions, packed_calls, varlen
from fa3.calls.options import Options
from fa3.calls.packed_calls import RaggedCall
from fa3.planning.gpu import H200
from fa3.planning.routes import BOTH
from fa3.problem import Window

RAGGED = VarlenProblem((70, 0, 1, 130), (90, 5, 0, 64), heads_kv=2, group=2)
USED = replace(RAGGED, used_q=(70, 9, 0, 100), used_k=(10, -1, 3, 999), spare=5)


# ---------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("name", ["q", "k", "cu_seqlens_k", "seqused_q", "sinks"])
def test_out_must_not_overlap_what_is_read(name):
    problem = VarlenProblem((30, 20), (20, 30), used_q=(9, 9), recipe=Recipe(sinks="float32"))
    call = make_call(problem)
    memory = torch.zeros(6000, dtype=torch.bfloat16)
    read = call[name]
    part = memory[800:].view(read.dtype)[: read.numel()].view(read.shape).copy_(read)
    out = memory[: 50 * 64].view(50, 1, 64)
    with pytest.raises(ValueError, match=f"^out must not overlap {name}: it is written"):
        flash_attn_varlen_func(**call | {name: part}, out=out)


def test_arguments_that_go_by_two_names():
    call = make_call(RAGGED)
    with_sinks = call | {"sinks": torch.zeros(4)}
    out = flash_attn_varlen_func(**call, s_aux=torch.zeros(4))
    assert torch.equal(out, flash_attn_varlen_func(**with_sinks))
    call |= {"q": call["q"][:5], **dict.fromkeys("kv", torch.randn(3, 16, 2, 64).bfloat16())}
    call |= {"cu_seqlens_q": integers(0, 3, 5), "cu_seqlens_k": None, "seqused_k": integers(3, 20)}
    table = integers(0, 1, 2, 0).view(2, 2)
    out = flash_attn_varlen_func(**call, block_table=table)
    assert torch.equal(out, flash_attn_varlen_func(**call, page_table=table))


def test_the_order_of_flash_attention_2_is_told_from_that_of_3():
    positional = list(make_call(RAGGED).values())[:7]
    note = ".*FlashAttention-2's are dropout_p.*by name"
    with pytest.raises(TypeError, match=r"^seqused_q must be a torch.Tensor, got float" + note):
        flash_attn_varlen_func(*positional, 0.0, None, True)
    with pytest.raises(TypeError, match=r"^causal must be a bool, got tuple" + note):
        flash_attn_varlen_func(*positional, 0.0, None, True, (-1, -1))


def on_gpu(call: dict) -> dict:
    """Return the call with its integer tensors said to be on a GPU."""
    return {
        name: value.as_subclass(OnGpu) if name.startswith(("cu_seq", "seqused")) else value
        for name, value in call.items()
    }


def test_maxima_may_be_larger():
    call = make_call(RAGGED)
    larger = {"max_seqlen_q": 1 << 40, "max_seqlen_k": np.int64(1 << 40)}
    out = flash_attn_varlen_func(**call | larger)
    assert torch.equal(out, flash_attn_varlen_func(**call))


def test_assertions_cannot_be_captured(monkeypatch):
    monkeypatch.setattr(assertions, "ASSERTIONS", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    complaint = "^cu_seqlens_q cannot be read back while a CUDA graph is captured"
    with pytest.raises(RuntimeError, match=complaint):
        flash_attn_varlen_func(**on_gpu(make_call(RAGGED)))


# -------------------------------------------------------------------------------- on a GPU


class Launches:
    """Stands for the kernels: notes what they are launched on.

    Fields:
        given: operands and the rest, of both kernels if there are two.
        short: what the decode kernel alone is launched on, and for how many queries at most.
    """

    def __init__(self):
        self.given, self.short = [], []

    def launch(self, operands, *given):
        self.given.append((*operands, *given))

    def for_queries(self, most, overlaps_forward):
        def start(operands, *given):
            self.short.append((most, overlaps_forward, *operands, *given))
            return lambda: None

        return SimpleNamespace(start=start)


@pytest.fixture
def kernels(monkeypatch):
    """Have calls on CPU tensors launched as if they were on a GPU."""
    kernels, prepare = Launches(), varlen.prepare_varlen
    gpu = packed_calls.PackedKernels(kernels, kernels, kernels.for_queries)
    monkeypatch.setattr(varlen, "prepare_varlen", lambda *key: replace(prepare(*key), gpu=gpu))
    return kernels


@pytest.fixture
def launches(kernels):
    """What the kernels are launched on, but for the decode kernel alone."""
    return kernels.given


def test_lengths_on_a_gpu_are_not_read(launches, monkeypatch):
    for name in ("tolist", "item", "__int__", "__bool__"):
        monkeypatch.setattr(OnGpu, name, lambda *_: pytest.fail("was read"))
    call = on_gpu(make_call(USED))
    out, lse = flash_attn_varlen_func(**call, return_lse=True)
    integers = (call[name] for name in varlen.LENGTHS_OF_PACKED)
    sizes = len(call["k"]), 64
    expected = call["q"], call["k"], call["v"], out, lse, *integers, *sizes, None, 0.125
    expected = *expected, None, None, None, None, False
    (given,) = launches
    assert len(given) == len(expected)
    assert all(a is b or a == b for a, b in zip(given, expected, strict=True))


def test_what_is_launched(launches):
    slopes, sinks = torch.ones(4), torch.zeros(4)
    modified = {"alibi_slopes": slopes, "sinks": sinks, "softmax_scale": 0.3, "max_seqlen_k": 999}
    flash_attn_varlen_func(**make_call(RAGGED) | modified)
    *_, lse, _, _, used_q, used_k, _, longest, modifiers, scale = launches[0][:-5]
    assert lse is used_q is used_k is None and launches[0][-5:] == (*(None,) * 4, False)
    assert (longest, scale) == (159, 0.3)
    assert modifiers[0] is slopes and modifiers[1] is sinks


def test_short_sequences_are_the_decode_kernels(kernels):
    """Beside long ones where keys are many; alone where none is long; never with gradients."""
    decoding = VarlenProblem((1,) * 9, (500,) * 9, group=4)
    mixed = VarlenProblem((*(1,) * 9, 200), (*(500,) * 9, 200), group=4)
    sinks = torch.zeros(4)
    call = make_call(decoding) | {"sinks": sinks}
    flash_attn_varlen_func(**call)
    ((most, overlaps_forward, q, *_, modifiers, scale, _, longest),) = kernels.short
    assert (most, longest, scale) == (1, 500, 0.125) and q is call["q"] and modifiers[0] is sinks
    assert not overlaps_forward
    assert not kernels.given
    flash_attn_varlen_func(**make_call(mixed))
    ((*_, short, _, _, _, _),) = kernels.given
    table = object()
    short.start(table)
    most, overlaps_forward, *_, of_launch = kernels.short[1]
    assert short.most_queries == most == 32 and overlaps_forward and of_launch is table
    call = make_call(mixed)
    call["q"].requires_grad_()
    flash_attn_varlen_func(**call)
    assert kernels.given[1][-5] is None and len(kernels.short) == 2


def test_few_tiles_are_the_decode_kernels(kernels):
    """Unless the call says not to split; also long sequences, for which there is one plan."""
    call = make_call(VarlenProblem((300, 5), (5000, 90), heads_kv=1, group=8))
    flash_attn_varlen_func(**call)
    flash_attn_varlen_func(**call | {"max_seqlen_q": 305, "max_seqlen_k": 5090})
    assert not kernels.given
    for (most, overlaps_forward, q, *_, longest), keys in zip(
        kernels.short, (5000, 5090), strict=True
    ):
        assert (most, overlaps_forward, longest) == (1024, False, keys) and q is call["q"]
    flash_attn_varlen_func(**call, num_splits=1)
    ((*_, short, _, _, _, _),) = kernels.given
    assert short.most_queries == 16 and len(kernels.short) == 2


@pytest.mark.parametrize(
    "problem",
    [
        VarlenProblem((), ()),
        VarlenProblem((0, 0), (3, 0)),
        VarlenProblem((20, 0, 4), (0, 0, 0), used_q=(9, 3, 99)),
        VarlenProblem((20, 4), (5, 6), heads_kv=0),
    ],
    ids=str,
)
def test_nothing_is_launched_where_there_is_nothing_to_compute(problem, launches):
    flash_attn_varlen_func(**make_call(problem))
    assert not launches


@pytest.mark.parametrize("sm_margin", [0, 2])
def test_what_is_compiled_does_not_depend_on_lengths(sm_margin, monkeypatch):
    """Where SMs are reserved, no second kernel runs beside the first."""
    made = []
    monkeypatch.setattr(varlen, "gpu_of", lambda device: H200)
    monkeypatch.setattr(packed_calls, "prepare", lambda *given: made.append(given))
    device = torch.device("cuda", 0)
    q, k, v = (operand(1, *sizes, device=device) for sizes in ((4, 64), (2, 64), (2, 32)))
    used = operand(1, dtype=torch.int32, device=device)
    described = packed_operands(q=q, k=k, v=v, seqused_q=used)
    options = Options(Window(1 << 40, 0), sm_margin=sm_margin)
    varlen.prepare_varlen.__wrapped__(described, options)
    ((signature,),) = made
    plan = signature.plan
    assert signature.names == ["forward", "shared tiles", *["decode", BOTH] * (not sm_margin)]
    assert signature.window == Window(right=0) and plan.gpu.num_sms == 132 - sm_margin
    assert (plan.has_used_q, plan.has_used_k) == (True, False)
    assert (plan.spec.head_dim, plan.spec.head_dim_v) == (64, 32)


def caches() -> dict:
    """Return how much each cache of the package remembers."""
    # The collector does not tell what it leaves out.
    gc.unfreeze()
    found_by_name = {
        f"{found.__module__}.{found.__qualname__}": found.cache_info().currsize
        for found in gc.get_objects()
        if type(found) is functools._lru_cache_wrapper and found.__module__.startswith("fa3.")
    }
    gc.freeze()
    return found_by_name


def test_no_length_is_remembered(launches):
    draw = random.Random(0)
    memory = torch.zeros(3, 2000, 2, 64).bfloat16()
    slopes = torch.ones(2)

    def call() -> None:
        seqlens_q, seqlens_k = ([draw.randint(0, 50) for _ in range(9)] for _ in range(2))
        ends_q, ends_k = (
            integers(0, *np.cumsum(seqlens).tolist()) for seqlens in (seqlens_q, seqlens_k)
        )
        num_sequences = draw.randint(1, 9)
        total_q, total_k = sum(seqlens_q) + draw.randint(0, 9), sum(seqlens_k)
        q, (k, v) = memory[0, :total_q], memory[1:, :total_k]
        flash_attn_varlen_func(
            q, k, v, ends_q[: num_sequences + 1], ends_k[: num_sequences + 1], max(seqlens_q),
            max(seqlens_k), causal=True, alibi_slopes=slopes,
            out=torch.empty_like(q) if draw.random() < 0.5 else None,
        )  # fmt: skip
        launches.clear()

    call()
    before = caches()
    for _ in range(2000):
        call()
    assert caches() == before and before["fa3.calls.varlen.prepare_varlen"] > 0


# ---------------------------------------------------------------------------------- signature


def test_arguments_by_position():
    call = make_call(USED)
    positional = [
        *(call[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")),
        *(call[name] for name in ("max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k")),
        0.3, True, None, None, None, None, (20, 0), 0, 5.0, 1, None, False, 0, True,
    ]  # fmt: skip
    out, lse = flash_attn_varlen_func(*positional)
    problem = replace(
        USED, softmax_scale=0.3, causal=True, window=(20, 0), recipe=Recipe(softcap=5.0)
    )
    check_varlen(problem, call | {"softcap": 5.0}, out, lse)


def host_memory() -> tuple[int, int]:
    """Blocks that Python holds, and bytes that all of the process has in memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return sys.getallocatedblocks(), pages * resource.getpagesize()


def check_host_memory(first: tuple[int, int], last: tuple[int, int], calls: int) -> None:
    """Assert that calls left nothing: less than a block in 10 calls, and 64 bytes in each."""
    blocks, size = (after - before for before, after in zip(first, last, strict=True))
    assert blocks < calls // 10
    assert size < 64 * calls


def test_calls_of_ever_new_lengths_keep_no_memory(monkeypatch):
    """48,000 calls, hardly two of which have the same lengths, batch and totals."""
    monkeypatch.setattr(RaggedCall, "attend", lambda *arguments, **options: None)
    q, k = (torch.zeros(300, 2, 8).bfloat16() for _ in range(2))
    ends = torch.arange(301, dtype=torch.int32)
    draw = random.Random(0)

    def sweep() -> tuple[int, int]:
        for _ in range(12_000):
            batch = draw.randint(1, 40)
            total_q, total_k = (draw.randint(batch, 300) for _ in range(2))
            cut = ends[: batch + 1]
            flash_attn_varlen_func(
                q[:total_q], k[:total_k], k[:total_k], cut, cut, draw.randint(1, 10**6),
                draw.randint(1, 10**6),
            )  # fmt: skip
        return host_memory()

    first, *_, last = (sweep() for _ in range(4))
    check_host_memory(first, last, calls=36_000)


@pytest.mark.gpu
def test_calls_of_ever_new_lengths_keep_no_memory_on_a_gpu(device):
    """100,000 calls: neither memory of the GPU nor of the host."""
    draw = random.Random(0)
    q = torch.zeros(4096, 2, 64, dtype=torch.bfloat16, device=device)
    cuts = [torch.randint(0, 4096, (40,), device=device).sort()[0].int() for _ in range(50)]
    for cut in cuts:
        cut[0] = 0

    def sweep() -> tuple[int, tuple[int, int]]:
        for _ in range(20_000):
            batch = draw.randint(1, 39)
            cut, total = draw.choice(cuts)[: batch + 1], draw.randint(1, 4096)
            rows = q[:total]
            longest = draw.randint(1, 4096)
            flash_attn_varlen_func(rows, rows, rows, cut, cut, longest, longest, causal=True)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), host_memory()

    (first, first_on_host), *_, (last, last_on_host) = (sweep() for _ in range(5))
    assert last - first < 1 << 20
    check_host_memory(first_on_host, last_on_host, calls=80_000)
