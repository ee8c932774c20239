"""What calls on a cache lead to is remembered, of so many calls and no more."""

import tracemalloc
from types import SimpleNamespace

import pytest
import torch

from fa3.calls import combine, decode, kvcache
from fa3.calls.cache_call import CacheCall
from fa3.calls.modifiers import UNMODIFIED
from fa3.calls.operands import Operand
from fa3.calls.scheduler_metadata import SchedulerMetadata
from fa3.problem import REMEMBERED, Window

SWEEP = REMEMBERED + 100

SLACK = 1 << 18
"""Bytes by which the caches' own tables may grow."""


def operand(*shape, dtype=torch.bfloat16) -> Operand:
    """Describe a contiguous tensor on the CPU."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return Operand(torch.Size(shape), tuple(strides), dtype, torch.device("cpu"))


def call_of(batch: int) -> CacheCall:
    cache = operand(batch, 64, 1, 64)
    lengths = operand(batch, dtype=torch.int32)
    return CacheCall(operand(batch, 1, 4, 64), cache, cache, *[None] * 4, lengths, *[None] * 4)


def cache_call(batch: int) -> tuple:
    return call_of(batch)[:-1], None, True, (-1, -1), True, 0, 0


def metadata_of_call(batch: int) -> tuple:
    metadata = SchedulerMetadata(
        batch, 1, 4, 1, 64, 64, torch.bfloat16, None, Window(right=0), False, 0, 0
    )
    return metadata, call_of(batch)[:-1], None, True, (-1, -1), False


def merge(parts: int) -> tuple:
    lse = operand(parts, 1, 1, 1, dtype=torch.float32)
    return operand(parts, 1, 1, 1, 8, dtype=torch.float32), lse, None, torch.float32


def decode_launch(batch: int) -> tuple:
    shapes = torch.Size((batch, 1, 4, 64)), torch.Size((batch, 64, 1, 64))
    given = False, False
    return (
        *shapes, 64, torch.bfloat16, torch.device("cuda", 0), None, given, UNMODIFIED.structure,
        Window(), 0, False, 0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("prepare", "arguments"),
    [
        (kvcache.prepare_cache_call, cache_call),
        (kvcache.compare_with_metadata, metadata_of_call),
        (combine.prepare_combine, merge),
        (decode.prepare_decode, decode_launch),
    ],
    ids=["call", "metadata", "merge", "decode"],
)
def test_no_more_than_so_many_are_remembered(prepare, arguments, monkeypatch):
    gpu = SimpleNamespace(multi_processor_count=132, total_memory=1 << 37)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(decode, "load_kernel", lambda kernel: None)
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
