"""Which kernels calls of many lengths load on a GPU, with a compiler that only notes them."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from test_latest import operand

from fa3.calls import decode, mixed, prepared_cache, varlen, varlen_gpu
from fa3.calls.cache_call import CacheTensors
from fa3.calls.modifiers import structure_of
from fa3.calls.prepared_cache import prepare_cache_call
from fa3.calls.varlen import prepare_varlen
from fa3.planning.gpu import H200
from fa3.problem import Window
from fa3.tools import warmup
from fa3.tools.models import PRESETS, Model, sliding

PAGE_SIZE = 64

QUERIES = (1, 2, 16, 17, 32, 33, 64, 100, 128, 129, 1000, 4096)
"""The most queries of a sequence: fewer and more than the decode kernel's share of a batch has."""

KEYS = (64, 128, 256, 4096, 8192, 1 << 17)
"""Tokens that a sequence has room for."""

BATCHES = (1, 7, 64)

MODELS = {
    **PRESETS,
    "both sides": Model(16, 4, 64, 64, windows=(Window(127, 128),)),
    "all keys": Model(8, 8, 64, 128, windows=(Window(),)),
    "sliding, MQA": Model(8, 1, 256, 256, windows=(sliding(512),), softcap=30.0),
}


@pytest.fixture
def loaded(monkeypatch) -> dict:
    """Note every kernel that is loaded."""
    found: dict = {}

    def load(kernel):
        found[kernel] = None
        return lambda *arguments: None

    gpu = SimpleNamespace(multi_processor_count=H200.num_sms, total_memory=1 << 37)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    for module in (decode, prepared_cache, varlen_gpu):
        monkeypatch.setattr(module, "load_kernel", load)
    for module in (mixed, prepared_cache, varlen):
        monkeypatch.setattr(module, "gpu_of", lambda device: H200)
    return found


def dtype_of(model: Model) -> torch.dtype:
    return getattr(torch, model.dtype)


def prepare_on_pages(model: Model, window: Window, batch: int, queries: int, keys: int):
    """Prepare a step of vLLM."""
    dtype = dtype_of(model)
    cache, of_v = (
        operand(500, PAGE_SIZE, model.heads_kv, size, dtype=dtype, device="cuda:0")
        for size in (model.head_dim, model.head_dim_v)
    )
    integers = {
        "cache_seqlens": (batch,), "page_table": (batch, keys // PAGE_SIZE),
        "cu_seqlens_q": (batch + 1,),
    }  # fmt: skip
    given = {
        "q": operand(1, model.heads_q, model.head_dim, dtype=dtype, device="cuda:0"),
        "k_cache": cache,
        "v_cache": of_v,
        **{
            name: operand(*shape, dtype=torch.int32, device="cuda:0")
            for name, shape in integers.items()
        },
    }
    if model.sinks:
        given["sinks"] = operand(model.heads_q, dtype=dtype, device="cuda:0")
    described = tuple(given.get(name) for name in CacheTensors._fields)
    return prepare_cache_call.__wrapped__(
        described, queries, False, tuple(window), model.softcap, True, 0, False, 0, None
    )


@pytest.mark.parametrize("name", MODELS)
def test_steps_on_pages_load_what_warm_up_compiles(name, loaded):
    model = MODELS[name]
    compiled = set(warmup.kernels_of(model, ("paged",), (PAGE_SIZE,), None))
    for window, *sizes in product(model.windows, BATCHES, QUERIES, KEYS):
        prepare_on_pages(model, window, *sizes)
        assert loaded.keys() <= compiled, (window, *sizes)
    assert len(loaded) > 2


@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences_load_what_warm_up_compiles(name, loaded):
    """Whatever kernel a call takes once its lengths are known, too."""
    model = MODELS[name]
    compiled = set(warmup.kernels_of(model, ("packed",), (0,), None))
    dtype, device = dtype_of(model), torch.device("cuda:0")
    sinks = dtype if model.sinks else None
    for window in model.windows:
        structure = structure_of(model.softcap, None, sinks, window.right == 0)
        q, k, v = (
            ((heads, size), dtype, device)
            for heads, size in (
                (model.heads_q, model.head_dim),
                (model.heads_kv, model.head_dim),
                (model.heads_kv, model.head_dim_v),
            )
        )
        call = prepare_varlen.__wrapped__(q, k, v, False, False, False, tuple(window), structure, 0)
        call.gpu.alone.split()
        for queries, overlaps_forward in product(QUERIES, (False, True)):
            call.gpu.short(queries, overlaps_forward)
        assert loaded.keys() <= compiled, window
    assert len(loaded) > 4


@pytest.mark.parametrize("name", ["llama3-8b", "gpt-oss"])
def test_after_a_prompt_no_step_on_pages_loads_another_kernel(name, loaded):
    """Steps that only decode have a kernel of their own, which the first prompt loads."""
    model = MODELS[name]
    keys = 1 << 15
    for window in model.windows:
        prepare_on_pages(model, window, 1, 4096, keys)
    met = dict(loaded)
    for window, batch, queries in product(model.windows, BATCHES, QUERIES):
        prepare_on_pages(model, window, batch, queries, keys)
    assert loaded == met
