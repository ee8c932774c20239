"""The backend of vLLM, called as vLLM calls it: prefill, decode and mixed batches in pages.

Against vLLM's own classes where it is installed, and everywhere against the recorded contract
(`vllm_contract`). And fa3's function by itself, in the calls that vLLM 0.33.0 makes of its own.
"""

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm_contract
from vllm_contract import LAYER, MODULES, reshape_and_cache_flash

import fa3
from fa3.integrations import vllm as plugin

MODULE = "fa3.integrations.vllm_backend"
HEADS, HEAD_SIZE, PAGE, CAPACITY = 4, 32, 16, 96
HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")


@pytest.fixture(params=["contract", pytest.param("vllm", marks=needs_vllm)])
def backend(request, monkeypatch):
    """The module of the backend, upon the contract or upon vLLM itself."""
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    if request.param == "contract":
        with vllm_contract.installed():
            yield importlib.import_module(MODULE)
    else:
        module = importlib.import_module(MODULE)
        monkeypatch.setattr(module._custom_ops, "reshape_and_cache_flash", reshape_and_cache_flash)
        yield module
    sys.modules.pop(MODULE)


class Requests:
    """Requests of some tokens each, of which some are new in this step, and their pages."""

    def __init__(self, lengths: list[int], new: list[int], heads_kv: int = 2, by_token=False):
        torch.manual_seed(0)
        options = {"dtype": torch.bfloat16}
        self.lengths, self.new = lengths, new
        self.q = [torch.randn(n, HEADS, HEAD_SIZE, **options) for n in new]
        self.k, self.v = (
            [torch.randn(length, heads_kv, HEAD_SIZE, **options) for length in lengths]
            for _ in range(2)
        )
        pages = CAPACITY // PAGE
        order = torch.randperm(len(lengths) * pages)
        self.block_table = order.view(len(lengths), pages).int()
        # What is in no page yet must not matter.
        shape = len(order), heads_kv, PAGE, 2 * HEAD_SIZE
        self.cache = torch.full(shape, torch.nan, **options)
        if by_token:
            self.cache = self.cache.transpose(1, 2).contiguous().transpose(1, 2)

    def slots(self, request: int, first: int) -> torch.Tensor:
        """Where a request's tokens go, from `first` on."""
        at = torch.arange(first, self.lengths[request])
        return self.block_table[request][at // PAGE].long() * PAGE + at % PAGE

    def run(self, backend, impl, causal: bool = True) -> list[torch.Tensor]:
        """Two steps as vLLM makes them: the old tokens into the cache, then the new ones; attend
        from these. There are three rows of padding."""
        total = sum(self.new)
        for begin in (0, 1):
            k, v, slots = [], [], []
            for i, (length, new) in enumerate(zip(self.lengths, self.new, strict=True)):
                rows = slice(length - new, length) if begin else slice(0, length - new)
                k.append(self.k[i][rows])
                v.append(self.v[i][rows])
                slots.append(self.slots(i, 0)[rows])
            slot_mapping = torch.cat(slots)
            impl.do_kv_cache_update(LAYER, padded(k), padded(v), self.cache, slot_mapping)
        ends = torch.tensor([0, *self.new]).cumsum(0).int()
        common = backend.CommonAttentionMetadata(
            query_start_loc=ends,
            query_start_loc_cpu=ends,
            seq_lens=torch.tensor(self.lengths).int(),
            num_reqs=len(self.new),
            num_actual_tokens=total,
            max_query_len=max(self.new),
            max_seq_len=max(self.lengths),
            block_table_tensor=self.block_table,
            slot_mapping=slot_mapping,
            causal=causal,
        )
        builder = backend.Fa3Backend.get_builder_cls()(None, ["layer"], None, torch.device("cpu"))
        metadata = builder.build(0, common)
        query = padded(self.q)
        output = torch.full_like(query, 7.0)
        given = LAYER, query, padded(k), padded(v), self.cache, metadata, output
        assert impl.forward(*given) is output
        assert (output[total:] == 7.0).all()
        return list(output[:total].split(self.new))

    def expected(self, **options) -> list[torch.Tensor]:
        """Each request by itself, without pages."""
        calls = zip(self.q, self.k, self.v, strict=True)
        return [fa3.flash_attn_func(*(t[None] for t in qkv), **options)[0] for qkv in calls]


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
    "alibi": (
        {"alibi_slopes": [0.5, 0.25, 0.1, 0.0]},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    ),
    "sinks": ({"sinks": torch.arange(4.0)}, {"sinks": torch.arange(4.0)}),
}
"""What vLLM gives to a layer, and what that is to fa3."""


def check(backend, requests: Requests, given: dict, options: dict, heads_kv: int = 2):
    impl = backend.Fa3Backend.get_impl_cls()(HEADS, HEAD_SIZE, 0.2, heads_kv, **given)
    outs = requests.run(backend, impl, options.get("causal", True))
    expected = requests.expected(**{"softmax_scale": 0.2, "causal": True, **options})
    for out, one in zip(outs, expected, strict=True):
        torch.testing.assert_close(out, one, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("batch", BATCHES)
def test_batches(backend, batch, layer):
    check(backend, Requests(*BATCHES[batch]), *LAYERS[layer])


@pytest.mark.parametrize("heads_kv", [1, 4])
@pytest.mark.parametrize("by_token", [False, True])
def test_caches_as_vllm_lays_them(backend, heads_kv, by_token):
    requests = Requests(*BATCHES["mixed"], heads_kv, by_token)
    check(backend, requests, {}, {}, heads_kv)


def test_a_window_has_two_sides_without_causality(backend):
    options = {"causal": False, "window_size": (11, 11)}
    check(backend, Requests(*BATCHES["mixed"]), {"sliding_window": 12}, options)


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
    assert one.supports_kv_cache_dtype("bfloat16") and not one.supports_kv_cache_dtype("fp8")
    assert one.supports_sink() and one.supports_sliding_window() and one.supports_non_causal()
    assert not one.forward_includes_kv_cache_update


def test_what_a_layer_refuses(backend):
    impl = backend.Fa3Backend.get_impl_cls()
    for given, message in (
        ({"attn_type": "encoder"}, "decoders only, got encoder"),
        ({"kv_cache_dtype": "fp8"}, "no caches of fp8"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            impl(HEADS, HEAD_SIZE, 0.2, **given)
    layer = impl(HEADS, HEAD_SIZE, 0.2)
    out = torch.ones(2, HEADS, HEAD_SIZE)
    assert layer.forward(LAYER, out, out, out, out, None, out) is out and not out.any()
    with pytest.raises(NotImplementedError, match="quantise"):
        layer.forward(LAYER, out, out, out, out, None, out, torch.ones(()))


def test_a_table_may_be_exchanged(backend):
    builder = backend.MetadataBuilder(None, [], None, torch.device("cpu"))
    metadata = backend.Metadata(1, 1, 1, *torch.zeros(3, 2), True)
    table, slots = torch.ones(2, 2)
    changed = builder.update_block_table(metadata, table, slots)
    assert changed.block_table is table
    assert changed.seq_lens is metadata.seq_lens and metadata.block_table is not table


def test_the_plug_in_names_the_backend():
    with vllm_contract.installed():
        vllm_contract.REGISTERED.clear()
        plugin.register()
        plugin.register()
        assert {
            vllm_contract.AttentionBackendEnum.CUSTOM: f"{MODULE}.Fa3Backend"
        } == vllm_contract.REGISTERED
    text = Path(__file__).parents[1].joinpath("pyproject.toml").read_text()
    entry = '[project.entry-points."vllm.general_plugins"]\nfa3 = "fa3.integrations.vllm:register"'
    assert entry in text


@needs_vllm
@pytest.mark.parametrize("module", MODULES)
def test_the_contract_is_vllm_s(module):
    """Every member is there, and takes what the contract says, in its order."""
    real = importlib.import_module(module)
    for ours in MODULES[module]:
        theirs = getattr(real, ours.__name__)
        functions = vars(ours) if inspect.isclass(ours) else {}
        for name in (one for one in functions if inspect.isroutine(getattr(ours, one))):
            if name.startswith("_") and name != "__init__":
                continue
            of_ours, of_theirs = (
                list(inspect.signature(getattr(one, name)).parameters) for one in (ours, theirs)
            )
            assert of_theirs[: len(of_ours)] == of_ours, (ours, name)


# ------------------------------------------------------------- the calls of vLLM's own backend


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def layer_of_vllm(**changes: object) -> SimpleNamespace:
    """What vLLM's `FlashAttentionImpl` makes of a layer without options."""
    plain = {"alibi_slopes": None, "sliding_window": (-1, -1), "logits_soft_cap": 0, "sinks": None}
    return SimpleNamespace(scale=0.2, **plain | changes)


def in_pages(lengths: list[int], new: list[int]) -> tuple[SimpleNamespace, list[tuple]]:
    """A step of requests with a cache, and the queries, keys and values of each by itself."""
    torch.manual_seed(0)
    pages = CAPACITY // PAGE
    cache = torch.full((len(lengths) * pages, 2, PAGE, 2 * HEAD_SIZE), torch.nan).bfloat16()
    key_cache, value_cache = cache.transpose(1, 2).split(HEAD_SIZE, dim=-1)
    table = torch.randperm(len(cache)).view(len(lengths), pages).int()
    requests = []
    for row, length, count in zip(table, lengths, new, strict=True):
        at = torch.arange(length)
        k, v = drawn(length, 2, HEAD_SIZE), drawn(length, 2, HEAD_SIZE)
        key_cache[row[at // PAGE].long(), at % PAGE] = k
        value_cache[row[at // PAGE].long(), at % PAGE] = v
        requests.append((drawn(count, HEADS, HEAD_SIZE), k, v))
    query = padded([q for q, _, _ in requests])
    step = SimpleNamespace(
        query=query, output=torch.full_like(query, 7.0), num_actual_tokens=sum(new),
        key_cache=key_cache, value_cache=value_cache, block_table=table, causal=True,
        cu_seqlens_q=torch.tensor([0, *new]).cumsum(0).int(), max_seqlen_q=max(new),
        seqused_k=torch.tensor(lengths).int(), max_seqlen_k=max(lengths), scheduler_metadata=None,
        max_num_splits=0,
    )  # fmt: skip
    return step, requests


def check_each(output: torch.Tensor, requests: list[tuple], **options: object) -> None:
    """Compare the rows of every request with those of a call on it alone."""
    for q, k, v in requests:
        rows, output = output[: len(q)], output[len(q) :]
        alone = fa3.flash_attn_func(q[None], k[None], v[None], softmax_scale=0.2, **options)[0]
        torch.testing.assert_close(rows, alone, rtol=2e-2, atol=2e-2)
    assert (output == 7.0).all()


OWN_LAYERS = {
    "plain": ({}, {}),
    "window": ({"sliding_window": (11, 0)}, {"window_size": (11, 0)}),
    "softcap": ({"logits_soft_cap": 20.0}, {"softcap": 20.0}),
    "alibi": ({"alibi_slopes": torch.arange(4.0)}, {"alibi_slopes": torch.arange(4.0)}),
    "sinks": ({"sinks": torch.arange(4.0)}, {"sinks": torch.arange(4.0)}),
}


@pytest.mark.parametrize("layer", OWN_LAYERS)
@pytest.mark.parametrize("batch", BATCHES)
def test_calls_in_pages_by_vllm_s_names(batch, layer):
    given, options = OWN_LAYERS[layer]
    step, requests = in_pages(*BATCHES[batch])
    call = fa3.flash_attn_varlen_func, layer_of_vllm(**given), step
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'cu_seqlens_k'"):
        vllm_contract.attend_in_pages(*call)
    out = vllm_contract.attend_in_pages(*call, cu_seqlens_k=None)
    assert out.data_ptr() == step.output.data_ptr()
    check_each(step.output, requests, causal=True, **options)


@pytest.mark.parametrize("layer", OWN_LAYERS)
def test_calls_without_a_cache_by_vllm_s_names(layer):
    given, options = OWN_LAYERS[layer]
    if layer == "window":
        given, options = (dict.fromkeys(of, (11, 11)) for of in (given, options))
    counts = [40, 3, 17]
    torch.manual_seed(0)
    requests = [(drawn(n, HEADS, HEAD_SIZE), *drawn(2, n, 2, HEAD_SIZE)) for n in counts]
    query, key, value = map(torch.cat, zip(*requests, strict=True))
    step = SimpleNamespace(
        query=query, key=key, value=value, output=torch.empty_like(query), max_seqlen_q=40,
        cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).int(),
    )  # fmt: skip
    function = fa3.flash_attn_varlen_func
    vllm_contract.attend_without_cache(function, layer_of_vllm(**given), step)
    check_each(step.output, requests, **options)


@pytest.mark.parametrize("name", vllm_contract.OF_OTHER_VERSIONS)
def test_what_chooses_among_versions_is_not_taken(name):
    step, _ = in_pages(*BATCHES["decode"])
    given = {"cu_seqlens_k": None, name: vllm_contract.OF_OTHER_VERSIONS[name]}
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        vllm_contract.attend_in_pages(fa3.flash_attn_varlen_func, layer_of_vllm(), step, **given)


def keywords_of(function: Callable | ast.FunctionDef) -> set[str]:
    """The names by which a function hands arguments on to the one that attends."""
    if not isinstance(function, ast.AST):
        function = ast.parse(inspect.getsource(function))
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    (names,) = (
        {keyword.arg for keyword in call.keywords if keyword.arg}
        for call in calls
        if any(keyword.arg == "cu_seqlens_q" for keyword in call.keywords)
    )
    return names


@needs_vllm
def test_the_recorded_calls_are_vllm_s():
    """Its file is read, not run: it asks for a GPU."""
    (folder,) = importlib.util.find_spec("vllm").submodule_search_locations
    path = Path(folder, "v1", "attention", "backends", "flash_attn.py")
    methods = {
        node.name: node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    others = set(vllm_contract.OF_OTHER_VERSIONS)
    for name, recorded in (
        ("forward", vllm_contract.attend_in_pages),
        ("_forward_encoder_attention", vllm_contract.attend_without_cache),
    ):
        assert keywords_of(methods[name]) - others == keywords_of(recorded)
