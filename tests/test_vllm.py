"""The backend of vLLM, called as vLLM calls it: prefill, decode and mixed batches in pages.

Upon vLLM's own classes where it is installed, and everywhere upon classes that stand for them.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import fa3
from fa3.integrations import vllm as plugin

MODULE = "fa3.integrations.vllm_backend"
HEADS, HEAD_SIZE, PAGE, CAPACITY = 4, 32, 16, 96
FP8, SLOPES = torch.float8_e4m3fn, [0.5, 0.25, 0.1, 0.0]
HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")

LAYER = SimpleNamespace(_k_scale=torch.tensor(0.25), _v_scale=torch.tensor(0.5))
"""A layer of the model, as far as implementations look at it. Scales count in FP8 caches only."""

# --------------------------------------------------------------------- what stands for vLLM 0.33.0


class Base:
    """A class that fa3 derives from."""

    def __class_getitem__(cls, item):
        return cls


class AttentionBackend(Base):
    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype):
        return kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supported_kv_cache_layouts(cls):
        return None


class AttentionMetadataBuilder(Base):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        pass


class AttentionType(str, Enum):
    DECODER = "decoder"


def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, dtype, *scales):
    """In torch what vLLM's kernel does: a slot is page * tokens of a page + token, -1 is none."""
    tokens = key_cache.shape[1]
    for rows, cache, scale in zip((key, value), (key_cache, value_cache), scales, strict=True):
        if dtype != "auto":
            rows = (rows.float() / scale).to(FP8).view(torch.uint8)
        for row, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                cache[slot // tokens, slot % tokens] = rows[row]


MODULES = {
    "vllm.v1.attention.backend": {
        "AttentionBackend": AttentionBackend, "AttentionImpl": Base,
        "AttentionMetadataBuilder": AttentionMetadataBuilder, "AttentionType": AttentionType,
        "AttentionCGSupport": SimpleNamespace(NEVER=0), "MultipleOf": SimpleNamespace,
        "CommonAttentionMetadata": SimpleNamespace,
    },
    "vllm.v1.attention.backends.registry": {
        "AttentionBackendEnum": SimpleNamespace(CUSTOM="CUSTOM")
    },
    "vllm._custom_ops": {"reshape_and_cache_flash": reshape_and_cache_flash},
}  # fmt: skip
"""What is where in vLLM."""


def put_modules(monkeypatch, names: Iterable[str]) -> dict[str, ModuleType]:
    """Put empty modules in the place of these and of the packages that they are in."""
    modules = {}
    for name in names:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            part = ".".join(parts[:end])
            modules.setdefault(part, ModuleType(part)).__path__ = []
            if end > 1:
                setattr(modules[".".join(parts[: end - 1])], parts[end - 1], modules[part])
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


@pytest.fixture
def stand_in(monkeypatch) -> dict[str, ModuleType]:
    """Put modules in vLLM's place."""
    for name in [*sys.modules]:
        if name.partition(".")[0] == "vllm":
            monkeypatch.delitem(sys.modules, name)
    modules = put_modules(monkeypatch, MODULES)
    for name, members in MODULES.items():
        vars(modules[name]).update(members)
    return modules


@pytest.fixture(params=["stand-in", pytest.param("vllm", marks=needs_vllm)])
def backend(request, monkeypatch):
    """The module of the backend, upon the stand-in or upon vLLM itself."""
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    if request.param == "stand-in":
        request.getfixturevalue("stand_in")
    module = importlib.import_module(MODULE)
    monkeypatch.setattr(module._custom_ops, "reshape_and_cache_flash", reshape_and_cache_flash)
    yield module
    sys.modules.pop(MODULE)


class Requests:
    """Requests of some tokens each, of which some are new in this step, and their pages."""

    def __init__(self, batch: str, heads_kv: int, by_token: bool, kv_cache_dtype: str):
        torch.manual_seed(0)
        options = {"dtype": torch.bfloat16}
        self.lengths, self.new = lengths, new = BATCHES[batch]
        self.ends = torch.tensor([0, *new]).cumsum(0).int()
        self.seq_lens = torch.tensor(lengths).int()
        self.q = [torch.randn(n, HEADS, HEAD_SIZE, **options) for n in new]
        # Numbers that caches in FP8 hold too, after division by their scales.
        self.k, self.v = (
            [torch.randn(n, heads_kv, HEAD_SIZE).to(FP8).bfloat16() for n in lengths]
            for _ in range(2)
        )
        pages = CAPACITY // PAGE
        order = torch.randperm(len(lengths) * pages)
        self.block_table = order.view(len(lengths), pages).int()
        # Where tokens go, (requests, tokens)
        self.slots = (order.view(-1, pages, 1) * PAGE + torch.arange(PAGE)).flatten(1)
        # What is in no page yet must not matter.
        shape = len(order), heads_kv, PAGE, 2 * HEAD_SIZE
        self.cache = torch.full(shape, torch.nan, **options)
        if kv_cache_dtype != "auto":
            self.cache = self.cache.to(FP8).view(torch.uint8)
        if by_token:
            self.cache = self.cache.transpose(1, 2).contiguous().transpose(1, 2)

    def run(self, backend, impl, causal: bool = True) -> torch.Tensor:
        """Two steps as vLLM makes them: the old tokens into the cache, then the new ones; attend
        from these. There are three rows of padding."""
        total = sum(self.new)
        for begin in (0, 1):
            rows = [
                slice(n - new, n) if begin else slice(n - new)
                for n, new in zip(self.lengths, self.new, strict=True)
            ]
            k, v, slots = (
                [one[of_one] for one, of_one in zip(of_all, rows, strict=True)]
                for of_all in (self.k, self.v, self.slots)
            )
            slot_mapping = torch.cat(slots)
            impl.do_kv_cache_update(LAYER, padded(k), padded(v), self.cache, slot_mapping)
        common = backend.CommonAttentionMetadata(
            query_start_loc=self.ends, query_start_loc_cpu=self.ends, seq_lens=self.seq_lens,
            num_reqs=len(self.new), num_actual_tokens=total, max_query_len=max(self.new),
            max_seq_len=max(self.lengths), block_table_tensor=self.block_table,
            slot_mapping=slot_mapping, causal=causal,
        )  # fmt: skip
        builder = backend.Fa3Backend.get_builder_cls()(None, ["layer"], None, torch.device("cpu"))
        metadata = builder.build(0, common)
        query = padded(self.q)
        output = torch.full_like(query, 7.0)
        given = LAYER, query, padded(k), padded(v), self.cache, metadata, output
        assert impl.forward(*given) is output
        assert (output[total:] == 7.0).all()
        return output[:total]


def check_requests(q, k, v, out, lse=None, **options) -> None:
    """Compare with each request by itself, without pages."""
    calls = zip(q, k, v, strict=True)
    alone = [
        fa3.flash_attn_func(*(t[None] for t in qkv), return_lse=True, **options) for qkv in calls
    ]
    torch.testing.assert_close(out, torch.cat([one[0] for one, _ in alone]), rtol=2e-2, atol=2e-2)
    if lse is not None:
        # (1, heads, queries) each
        right = torch.cat([one[0] for _, one in alone], dim=1)
        torch.testing.assert_close(lse, right, rtol=2e-2, atol=2e-2)


def padded(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The rows of all requests, and three more."""
    return torch.cat([*tensors, tensors[0].new_zeros(3, *tensors[0].shape[1:])])


BATCHES = {
    "prefill": ([40, 17, 3], [40, 17, 3]),
    "decode": ([40, 17, 90, 1], [1, 1, 1, 1]),
    "mixed": ([40, 61, 30, 16], [1, 20, 30, 2]),
}

LAYERS = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 12}, {"window_size": (11, 0)}),
    "softcap": ({"logits_soft_cap": 20.0}, {"softcap": 20.0}),
    "alibi": ({"alibi_slopes": SLOPES}, {"alibi_slopes": torch.tensor(SLOPES)}),
    "sinks": ({"sinks": torch.arange(4.0)}, {"sinks": torch.arange(4.0)}),
}
"""What vLLM gives to a layer, and what that is to fa3."""


def check(backend, given: dict, options: dict, batch="mixed", heads_kv=2, by_token=False):
    requests = Requests(batch, heads_kv, by_token, given.get("kv_cache_dtype", "auto"))
    impl = backend.Fa3Backend.get_impl_cls()(HEADS, HEAD_SIZE, 0.2, heads_kv, **given)
    options = {"softmax_scale": 0.2, "causal": True} | options
    out = requests.run(backend, impl, options["causal"])
    check_requests(requests.q, requests.k, requests.v, out, **options)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_batches(backend, batch, layer, dtype):
    given, options = LAYERS[layer]
    check(backend, given | {"kv_cache_dtype": dtype}, options, batch)


@pytest.mark.parametrize("heads_kv", [1, 4])
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
def test_caches_as_vllm_lays_them(backend, heads_kv, by_token, dtype):
    check(backend, {"kv_cache_dtype": dtype}, {}, heads_kv=heads_kv, by_token=by_token)


def test_a_window_has_two_sides_without_causality(backend):
    check(backend, {"sliding_window": 12}, {"causal": False, "window_size": (11, 11)})


def test_one_head_has_strides_for_tma(backend):
    cache = torch.empty(3, 1, PAGE, 2 * HEAD_SIZE)
    odd = cache.as_strided(cache.shape, (PAGE * 2 * HEAD_SIZE, 1, 2 * HEAD_SIZE, 1))
    aligned = backend.with_aligned_heads(odd.transpose(1, 2)[..., :HEAD_SIZE])
    assert aligned.shape == (3, PAGE, 1, HEAD_SIZE)
    assert aligned.stride() == (PAGE * 2 * HEAD_SIZE, 2 * HEAD_SIZE, HEAD_SIZE, 1)


def test_what_the_backend_serves(backend):
    one = backend.Fa3Backend
    assert [one.supports_head_size(size) for size in (64, 72, 100, 256, 264)] == [
        True, True, False, True, False,
    ]  # fmt: skip
    capabilities = [SimpleNamespace(major=major, minor=0) for major in (8, 9, 10)]
    assert list(map(one.supports_compute_capability, capabilities)) == [False, True, False]
    dtypes = "auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"
    assert list(map(one.supports_kv_cache_dtype, dtypes)) == [True] * 4 + [False]
    assert one.supports_sink() and one.supports_sliding_window() and one.supports_non_causal()
    assert not one.forward_includes_kv_cache_update


def test_what_a_layer_refuses(backend):
    impl = backend.Fa3Backend.get_impl_cls()
    for given, message in (
        ({"attn_type": "encoder"}, "decoders only, got encoder"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "no caches of fp8_e5m2"),
        ({"kv_cache_dtype": "fp8", "head_size": 40}, "multiples of 16, got 40"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            impl(**{"num_heads": HEADS, "head_size": HEAD_SIZE, "scale": 0.2} | given)
    layer = impl(HEADS, HEAD_SIZE, 0.2)
    out = torch.ones(2, HEADS, HEAD_SIZE)
    assert layer.forward(LAYER, out, out, out, out, None, out) is out and not out.any()
    with pytest.raises(NotImplementedError, match="quantise"):
        layer.forward(LAYER, out, out, out, out, None, out, torch.ones(()))


def test_a_table_may_be_exchanged(backend):
    builder = backend.MetadataBuilder(None, [], None, torch.device("cpu"))
    step = SimpleNamespace(seq_lens=torch.ones(2), block_table_tensor=None)
    table, slots = torch.ones(2, 2)
    other = builder.update_block_table(step, table, slots)
    assert other.block_table_tensor is table and other.seq_lens is step.seq_lens
    assert step.block_table_tensor is None


def test_the_plug_in_names_the_backend(stand_in):
    registered = []
    registry = stand_in["vllm.v1.attention.backends.registry"]
    registry.register_backend = lambda *given: registered.append(given)
    plugin.register()
    assert registered == [("CUSTOM", f"{MODULE}.Fa3Backend")]
    text = Path(__file__).parents[1].joinpath("pyproject.toml").read_text()
    entry = '[project.entry-points."vllm.general_plugins"]\nfa3 = "fa3.integrations.vllm:register"'
    assert entry in text


@needs_vllm
def test_methods_take_what_vllm_s_take():
    backend = importlib.import_module(MODULE)
    for ours in (backend.Fa3Backend, backend.MetadataBuilder, backend.Fa3Attention):
        theirs = ours.__mro__[1]
        for name in (one for one in vars(ours) if inspect.isroutine(getattr(theirs, one, None))):
            taken, given = (
                list(inspect.signature(getattr(one, name)).parameters) for one in (ours, theirs)
            )
            assert taken[: len(given)] == given, (ours, name)
