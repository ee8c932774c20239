"""SGLang's calls of FlashAttention-3, with fa3 in its place as docs/engines.md puts it there.

Against the recorded contract (`sglang_contract`); the contract against SGLang's sources where it is
installed.
"""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import sglang_contract as sglang
import torch
from sglang_contract import Layer, Step

import fa3

HEADS, HEADS_KV, HEAD_DIM, CAPACITY = 4, 2, 32, 96
DOCUMENT = Path(__file__).parents[1] / "docs" / "engines.md"
SGLANG = importlib.util.find_spec("sglang")


@pytest.fixture(autouse=True)
def replaced():
    """Run what the document says."""
    (code,) = re.findall(r"## SGLang\n.*?```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    with sglang.installed():
        exec(code, {})
        yield


def ends_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def drawn(rows: int, heads: int = HEADS, head_dim: int = HEAD_DIM) -> torch.Tensor:
    return torch.randn(rows, heads, head_dim, dtype=torch.bfloat16)


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


class Requests:
    """Requests of some tokens each, of which some are new, in SGLang's pool of slots.

    A request has its slots page by page; what is in no slot of a request is NaN.
    """

    def __init__(self, lengths: list[int], new: list[int], page: int, by_head: bool = False):
        torch.manual_seed(0)
        self.lengths, self.new, self.page = lengths, new, page
        self.q, self.k, self.v = (
            [drawn(count, heads) for count in counts]
            for counts, heads in ((new, HEADS), (lengths, HEADS_KV), (lengths, HEADS_KV))
        )
        pages = CAPACITY // page
        first = torch.randperm(len(lengths) * pages).view(len(lengths), pages, 1) * page
        self.slots = (first + torch.arange(page)).view(len(lengths), CAPACITY).int()
        pool = torch.full((2, self.slots.numel(), HEADS_KV, HEAD_DIM), torch.nan).bfloat16()
        for row, k, v in zip(self.slots.long(), self.k, self.v, strict=True):
            pool[0, row[: len(k)]], pool[1, row[: len(v)]] = k, v
        self.pool = pool
        caches = pool.view(2, -1, page, HEADS_KV, HEAD_DIM)
        if by_head:
            caches = caches.transpose(2, 3).contiguous().transpose(2, 3)
        self.caches = tuple(caches)

    def step(self, **changes) -> Step:
        table = self.slots[:, : max(self.lengths)][:, :: self.page] // self.page
        step = Step(
            torch.tensor(self.lengths).int(), ends_of(self.new), ends_of(self.lengths),
            max(self.new), table,
        )  # fmt: skip
        for name, value in changes.items():
            setattr(step, name, value)
        return step

    def queries(self) -> torch.Tensor:
        return torch.cat(self.q)

    def expected(self, return_lse: bool = False, **options) -> list:
        """Each request by itself."""
        calls = zip(self.q, self.k, self.v, strict=True)
        return [
            fa3.flash_attn_func(*(t[None] for t in qkv), return_lse=return_lse, **options)
            for qkv in calls
        ]

    def check(self, out: torch.Tensor, **options) -> None:
        close(out, torch.cat([one[0] for one in self.expected(**options)]))


BATCHES = {
    "prefill": ([40, 17, 3], [40, 17, 3]),
    "chunked": ([40, 61, 30, 16], [1, 20, 30, 2]),
    "verify": ([40, 17, 90], [4, 4, 4]),
}
PAGES = [1, 16, 32]
SINKS = torch.arange(4.0).bfloat16()
LAYERS = {
    "plain": (Layer(0.2), {}),
    "window": (Layer(0.2, window=11), {"window_size": (11, 0)}),
    "softcap": (Layer(0.2, logit_cap=20.0), {"softcap": 20.0}),
    "sinks": (Layer(0.2, sinks=SINKS), {"sinks": SINKS}),
}
OPTIONS = {"softmax_scale": 0.2, "causal": True}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("batch", BATCHES)
def test_prefill(batch, kind, page):
    requests, (layer, options) = Requests(*BATCHES[batch], page), LAYERS[kind]
    out = sglang.extend(layer, requests.step(), requests.queries(), requests.caches)
    requests.check(out, **OPTIONS | options)


@pytest.mark.parametrize("num_splits", [0, 1])
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("kind", LAYERS)
def test_decoding(kind, page, num_splits):
    requests, (layer, options) = Requests([40, 17, 90, 1], [1] * 4, page), LAYERS[kind]
    step, q = requests.step(cu_seqlens_k=None), requests.queries()
    out = sglang.decode(layer, step, q, requests.caches, num_splits=num_splits)
    requests.check(out, **OPTIONS | options)


def test_metadata_of_sglang_is_none():
    requests = Requests([40, 17], [1, 1], 16)
    step = requests.step()
    sizes = {"num_heads": HEADS, "num_heads_k": HEADS_KV, "headdim": HEAD_DIM}
    step.scheduler_metadata = sglang.metadata_of(
        step, max_seqlen_k=40, qkv_dtype=torch.bfloat16, page_size=16, **sizes
    )
    out = sglang.decode(Layer(0.2), step, requests.queries(), requests.caches)
    requests.check(out, **OPTIONS)


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("function", [sglang.extend, sglang.decode])
def test_outputs_of_sglang_s_and_either_layout(function, by_head):
    requests = Requests([40, 17], [1, 1], 16, by_head)
    out = torch.full((2, HEADS, HEAD_DIM), torch.nan).bfloat16()
    found = function(Layer(0.2), requests.step(), requests.queries(), requests.caches, out=out)
    assert found is out
    requests.check(out, **OPTIONS)


@pytest.mark.parametrize("function", [sglang.extend, sglang.decode])
def test_log_sum_exps_come_head_by_head(function):
    requests = Requests([40, 17], [1, 1], 16)
    given = Layer(0.2), requests.step(), requests.queries(), requests.caches
    out, lse, *_ = function(*given, return_lse=True)
    requests.check(out, **OPTIONS)
    expected = requests.expected(return_lse=True, **OPTIONS)
    # (1, heads, queries) each
    close(lse, torch.cat([of_request[0] for _, of_request in expected], dim=1))


def test_bidirectional_layers():
    requests = Requests([40, 17], [40, 17], 16)
    layer = Layer(0.2, window=5)
    out = sglang.extend(
        layer, requests.step(), requests.queries(), requests.caches, causal=False
    )  # fmt: skip
    requests.check(out, softmax_scale=0.2, window_size=(5, 5))


def test_cross_attention():
    requests = Requests([40, 17], [1, 1], 16)
    given = Layer(0.2), requests.step(), requests.queries(), requests.caches
    for out in (sglang.decode_across(*given), sglang.extend(*given, causal=False)):
        requests.check(out, softmax_scale=0.2)


def test_attention_in_chunks():
    """Each chunk is a request of its own, with its own pages."""
    requests = Requests([64, 32], [64, 32], 16)
    table = requests.slots[:, ::16] // 16
    chunks = torch.stack((table[0, :2], table[0, 2:4], table[1, :2]))
    lengths, ends = torch.full((3,), 32).int(), ends_of([32, 32, 32])
    step = Step(lengths, ends, None, 32, chunks)
    out = sglang.extend(Layer(0.2), step, requests.queries(), requests.caches)
    first, second = (tuple(t[i] for t in (requests.q, requests.k, requests.v)) for i in (0, 1))
    parts = [tuple(t[at : at + 32] for t in first) for at in (0, 32)]
    expected = [
        fa3.flash_attn_func(*(t[None] for t in qkv), **OPTIONS)[0] for qkv in (*parts, second)
    ]
    close(out, torch.cat(expected))


def merged(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """What SGLang makes of two parts, of which log-sum-exps came head by head."""
    outs, lses = zip(*parts, strict=True)
    weights = torch.stack([lse.T.contiguous() for lse in lses]).softmax(0)[..., None]
    return (torch.stack(outs).float() * weights).sum(0).bfloat16()


def test_a_cascade_of_a_prefix_and_a_draft():
    """Four queries of each request see the prefix, and of the draft only themselves: a tree."""
    prefix, draft = [33, 17], 4
    lengths = [length + draft for length in prefix]
    requests = Requests(lengths, [draft] * 2, 1)
    layer, q = Layer(0.2), requests.queries()
    step = requests.step(cache_seqlens=torch.tensor(prefix).int())
    before = sglang.extend(layer, step, q, requests.caches, is_cascade=True)[:2]
    own = [
        row[length : length + draft, None]
        for row, length in zip(requests.slots, prefix, strict=True)
    ]
    ones = torch.ones(2 * draft).int()
    of_draft = Step(ones, ends_of([1] * 2 * draft), ends_of([1] * 2 * draft), 1, torch.cat(own))
    after = sglang.of_draft(layer, of_draft, q, requests.caches)[:2]
    expected = []
    for i, length in enumerate(prefix):
        for j in range(draft):
            seen = [*range(length), length + j]
            qkv = requests.q[i][j : j + 1], requests.k[i][seen], requests.v[i][seen]
            expected.append(fa3.flash_attn_func(*(t[None] for t in qkv), softmax_scale=0.2)[0])
    close(merged([before, after]), torch.cat(expected))


def test_latent_attention_that_is_written_out():
    """Of a prefill's own tokens and of a chunk before them; head sizes differ."""
    new, before = [20, 3], [9, 30]
    q, k, v = drawn(23, HEADS, 48), drawn(23, HEADS, 48), drawn(23)
    of_chunk, ends = (drawn(39, HEADS, 48), drawn(39)), (ends_of(new), ends_of(before))
    layer, out = Layer(0.2), torch.empty_like(v)
    own = sglang.of_chunk(layer, q, k, v, (ends[0], ends[0]), (20, 20), True, True)[:2]
    rest = sglang.of_chunk(layer, q, *of_chunk, ends, (20, 30), False, True, out)[:2]
    assert rest[0] is out
    expected = []
    for i in (0, 1):
        rows, chunk = (slice(*of[i : i + 2].tolist()) for of in ends)
        together = [torch.cat((a[chunk], b[rows])) for a, b in zip(of_chunk, (k, v), strict=True)]
        expected.append(fa3.flash_attn_func(q[None, rows], *(t[None] for t in together), **OPTIONS))
    close(merged([own, rest]), torch.cat([one[0] for one in expected]))
    alone = sglang.of_chunk(layer, q, k, v, (ends[0], ends[0]), (20, 20), True, False)
    assert torch.equal(alone, own[0])


@pytest.mark.parametrize("function", [sglang.hybrid, sglang.embed])
def test_packed_layers(function):
    counts, layer = [20, 3, 31], Layer(0.2, window=5)
    q, k, v = drawn(54), drawn(54, HEADS_KV), drawn(54, HEADS_KV)
    out = function(layer, q, k, v, ends_of(counts), max(counts))
    window = (5, 0) if function is sglang.hybrid else (-1, -1)
    parts = zip(*(t.split(counts) for t in (q, k, v)), strict=True)
    expected = [
        fa3.flash_attn_func(*(t[None] for t in qkv), window_size=window, **OPTIONS)[0]
        for qkv in parts
    ]
    close(out, torch.cat(expected))


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"sinks": SINKS}], ids=str)
def test_images(options):
    """Views of what one projection gave."""
    q, k, v = torch.randn(25, 3, HEADS, 40).bfloat16().unbind(1)
    out = sglang.see(q, k, v, ends_of([16, 9]), 16, **options)
    window = options.get("window", -1)
    parts = zip(*(t.split([16, 9]) for t in (q, k, v)), strict=True)
    expected = [
        fa3.flash_attn_func(
            *(t[None] for t in qkv), window_size=(window, window), sinks=options.get("sinks")
        )[0]
        for qkv in parts
    ]
    close(out, torch.cat(expected))


def test_what_is_refused():
    requests = Requests([40, 17], [1, 1], 16)
    step, q, caches = requests.step(), requests.queries(), requests.caches
    with pytest.raises(NotImplementedError, match=r"^qv must be None, got Tensor"):
        sglang.absorbed(Layer(0.2), step, q, q, caches)
    kernels = sglang.V3._load_fa3_kernels()
    scale = torch.ones(2, HEADS_KV)
    for given, complaint in (
        ({"only_qv": True}, "fa3 has no attention by qv"),
        ({"k_descale": scale, "v_descale": scale}, "k_descale must be None, got Tensor"),
        ({"attention_chunk": 64}, "attention_chunk must be 0 or None"),
    ):
        with pytest.raises(NotImplementedError, match=f"^{complaint}"):
            kernels["flash_attn_with_kvcache"](q, *caches, cache_seqlens=40, **given)


@pytest.mark.skipif(SGLANG is None, reason="SGLang is not installed")
@pytest.mark.parametrize("name", sglang.ARGUMENTS)
def test_the_contract_is_sglang_s(name):
    """Its file is read, not run: it asks for a GPU."""
    (folder,) = SGLANG.submodule_search_locations
    path = Path(folder, *sglang.V3.__name__.split(".")[1:]).with_suffix(".py")
    functions = {
        node.name: node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert "_load_fa3_kernels" in functions
    arguments = functions[name].args
    for argument in arguments.args:
        argument.annotation = None
    assert ast.unparse(arguments) == ast.unparse(
        ast.parse(f"lambda {sglang.ARGUMENTS[name]}: 0").body[0].value.args
    )
