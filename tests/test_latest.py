"""Calls like the one before: found again, and nothing passes that would be refused otherwise."""

import gc
import re
import tracemalloc
import weakref
from functools import partial
from threading import Thread

import pytest
import torch
from torch.autograd import forward_ad

import fa3
from fa3.calls import attention, combine
from fa3.calls.call import AttentionCall
from fa3.calls.latest import UNKNOWN, FastPath
from fa3.calls.operands import Operand
from fa3.calls.options import LATEST, PACKED, remembered_options
from fa3.calls.prepare import prepare_call
from fa3.problem import REMEMBERED

LENGTHS = torch.tensor([5, 9], dtype=torch.int32)


def cache_call(**changes) -> dict:
    """Return a call on a cache; its tensors are different objects."""
    q, k, v = (torch.randn(2, n, 2, 16).bfloat16() for n in (1, 12, 12))
    return {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": LENGTHS.clone()} | changes


def packed_call(rows: int = 9, batch: int = 2, **changes) -> dict:
    """Return a call on packed sequences."""
    q, k, v = (torch.randn(rows, 2, 16).bfloat16() for _ in range(3))
    ends_q, ends_k = (torch.linspace(0, rows, batch + 1).int() for _ in range(2))
    call = {"q": q, "k": k, "v": v, "cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k}
    return call | {"max_seqlen_q": rows, "max_seqlen_k": rows} | changes


CALLS = {
    "cache": (fa3.flash_attn_with_kvcache, cache_call),
    "packed": (fa3.flash_attn_varlen_func, packed_call),
}


@pytest.fixture(params=CALLS)
def kind(request):
    """A function, and what makes a call of it; such calls have been made before."""
    function, make = CALLS[request.param]
    for _ in range(3):
        function(**make())
    return function, make


@pytest.fixture
def stop_describing(monkeypatch):
    """What makes every call fail from then on that describes its tensors."""

    refuse = partial(pytest.fail, "was described")
    return lambda: monkeypatch.setattr(attention, "describe_tensors", lambda *_: refuse())


def test_a_call_like_the_one_before_is_not_described(kind, stop_describing):
    function, make = kind
    stop_describing()
    function(**make())


def test_packed_sequences_may_have_any_lengths(stop_describing):
    calls = [packed_call(*sizes) for sizes in ((1, 1), (30, 7), (9, 2), (4, 2))]
    expected = [fa3.flash_attn_varlen_func(**call) for call in calls]
    stop_describing()
    for call, out in zip(calls, expected, strict=True):
        assert torch.equal(fa3.flash_attn_varlen_func(**call), out)


def of_each_sequence(batch: int) -> dict:
    """Tensors of packed calls that have a row for each sequence."""
    used = torch.full((batch,), 3, dtype=torch.int32)
    return {"seqused_q": used, "seqused_k": used.clone(), "alibi_slopes": torch.ones(batch, 2)}


@pytest.mark.parametrize("is_fp8", [False, True])
def test_calls_on_any_number_of_sequences_are_prepared_once(is_fp8):
    prepare_call.cache_clear()
    for batch in range(40):
        call = packed_call(5 * batch, batch, **of_each_sequence(batch))
        if is_fp8:
            codes = {n: torch.zeros(5 * batch, 2, 32).to(torch.float8_e4m3fn) for n in "qkv"}
            call |= codes | {"k_descale": torch.ones(batch, 2)}
        fa3.flash_attn_varlen_func(**call)
    assert prepare_call.cache_info().currsize == 1


@pytest.mark.parametrize("remembered", [2, 5])
@pytest.mark.parametrize(
    "name", ["cu_seqlens_k", "seqused_q", "seqused_k", "alibi_slopes", "q_descale"]
)
def test_numbers_of_sequences_are_compared_in_every_call(remembered, name):
    def call(batch: int) -> dict:
        codes = {n: torch.zeros(20, 2, 32).to(torch.float8_e4m3fn) for n in "qkv"}
        descale = {"q_descale": torch.ones(batch, 2)}
        return packed_call(20, batch, **of_each_sequence(batch), **codes, **descale)

    for _ in range(3):
        fa3.flash_attn_varlen_func(**call(remembered))
    for batch, other in ((5, 2), (2, 5), (5, 3), (3, 0)):
        wrong = call(batch) | {name: call(other)[name]}
        shape = tuple(call(batch)[name].shape)
        got = tuple(wrong[name].shape)
        message = f"^{name} must have shape .*{re.escape(str(shape))} to .*{re.escape(str(got))}"
        with pytest.raises(ValueError, match=message):
            fa3.flash_attn_varlen_func(**wrong)


def test_outputs_are_compared_with_all_lengths():
    memory = torch.zeros(4096, dtype=torch.uint8)
    out = memory[:640].view(torch.bfloat16).view(10, 2, 16)
    for batch in (1, 1, 1, 1, 9):
        # They end before out does, or begin after it.
        fa3.flash_attn_varlen_func(**packed_call(10, batch, out=out))
    ends = memory[640 - 8 * 4 :][: 4 * 10].view(torch.int32)
    ends.copy_(torch.arange(1, 11))
    with pytest.raises(ValueError, match=r"^out must not overlap cu_seqlens_k"):
        fa3.flash_attn_varlen_func(**packed_call(10, 9, out=out, cu_seqlens_k=ends))
    before = torch.zeros(4096, dtype=torch.uint8)
    ends = before[: 4 * 10].view(torch.int32)
    out = before[32 : 32 + 640].view(torch.bfloat16).view(10, 2, 16)
    with pytest.raises(ValueError, match=r"^out must not overlap cu_seqlens_k"):
        fa3.flash_attn_varlen_func(**packed_call(10, 9, out=out, cu_seqlens_k=ends))
    fa3.flash_attn_varlen_func(**packed_call(10, 7, out=out, cu_seqlens_k=ends[:8]))


def test_a_tensor_that_requires_grad_is_refused():
    sinks = torch.nn.Parameter(torch.zeros(2))
    with torch.no_grad():
        for _ in range(3):
            fa3.flash_attn_with_kvcache(**cache_call(sinks=sinks))
    with pytest.raises(ValueError, match=r"^sinks requires grad"):
        fa3.flash_attn_with_kvcache(**cache_call(sinks=sinks))


def test_a_tangent_is_refused(kind):
    function, make = kind
    call = make()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(call["q"], torch.ones_like(call["q"]))
        with pytest.raises(NotImplementedError, match=r"^q carries a forward-mode tangent"):
            function(**call | {"q": dual})


def test_dropout_is_that_of_the_call_whatever_was_before(stop_describing):
    call, state = packed_call(), torch.tensor([7])
    dropped = {"dropout_p": 0.5, "rng_state": state}
    plain, expected = (fa3.flash_attn_varlen_func(**call, **options) for options in ({}, dropped))
    assert not torch.equal(plain, expected)
    for is_dropped in (False, False, False, True, True, False, True, True, True):
        found = fa3.flash_attn_varlen_func(**call, **dropped if is_dropped else {})
        assert torch.equal(found, expected if is_dropped else plain)
    other = fa3.flash_attn_varlen_func(**call, dropout_p=0.9, rng_state=state)
    assert not torch.equal(other, expected)
    stop_describing()
    assert torch.equal(fa3.flash_attn_varlen_func(**call, **dropped), expected)


def test_the_same_tensor_twice_is_no_other_call():
    k = torch.randn(2, 12, 2, 16).bfloat16()
    for _ in range(3):
        fa3.flash_attn_with_kvcache(**cache_call(k_cache=k, v_cache=k))
    call = cache_call(k_cache=k)
    found = fa3.flash_attn_with_kvcache(**call)
    remembered_options.cache_clear()
    LATEST.clear()
    assert torch.equal(found, fa3.flash_attn_with_kvcache(**call))
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    for _ in range(3):
        fa3.flash_attn_varlen_func(**packed_call(cu_seqlens_q=ends, cu_seqlens_k=ends))
    with pytest.raises(ValueError, match=r"^cu_seqlens_k must end at 9, the rows of k"):
        fa3.flash_attn_varlen_func(**packed_call(cu_seqlens_q=ends, cu_seqlens_k=2 * ends))


def test_overlaps_are_found_in_every_call():
    memory = torch.randn(2, 13, 2, 16).bfloat16()
    k, v = memory[:, :12], torch.randn(2, 12, 2, 16).bfloat16()
    others = {"k_cache": k, "v_cache": v, "v": torch.randn(2, 1, 2, 16).bfloat16()}
    for _ in range(3):
        fa3.flash_attn_with_kvcache(**cache_call(**others, k=memory[:, 12:]))
    with pytest.raises(ValueError, match=r"^k_cache must not overlap k"):
        fa3.flash_attn_with_kvcache(**cache_call(**others, k=memory[:, 11:12]))


@pytest.mark.parametrize("was_in_inference", [False, True])
def test_what_torch_lets_nobody_write_is_refused_in_every_call(was_in_inference):
    with torch.inference_mode():
        frozen = {n: t for n, t in cache_call().items() if n in ("k_cache", "v_cache")}
    new = {n: torch.randn(2, 1, 2, 16).bfloat16() for n in "kv"}
    with torch.inference_mode(was_in_inference):
        for _ in range(3):
            fa3.flash_attn_with_kvcache(**cache_call(**new | (frozen if was_in_inference else {})))
    for _ in range(4):
        with pytest.raises(ValueError, match=r"^k_cache must not be an inference tensor"):
            fa3.flash_attn_with_kvcache(**cache_call(**new, **frozen))
        with pytest.raises(ValueError, match=r"^out must not be an inference tensor"):
            with torch.inference_mode():
                out = torch.empty(2, 1, 2, 16).bfloat16()
            fa3.flash_attn_with_kvcache(**cache_call(out=out))


def test_no_tensor_is_kept(kind):
    function, make = kind
    call = make()
    for _ in range(3):
        function(**call)
    tensors = [weakref.ref(one) for one in call.values() if isinstance(one, torch.Tensor)]
    call.clear()
    gc.collect()
    assert not any(one() is not None for one in tensors)


def test_calls_of_two_kinds_in_turn_are_right():
    calls = [cache_call(q=torch.randn(2, n, 2, 16).bfloat16()) for n in (1, 3)]
    expected = [fa3.flash_attn_with_kvcache(**call) for call in calls]
    wrong = []

    def run(first: int) -> None:
        for i in range(first, first + 60):
            n = i // 3 % 2
            wrong.append(not torch.equal(fa3.flash_attn_with_kvcache(**calls[n]), expected[n]))

    threads = [Thread(target=run, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 180 and not any(wrong)


def test_only_what_comes_again_is_remembered():
    tensors = {"q": torch.zeros(4), "k": None, "v": torch.zeros(2)}
    latest, other = FastPath(lambda call: call["v"].shape), tensors | {"v": torch.zeros(1)}
    remember = partial(latest.remember, alignments=dict.fromkeys("qkv", 1), growing=("q",))
    for _ in range(2):
        for kind, outcome in (tensors, "one"), (other, "other"):
            assert latest.find(kind) == UNKNOWN
            remember(kind, outcome=outcome)
    assert latest.find(other)[0] == "other"
    assert latest.find(tensors) == ("one", [tensors["q"].data_ptr(), tensors["v"].data_ptr()])
    assert latest.find(tensors | {"q": torch.zeros(5)})[0] == "one"
    for unlike in (tensors | {"v": torch.zeros(3)}, tensors | {"v": None}):
        assert latest.find(unlike) == UNKNOWN
    for n in range(2, 70):  # more than have room
        remember(tensors | {"v": torch.zeros(n)}, outcome=n)
    assert latest.find(other) == UNKNOWN


def test_shapes_in_turn_are_found_and_what_has_no_shape_is_refused(stop_describing):
    calls = [cache_call(q=torch.randn(2, rows, 2, 16).bfloat16()) for rows in (1, 2, 3, 4, 5, 6)]
    expected = [[fa3.flash_attn_with_kvcache(**call) for call in calls] for _ in range(3)]
    nested = torch.nested.nested_tensor([torch.randn(n, 2, 16).bfloat16() for n in (1, 2)])
    for odd, error in (nested, NotImplementedError), (None, TypeError), ("q", TypeError):
        with pytest.raises(error, match="q must"):
            fa3.flash_attn_with_kvcache(**cache_call(q=odd))
    stop_describing()
    for call, out in zip(calls, expected[0], strict=True):
        assert torch.equal(fa3.flash_attn_with_kvcache(**call), out)


def test_the_stride_of_a_single_number_is_not_that_of_several():
    numbers = torch.full((4, 5), 3).int()

    def call(batch: int) -> torch.Tensor:
        q, k = torch.randn(2 * batch, 2, 64).bfloat16(), torch.randn(4 * batch, 2, 64).bfloat16()
        ends_q, ends_k = (torch.arange(0, n * batch + 1, n).int() for n in (2, 4))
        return fa3.flash_attn_varlen_func(
            q, k, k.clone(), ends_q, ends_k, 2, 4, seqused_k=numbers[:batch, 0]
        )

    for _ in range(3):
        call(1)
    with pytest.raises(ValueError, match="seqused_k must be contiguous"):
        call(4)


SWEEP = REMEMBERED + 100

SLACK = 1 << 18  # bytes by which the caches' own tables may grow


def operand(*shape, dtype=torch.bfloat16, device="cpu") -> Operand:
    """Describe a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return Operand(torch.Size(shape), tuple(strides), dtype, torch.device(device))


def packed_operands(**named: Operand | None) -> AttentionCall:
    """Describe the tensors of a call on packed keys."""
    ends = operand(1, dtype=torch.int32, device=named["q"].device)
    return AttentionCall(**named, cu_seqlens_q=ends, cu_seqlens_k=ends, kind=PACKED)


def merge(parts: int) -> tuple:
    lse = operand(parts, 1, 1, 1, dtype=torch.float32)
    return operand(parts, 1, 1, 1, 8, dtype=torch.float32), lse, None, torch.float32


def test_no_more_than_so_many_are_remembered():
    for prepare in (combine.prepare_combine, prepare_call):
        assert prepare.cache_info().maxsize == REMEMBERED
    combine.prepare_combine.cache_clear()

    def sweep(first: int) -> int:
        """Prepare a sweep of merges, and return the memory that is traced then."""
        for n in range(first, first + SWEEP):
            combine.prepare_combine(*merge(n))
        return tracemalloc.get_traced_memory()[0]

    # All that is remembered of the first sweep makes room in the next ones.
    tracemalloc.start()
    try:
        sizes = [sweep(1 + i * SWEEP) for i in range(3)]
    finally:
        tracemalloc.stop()
    assert combine.prepare_combine.cache_info().currsize == REMEMBERED
    assert sizes[2] - sizes[1] < SLACK
    combine.prepare_combine.cache_clear()
