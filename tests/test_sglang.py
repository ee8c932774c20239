"""SGLang's calls of FlashAttention-3, with fa3 in its place as docs/engines.md puts it there.

Where SGLang is installed a test compares the arguments with its sources.
"""

import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_vllm
import torch
from varlen_problems import ends_of

HEADS, HEADS_KV, HEAD_DIM, CAPACITY = 4, 2, 32, 96
DOCUMENT = Path(__file__).parents[1] / "docs" / "engines.md"
# -------------------------------------------------------------------- what stands for SGLang 0.5.23

ARGUMENTS = {
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
        "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
        "q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), attention_chunk=None, softcap=0.0, rotary_interleaved=True, "
        "scheduler_metadata=None, num_splits=0, pack_gqa=None, only_qv=False, sm_margin=0, "
        "return_softmax_lse=False, sinks=None, out=None"
    ),
    "flash_attn_varlen_func": (
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, "
        "seqused_q=None, seqused_k=None, page_table=None, softmax_scale=None, causal=False, "
        "qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), "
        "attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, only_qv=False, sm_margin=0, "
        "return_softmax_lse=False, sinks=None, out=None"
    ),
}
"""What SGLang's two functions take, with their defaults."""

LAST_BY_POSITION = {"flash_attn_with_kvcache": "pack_gqa", "flash_attn_varlen_func": None}
"""The last argument that they hand on by position; all others go by name."""

PLACE = "sglang.kernels.ops.attention.flash_attention_v3"


@pytest.fixture(autouse=True)
def modules(monkeypatch) -> SimpleNamespace:
    """Put modules in SGLang's place, and run what the document says."""
    made = test_vllm.put_modules(monkeypatch, (PLACE, "sgl_kernel.flash_attn"))
    (code,) = re.findall(r"## SGLang\n.*?```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    exec(code, {})
    return SimpleNamespace(v3=made[PLACE], sgl_kernel=made["sgl_kernel.flash_attn"])


def call(function: str, **given) -> object:
    """Call one of SGLang's functions, which calls the kernel of that name with all arguments, but
    without `out` if there is none."""
    bound = inspect.signature(eval(f"lambda {ARGUMENTS[function]}: None")).bind(**given)
    bound.apply_defaults()
    arguments, names = bound.arguments, list(bound.arguments)
    last = LAST_BY_POSITION[function]
    count = 0 if last is None else names.index(last) + 1
    named = {name: arguments[name] for name in names[count:]}
    if named["out"] is None:
        del named["out"]
    kernel = sys.modules[PLACE]._load_fa3_kernels()[function]
    return kernel(*(arguments[name] for name in names[:count]), **named)


# --------------------------------------------------------------------------------------- the calls


def drawn(rows: int, heads: int = HEADS, head_dim: int = HEAD_DIM) -> torch.Tensor:
    return torch.randn(rows, heads, head_dim, dtype=torch.bfloat16)


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

    def attend(self, **options) -> object:
        """Make SGLang's call of a step, with other arguments where they are given."""
        table = self.slots[:, : max(self.lengths)][:, :: self.page] // self.page
        given = {
            "q": torch.cat(self.q), "k_cache": self.caches[0], "v_cache": self.caches[1],
            "page_table": table, "cache_seqlens": torch.tensor(self.lengths).int(),
            "cu_seqlens_q": ends_of(self.new), "cu_seqlens_k_new": ends_of(self.lengths),
            "max_seqlen_q": max(self.new), "softmax_scale": 0.2, "causal": True,
        }  # fmt: skip
        return call("flash_attn_with_kvcache", **given | options)

    def check(self, out: torch.Tensor, lse: torch.Tensor | None = None, **options) -> None:
        """Compare with each request by itself."""
        options = {"softmax_scale": 0.2, "causal": True} | options
        test_vllm.check_requests(self.q, self.k, self.v, out, lse, **options)


BATCHES = test_vllm.BATCHES | {"verify": ([40, 17, 90], [4, 4, 4])}
SINKS = torch.arange(4.0).bfloat16()
LAYERS = {
    "plain": {},
    "window": {"window_size": (11, 0)},
    "softcap": {"softcap": 20.0},
    "sinks": {"sinks": SINKS},
    "bidirectional": {"causal": False, "window_size": (5, 5)},
}


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("batch", BATCHES)
def test_steps(batch, layer, page):
    requests = Requests(*BATCHES[batch], page)
    requests.check(requests.attend(**LAYERS[layer]), **LAYERS[layer])


@pytest.mark.parametrize("num_splits", [0, 1])
@pytest.mark.parametrize("by_head", [False, True])
def test_decoding(by_head, num_splits, modules):
    """Without lengths of new tokens, with an output of SGLang's, and with its log-sum-exp."""
    requests = Requests(*BATCHES["decode"], 16, by_head)
    out = torch.full((4, HEADS, HEAD_DIM), torch.nan).bfloat16()
    metadata = modules.sgl_kernel.get_scheduler_metadata(batch_size=4, causal=True)
    found, lse, *_ = requests.attend(
        cu_seqlens_k_new=None, out=out, num_splits=num_splits, scheduler_metadata=metadata,
        return_softmax_lse=True,
    )  # fmt: skip
    assert found is out
    requests.check(out, lse)


def test_latent_attention_that_is_written_out():
    """Of a prefill's tokens to a chunk before them; head sizes differ."""
    new, before = [20, 3], [9, 30]
    q, k, v = drawn(23, HEADS, 48), drawn(39, HEADS, 48), drawn(39)
    ends, out = (ends_of(new), ends_of(before)), drawn(23)
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
    given |= {"max_seqlen_q": 20, "max_seqlen_k": 30, "softmax_scale": 0.2}
    found, lse, *_ = call("flash_attn_varlen_func", **given, return_softmax_lse=True, out=out)
    assert found is out and lse.shape == (HEADS, 23)
    parts = q.split(new), k.split(before), v.split(before)
    test_vllm.check_requests(*parts, out, lse, softmax_scale=0.2)


def test_what_is_refused(modules):
    requests = Requests([40, 17], [1, 1], 16)
    with pytest.raises(NotImplementedError, match=r"^qv must be None, got Tensor"):
        requests.attend(qv=torch.cat(requests.q))
    scale = torch.ones(2, HEADS_KV)
    for given, kind, complaint in (
        ({"only_qv": True}, NotImplementedError, "fa3 has no attention by qv"),
        ({"k_descale": scale, "v_descale": scale}, ValueError, "k_descale must be None unless"),
        ({"attention_chunk": 64}, NotImplementedError, "attention_chunk must be 0 or None"),
    ):
        with pytest.raises(kind, match=f"^{complaint}"):
            requests.attend(**given)
