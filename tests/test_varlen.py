"""`flash_attn_varlen_func` on CPU tensors: results, what is left alone, and the errors."""

import functools
import gc
import random
import re
import resource
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kvcache_bad_values import OnGpu
from score_problems import Recipe
from varlen_problems import (
    VarlenProblem,
    check_varlen,
    integers,
    make_call,
)

from fa3 import flash_attn_varlen_func
from fa3.calls import assertions, varlen, varlen_gpu
from fa3.calls.modifiers import UNMODIFIED
from fa3.calls.varlen_call import RaggedCall
from fa3.planning.gpu import H200
from fa3.planning.joined import JoinedPlan
from fa3.planning.short_queries import ShortPlan
from fa3.problem import Window

RAGGED = VarlenProblem((70, 0, 1, 130), (90, 5, 0, 64), heads_kv=2, group=2)
USED = replace(RAGGED, used_q=(70, 9, 0, 100), used_k=(10, -1, 3, 999), spare=5)


# ---------------------------------------------------------------------------------- bad input


def shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """Return a copy that starts `elements` after an aligned address."""
    memory = tensor.new_empty(tensor.numel() + elements)
    return memory[elements:].view(tensor.shape).copy_(tensor)


def widened(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """Return a view into rows that are `columns` longer."""
    return torch.nn.functional.pad(tensor, (0, columns))[..., : tensor.shape[2]]


def one_row(tensor: torch.Tensor) -> torch.Tensor:
    """Return the first row, with a stride that does not matter to it."""
    return tensor[:1].as_strided((1, *tensor.shape[1:]), (3, *tensor.stride()[1:]))


BAD_TENSORS = [
    ("q", lambda x: x[None], ValueError, "must have 3 dimensions (total, heads, head_dim)"),
    ("k", lambda x: x[0], ValueError, "must have 3 dimensions (total, heads, head_dim)"),
    ("v", lambda x: x.tolist(), TypeError, "must be a torch.Tensor, got list"),
    ("q", lambda x: x.float(), TypeError, "must be torch.bfloat16 or torch.float16, got"),
    ("k", lambda x: x.half(), TypeError, "must be torch.bfloat16 like q, got torch.float16"),
    ("v", lambda x: x.to("meta"), ValueError, "must be on cpu like q, got meta"),
    ("q", lambda x: x[:, :3], ValueError, "must have a multiple of k's heads, got 3 query heads"),
    ("v", lambda x: x[:, :1], ValueError, "must have 2 heads like k, got 1"),
    ("v", lambda x: x[:-1], ValueError, "must have 159 rows like k, got 158"),
    ("q", lambda x: x[..., :60], ValueError, "has head_dim 60, supported are multiples of 8"),
    ("v", lambda x: x[..., :60], ValueError, "has head_dim 60, supported are multiples of 8"),
    ("k", lambda x: x[..., :32], ValueError, "must have head_dim 64 like q, got 32"),
    (
        "q",
        lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
        ValueError,
        "must be contiguous in its last dimension, got stride 804",
    ),
    ("k", lambda x: shifted(x, 4), ValueError, "starts 8 bytes after a multiple of 16"),
    ("v", lambda x: widened(x, 4), ValueError, "must have strides that are multiples of 8"),
    ("k", one_row, ValueError, "must have strides that are multiples of 8 elements (16 bytes)"),
    ("cu_seqlens_q", lambda x: x.tolist(), TypeError, "must be a torch.Tensor, got list"),
    ("cu_seqlens_q", lambda x: None, TypeError, "must be a torch.Tensor, got NoneType"),
    ("cu_seqlens_q", lambda x: x.long(), TypeError, "must be torch.int32, got torch.int64"),
    ("cu_seqlens_q", lambda x: x[None], ValueError, "must have shape (batch + 1,), got (1, 5)"),
    ("cu_seqlens_q", lambda x: x[:0], ValueError, "must have shape (batch + 1,), got (0,)"),
    ("cu_seqlens_q", lambda x: x[0], ValueError, "must have shape (batch + 1,), got ()"),
    ("cu_seqlens_q", lambda x: x.to("meta"), ValueError, "must be on cpu like q, got meta"),
    ("cu_seqlens_q", lambda x: torch.stack((x, x), 1)[:, 0], ValueError, "must be contiguous"),
    ("cu_seqlens_k", lambda x: x.long(), TypeError, "must be torch.int32, got torch.int64"),
    ("cu_seqlens_k", lambda x: x[:-1], ValueError, "must have shape (5,) to go with cu_seqlens_q"),
    ("cu_seqlens_k", lambda x: x.to("meta"), ValueError, "must be on cpu like q, got meta"),
    ("seqused_q", lambda x: integers(1, 2, 3), ValueError, "must have shape (4,) to go with"),
    ("seqused_q", lambda x: torch.ones(4), TypeError, "must be torch.int32, got torch.float32"),
    ("seqused_k", lambda x: integers(*range(5)), ValueError, "must have shape (4,) to go with"),
    ("seqused_k", lambda x: integers(*range(8))[::2], ValueError, "must be contiguous in its last"),
    ("seqused_k", lambda x: 3, TypeError, "must be a torch.Tensor, got int"),
    ("alibi_slopes", lambda x: torch.ones(3, 4), ValueError, "must have shape (4,) or (4, 4) to"),
    ("sinks", lambda x: torch.ones(2), ValueError, "must have shape (4,), one for each query head"),
]


@pytest.mark.parametrize(("name", "change", "error", "complaint"), BAD_TENSORS)
def test_bad_tensors(name, change, error, complaint):
    call = make_call(RAGGED)
    with pytest.raises(error, match=f"^{name} {re.escape(complaint)}"):
        flash_attn_varlen_func(**call | {name: change(call.get(name))})


def test_other_devices():
    call = make_call(RAGGED)
    tensors = {
        name: tensor.to("meta") for name, tensor in call.items() if isinstance(tensor, torch.Tensor)
    }
    with pytest.raises(ValueError, match=r"^q must be a CPU or CUDA tensor, got meta"):
        flash_attn_varlen_func(**call | tensors)


BAD_OUTS = [
    (lambda out: out.tolist(), TypeError, "must be a torch.Tensor, got list"),
    (lambda out: out[:-1], ValueError, "must have shape (201, 4, 64) to go with q and the values"),
    (lambda out: out[None], ValueError, "must have 3 dimensions (total, heads, head_dim)"),
    (lambda out: out.half(), TypeError, "must be torch.bfloat16 like q, got torch.float16"),
    (lambda out: out.to("meta"), ValueError, "must be on cpu like q, got meta"),
    (lambda out: shifted(out, 2), ValueError, "starts 4 bytes after a multiple of 16"),
    (lambda out: widened(out, 4), ValueError, "must have strides that are multiples of 8"),
    (lambda out: out[:1].expand(201, -1, -1), ValueError, "must not overlap itself when it is"),
    (lambda out: out.clone().requires_grad_(), ValueError, "requires grad, but would get no"),
]


@pytest.mark.parametrize(("change", "error", "complaint"), BAD_OUTS)
def test_bad_outs(change, error, complaint):
    call = make_call(RAGGED)
    with pytest.raises(error, match=f"^out {re.escape(complaint)}"):
        flash_attn_varlen_func(**call, out=change(torch.empty_like(call["q"])))


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


def test_an_inference_tensor_is_not_written_outside_of_inference_mode():
    call = make_call(RAGGED)
    with torch.inference_mode():
        out = torch.empty_like(call["q"])
    with pytest.raises(ValueError, match=r"^out must not be an inference tensor"):
        flash_attn_varlen_func(**call, out=out)


def test_a_repeated_call_checks_what_may_have_changed():
    call = make_call(RAGGED)
    flash_attn_varlen_func(**call)
    for name, change, complaint in (
        ("k", lambda x: shifted(x, 4), "k starts 8 bytes"),
        ("v", lambda x: widened(x, 4), "v must have strides"),
        ("v", lambda x: x[:-1], "v must have 159 rows"),
        ("cu_seqlens_k", lambda x: x[:-1], "cu_seqlens_k must have shape"),
    ):
        with pytest.raises(ValueError, match=f"^{complaint}"):
            flash_attn_varlen_func(**call | {name: change(call[name])})


HUGE = 2**29 + 1


@pytest.mark.parametrize(
    ("total_q", "total_k", "heads", "complaint"),
    [
        (HUGE, 1, 1, "q must have at most 536870912 rows, got 536870913"),
        (1, HUGE, 1, "k must have at most 536870912 rows, got 536870913"),
        (2**24, 128, 256, "q must have at most 16777216 tiles of 128 rows"),
    ],
)
def test_what_32_bits_do_not_count_is_refused(total_q, total_k, heads, complaint):
    q, k = (torch.zeros(8).bfloat16().expand(total, heads, 8) for total in (total_q, total_k))
    with pytest.raises(ValueError, match=f"^{complaint}"):
        flash_attn_varlen_func(q, k, k, integers(0, 1), integers(0, 1), 1, 1)


PAGED = {"cu_seqlens_k": None, "seqused_k": integers(3, 9, 4), "page_table": integers(0, 1)}


@pytest.mark.parametrize(
    ("changes", "error", "complaint"),
    [
        ({"seqused_k": None}, ValueError, "seqused_k must be given with page_table"),
        ({"cu_seqlens_k": integers(0, 1)}, ValueError, "cu_seqlens_k must be None with page_table"),
        ({"max_seqlen_k": None}, TypeError, "max_seqlen_k must be an integer, got None"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k must be 0 or more, got -1"),
        ({}, ValueError, "k must have 4 dimensions"),
    ],
)
def test_what_does_not_go_with_pages(changes, error, complaint):
    with pytest.raises(error, match=f"^{complaint}"):
        flash_attn_varlen_func(**make_call(RAGGED) | PAGED | changes)


BAD_PAGES = [
    ("k", lambda x: x[..., :32], ValueError, "k must have shape (3, 16, 2, 64) to go with q"),
    ("v", lambda x: x.half(), TypeError, "v must be torch.bfloat16 like q"),
    ("v", lambda x: x[:2], ValueError, "v must have shape (3, 16, 2, 64) to go with k, got"),
    ("q", lambda x: x[:, :3], ValueError, "q must have a multiple of k's heads, got 3 query"),
    ("seqused_k", lambda x: x + 40, ValueError, "seqused_k must be from 0 to 32, what the cache"),
    ("seqused_k", lambda x: x.long(), TypeError, "seqused_k must be torch.int32, got"),
    ("seqused_k", lambda x: x[:1], ValueError, "seqused_k must have shape (2,) to go with q"),
    ("page_table", lambda x: x + 9, ValueError, "page_table must have pages from 0 to 2 where"),
]


@pytest.mark.parametrize(("name", "change", "error", "complaint"), BAD_PAGES)
def test_complaints_about_pages_name_the_arguments_of_this_call(name, change, error, complaint):
    call = {
        "q": torch.zeros(5, 4, 64).bfloat16(), "cu_seqlens_q": integers(0, 3, 5),
        "max_seqlen_q": 3, "max_seqlen_k": 20, "seqused_k": integers(3, 20),
        "cu_seqlens_k": None, "page_table": integers(0, 1, 2, 0).view(2, 2),
    }  # fmt: skip
    call |= {one: torch.zeros(3, 16, 2, 64).bfloat16() for one in "kv"}
    flash_attn_varlen_func(**call)
    with pytest.raises(error, match=f"^{re.escape(complaint)}"):
        flash_attn_varlen_func(**call | {name: change(call[name])})


def test_arguments_that_go_by_two_names():
    call = make_call(RAGGED)
    with_sinks = call | {"sinks": torch.zeros(4)}
    out = flash_attn_varlen_func(**call, s_aux=torch.zeros(4))
    assert torch.equal(out, flash_attn_varlen_func(**with_sinks))
    with pytest.raises(ValueError, match=r"^s_aux must be None with sinks, for which it is"):
        flash_attn_varlen_func(**with_sinks, s_aux=torch.zeros(4))
    call |= {"q": call["q"][:5], **dict.fromkeys("kv", torch.randn(3, 16, 2, 64).bfloat16())}
    call |= {"cu_seqlens_q": integers(0, 3, 5), "cu_seqlens_k": None, "seqused_k": integers(3, 20)}
    table = integers(0, 1, 2, 0).view(2, 2)
    out = flash_attn_varlen_func(**call, block_table=table)
    assert torch.equal(out, flash_attn_varlen_func(**call, page_table=table))
    with pytest.raises(ValueError, match=r"^block_table must be None with page_table, for which"):
        flash_attn_varlen_func(**call, page_table=table, block_table=table)


def test_the_order_of_flash_attention_2_is_told_from_that_of_3():
    positional = list(make_call(RAGGED).values())[:7]
    note = ".*FlashAttention-2's are dropout_p.*by name"
    with pytest.raises(TypeError, match=r"^seqused_q must be a torch.Tensor, got float" + note):
        flash_attn_varlen_func(*positional, 0.0, None, True)
    with pytest.raises(TypeError, match=r"^causal must be a bool, got tuple" + note):
        flash_attn_varlen_func(*positional, 0.0, None, True, (-1, -1))


# -------------------------------------------------------------------------------------- lengths

BAD_LENGTHS = [
    ("cu_seqlens_q", (1, 70, 70, 71, 201), "must begin with 0, got 1"),
    ("cu_seqlens_k", (-1, 90, 95, 95, 159), "must begin with 0, got -1"),
    ("cu_seqlens_q", (0, 70, 60, 71, 201), "must not decrease, got 70 to 60 for sequence 1"),
    ("cu_seqlens_k", (0, 90, 95, 2, 1), "must not decrease, got 95 to 2 for sequence 2"),
    ("cu_seqlens_q", (0, 70, 70, 71, 202), "must end at 201, the rows of q, or less, got 202"),
    ("cu_seqlens_k", (0, 90, 95, 95, 160), "must end at 159, the rows of k, or less, got 160"),
    ("max_seqlen_q", 129, "must be 130 or more, the rows of q that sequence 3 has, got 129"),
    ("max_seqlen_k", 0, "must be 90 or more, the rows of k that sequence 0 has, got 0"),
]


def changed(name: str, value) -> dict:
    """Return a call with another argument; a tuple makes an integer tensor."""
    return make_call(RAGGED) | {name: integers(*value) if isinstance(value, tuple) else value}


def on_gpu(call: dict) -> dict:
    """Return the call with its integer tensors said to be on a GPU."""
    return {
        name: value.as_subclass(OnGpu) if name.startswith(("cu_seq", "seqused")) else value
        for name, value in call.items()
    }


@pytest.mark.parametrize(("name", "value", "complaint"), BAD_LENGTHS)
@pytest.mark.parametrize("is_read_back", [False, True])
def test_bad_lengths(name, value, complaint, is_read_back, monkeypatch):
    call = changed(name, value)
    if is_read_back:
        monkeypatch.setattr(assertions, "ASSERTIONS", True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        call = on_gpu(call)
    out = torch.full((201, 4, 64), 7.0).bfloat16()
    with pytest.raises(ValueError, match=f"^{name} {re.escape(complaint)}"):
        flash_attn_varlen_func(**call, out=out)
    assert (out == 7.0).all()


def test_what_is_not_used_counts_for_no_maximum():
    call = make_call(USED)
    assert (call["max_seqlen_q"], call["max_seqlen_k"]) == (100, 64)
    with pytest.raises(ValueError, match=r"^max_seqlen_q must be 100 or more"):
        flash_attn_varlen_func(**call | {"max_seqlen_q": 99})


def test_maxima_may_be_larger():
    call = make_call(RAGGED)
    larger = {"max_seqlen_q": 1 << 40, "max_seqlen_k": np.int64(1 << 40)}
    out = flash_attn_varlen_func(**call | larger)
    assert torch.equal(out, flash_attn_varlen_func(**call))


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.parametrize(
    ("value", "error", "complaint"),
    [
        (-1, ValueError, "must be 0 or more, got -1"),
        (130.0, TypeError, "must be an integer, got 130.0"),
        (True, TypeError, "must be an integer, got True"),
        (None, TypeError, "must be an integer, got None"),
        (torch.tensor(130), TypeError, "must be an integer, got Tensor"),
    ],
)
def test_maxima_are_plain_integers(name, value, error, complaint):
    with pytest.raises(error, match=f"^{name} {complaint}"):
        flash_attn_varlen_func(**make_call(RAGGED) | {name: value})


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

    def for_queries(self, most, is_beside):
        def start(operands, *given):
            self.short.append((most, is_beside, *operands, *given))
            return lambda: None

        return SimpleNamespace(start=start)


@pytest.fixture
def kernels(monkeypatch):
    """Have calls on CPU tensors launched as if they were on a GPU."""
    kernels, prepare = Launches(), varlen.prepare_varlen
    gpu = varlen_gpu.PackedKernels(kernels, kernels, kernels.for_queries)
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
    integers = (call[name] for name in varlen.INTEGERS_OF_LENGTHS)
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
    ((most, is_beside, q, *_, modifiers, scale, _, longest),) = kernels.short
    assert (most, longest, scale) == (1, 500, 0.125) and q is call["q"] and modifiers[0] is sinks
    assert not is_beside
    assert not kernels.given
    flash_attn_varlen_func(**make_call(mixed))
    ((*_, short, _, _, _, _),) = kernels.given
    table = object()
    short.start(table)
    most, is_beside, *_, of_launch = kernels.short[1]
    assert short.most_queries == most == 32 and is_beside and of_launch is table
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
    for (most, is_beside, q, *_, longest), keys in zip(kernels.short, (5000, 5090), strict=True):
        assert (most, is_beside, longest) == (1024, False, keys) and q is call["q"]
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
    monkeypatch.setattr(varlen_gpu, "prepare", lambda *given: made.append(given))
    device = torch.device("cuda", 0)
    tokens = [(torch.Size(shape), torch.bfloat16, device) for shape in ((4, 64), (2, 64), (2, 32))]
    key = *tokens, True, False, True, (1 << 40, 9), UNMODIFIED.structure, sm_margin
    varlen.prepare_varlen.__wrapped__(*key)
    ((plan, joined, short, window),) = made
    both = ShortPlan.of(plan.spec, 4, 2, True, False, plan.gpu)
    assert short == (None if sm_margin else both)
    assert joined == JoinedPlan.of(plan.spec, True, False, plan.gpu)
    assert window == Window(right=0) and plan.gpu.num_sms == 132 - sm_margin
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
    monkeypatch.setattr(RaggedCall, "attend", lambda *arguments, known, splits: None)
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
