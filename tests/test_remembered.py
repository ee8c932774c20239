"""What calls on a cache lead to is remembered, of so many calls and no more."""

import tracemalloc
from types import SimpleNamespace

import pytest
import torch

from fa3.calls import combine, decode, kvcache, mixed
from fa3.calls.call import TENSORS, AttentionCall
from fa3.calls.operands import Operand
from fa3.calls.options import Options
from fa3.calls.scheduler_metadata import SchedulerMetadata
from fa3.planning.gpu import H200
from fa3.problem import REMEMBERED, Window

SWEEP = REMEMBERED + 100

SLACK = 1 << 18
"""Bytes by which the caches' own tables may grow."""


def operand(*shape, dtype=torch.bfloat16, device="cpu") -> Operand:
    """Describe a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return Operand(torch.Size(shape), tuple(strides), dtype, torch.device(device))


def packed_operands(**named: Operand | None) -> tuple[Operand | None, ...]:
    """Describe the tensors of a call on packed keys."""
    ends = operand(1, dtype=torch.int32, device=named["q"].device)
    named |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    return tuple(named.get(name) for name in TENSORS)


def call_of(batch: int, device: str) -> AttentionCall:
    q, cache = operand(batch, 1, 4, 64, device=device), operand(batch, 64, 1, 64, device=device)
    lengths = operand(batch, dtype=torch.int32, device=device)
    return AttentionCall(q, cache, cache, *[None] * 4, lengths, *[None] * 4)


def cache_call(batch: int, device: str = "cpu") -> tuple:
    described = call_of(batch, device)[: len(TENSORS)]
    return described, Options(Window(right=0))


def cache_call_on_gpu(batch: int) -> tuple:
    return cache_call(batch, "cuda:0")


def cache_call_with_metadata(batch: int) -> tuple:
    metadata = SchedulerMetadata(
        batch, 1, 4, 1, 64, 64, torch.bfloat16, None, Window(right=0), False, 0, 0
    )
    return *cache_call(batch)[:-1], Options(Window(right=0), metadata=metadata)


def merge(parts: int) -> tuple:
    lse = operand(parts, 1, 1, 1, dtype=torch.float32)
    return operand(parts, 1, 1, 1, 8, dtype=torch.float32), lse, None, torch.float32


@pytest.mark.parametrize(
    ("prepare", "arguments"),
    [
        (kvcache.prepare_cache_call, cache_call_on_gpu),
        (kvcache.prepare_cache_call, cache_call_with_metadata),
        (combine.prepare_combine, merge),
    ],
    ids=["call on a GPU", "metadata", "merge"],
)
def test_no_more_than_so_many_are_remembered(prepare, arguments, monkeypatch):
    gpu = SimpleNamespace(multi_processor_count=132, total_memory=1 << 37)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(decode, "load_kernel", lambda kernel: None)
    for module in (kvcache, mixed):
        monkeypatch.setattr(module, "gpu_of", lambda device: H200)
    prepare.cache_clear()

    def sweep(first: int) -> int:
        """Prepare a sweep of calls, and return the memory that is traced then."""
        for n in range(first, first + SWEEP):
            prepare(*arguments(n))
        return tracemalloc.get_traced_memory()[0]

    # All that is remembered of the first sweep makes room in the next ones.
    tracemalloc.start()
    try:
        sizes = [sweep(1 + i * SWEEP) for i in range(3)]
    finally:
        tracemalloc.stop()
    assert prepare.cache_info().currsize == REMEMBERED
    assert sizes[2] - sizes[1] < SLACK
    prepare.cache_clear()


def test_what_is_remembered_is_found_again():
    kvcache.prepare_cache_call.cache_clear()
    first, *_, last = (kvcache.prepare_cache_call(*cache_call(n)) for n in range(1, 4))
    assert kvcache.prepare_cache_call(*cache_call(3)) is last
    assert kvcache.prepare_cache_call(*cache_call(1)) is first
