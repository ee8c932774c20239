"""fa3 behind torch's own attention functions.

Without a GPU the kernels are put at the dispatch key CPU, where torch has none of these operators:
calls of aten's operators and `varlen_attn` then go through the dispatcher and autograd as on a GPU.
"""

from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from pairs import pairs
from torch.nn import attention as torch_attention

import fa3
from fa3.calls.modifiers import draw_rng_state
from fa3.integrations import torch as integration

needs_registry = pytest.mark.skipif(
    not hasattr(torch_attention, "restore_flash_attention_impl"),
    reason="torch cannot take an implementation of flash attention back before 2.11",
)


class Stock:
    """Stands for torch's kernels, and keeps which were called."""

    def __init__(self):
        self.called = []

    def kernel(self, name: str, key: str):
        def run(keys, *arguments, **named):
            self.called.append(name.removeprefix("aten::"))
            return getattr(self, "result", None)

        return run


@pytest.fixture
def stock(monkeypatch):
    """Activate fa3 for CPU tensors."""
    stock = Stock()
    monkeypatch.setattr(integration, "stock_kernel", stock.kernel)
    activation = integration.activate("CPU")
    yield stock
    activation.remove()


def heads_first(batch=2, heads=4, seqlen=40, head_dim=64, transposed=True, dtype=torch.bfloat16):
    """Return q, k and v, (batch, heads, seqlen, head_dim)."""
    shape = (batch, seqlen, heads) if transposed else (batch, heads, seqlen)
    made = (torch.randn(*shape, head_dim).to(dtype) for _ in range(3))
    return tuple(x.transpose(1, 2) if transposed else x for x in made)


@pytest.mark.parametrize("name", integration.KERNELS)
def test_arguments_are_those_of_the_operators(name):
    taken = integration.AtenArguments
    if not hasattr(torch.ops.aten, name):
        pytest.skip(f"torch {torch.__version__} has no such operator")
    for argument in getattr(torch.ops.aten, name).default._schema.arguments:
        name = integration.RENAMED.get(argument.name, argument.name)
        assert name in taken._fields
        if argument.has_default_value():
            assert taken._field_defaults[name] == argument.default_value


def test_an_argument_of_a_later_torch_is_for_its_kernel():
    name = "_scaled_dot_product_flash_attention"
    stock, tensors = Stock(), heads_first()
    routed = integration.Routed.of(name, stock.kernel(name, "CPU"))
    routed(None, *tensors, later=None)
    assert stock.called == [name]
    later = integration.Routed(routed.kernel, routed.stock, (*routed.names, "later"))
    options = 0.0, False, False, None
    assert later(None, *tensors, *options) is not None and len(stock.called) == 1
    later(None, *tensors, *options, None)
    assert stock.called == [name, name]


@pairs(transposed=[True, False], is_causal=[True, False], dropout_p=[0.0, 0.3])
def test_forward_and_backward_through_the_dispatcher(stock, transposed, is_causal, dropout_p):
    """What the forward pass drew, the backward pass draws again."""
    q, k, v = (x.requires_grad_() for x in heads_first(transposed=transposed))
    torch.manual_seed(3)
    state = draw_rng_state(q.device)
    torch.manual_seed(3)
    out, lse, _, _, max_q, max_k, words, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, dropout_p, is_causal, scale=0.2
    )
    assert (max_q, max_k) == (40, 40)
    assert out.stride() == torch.empty_like(q).stride()
    inputs = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    options = {}
    if dropout_p:
        assert words.dtype == torch.int64 and words[0] == state
        options = {"dropout_p": dropout_p, "rng_state": state}
    expected, expected_lse = fa3.flash_attn_func(
        *inputs, 0.2, is_causal, return_lse=True, **options
    )
    assert torch.equal(out.transpose(1, 2), expected)
    assert torch.equal(lse, expected_lse)
    d_out = torch.randn_like(expected)
    found = torch.autograd.grad(out, (q, k, v), d_out.transpose(1, 2))
    wanted = torch.autograd.grad(expected, inputs, d_out)
    for one, other, x in zip(found, wanted, (q, k, v), strict=True):
        assert torch.equal(one.transpose(1, 2), other)
        # In graphs torch counts on these.
        assert one.stride() == torch.empty_like(x).stride()
    assert not stock.called


def test_what_fa3_does_not_compute_goes_to_the_stock_kernel(stock):
    call = torch.ops.aten._scaled_dot_product_flash_attention
    q, k, v = heads_first()
    like_results = call(q, k, v)
    stock.result = like_results
    call(q, k, v, 0.5, return_debug_mask=True)
    call(q, k, v, 1.0)
    call(*heads_first(dtype=torch.float32))
    call(*heads_first(head_dim=60))
    call(*heads_first(head_dim=264))
    call(q[..., 4:60], k[..., 4:60], v[..., 4:60])
    call(q, k, v, scale=0.0)
    call(q, k, v, scale=-1.0)
    assert stock.called == 8 * ["_scaled_dot_product_flash_attention"]


def test_calls_like_earlier_ones_are_checked_too(stock):
    call = torch.ops.aten._scaled_dot_product_flash_attention
    q, k, v = heads_first()
    *_, stock.result = (call(q, k, v) for _ in range(3))
    assert integration.LATEST_TAKEN.remembered and not stock.called
    off = k.new_zeros(k.numel() + 1)[1:].as_strided(k.shape, k.stride())
    call(q, off, v)
    call(q, k, v, 1.0)
    call(q, k, v, scale=-1.0)
    assert len(stock.called) == 3


def test_what_torch_drew_is_differentiated_by_its_kernel(stock):
    call = torch.ops.aten._scaled_dot_product_flash_attention_backward
    q, k, v = heads_first()
    out, lse, ends_q, ends_k, *lengths, words, unused, _ = (
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.3)
    )
    stock.result = q, k, v
    given = q, q, k, v, out, lse, ends_q, ends_k, *lengths
    call(*given, 0.3, False, words, unused)
    assert not stock.called
    call(*given, 0.3, False, words.view(torch.uint64), unused)
    assert stock.called == ["_scaled_dot_product_flash_attention_backward"]


@pytest.mark.parametrize("is_packed", [False, True])
def test_what_another_forward_pass_left_is_differentiated_by_its_kernel(stock, is_packed):
    """Its log-sum-exp may have another shape, of which fa3 would read what is not there."""
    call = torch.ops.aten._flash_attention_backward
    q, k, v = torch.randn(3, 50, 4, 64, dtype=torch.bfloat16)
    ends = torch.tensor([0, 20, 50], dtype=torch.int32)
    lengths = ends, ends, 30, 30
    if not is_packed:
        q, k, v = (x[None] for x in (q, k, v))
        lengths = None, None, 50, 50
    out, lse, words, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths, 0.0, True, False
    )
    stock.result = q, k, v

    def differentiate(**changes):
        stock.called.clear()
        given = {"d_out": out, "q": q, "k": k, "v": v, "out": out, "lse": lse} | changes
        found = call(*given.values(), *lengths, 0.0, True, words, unused)
        return found, bool(stock.called)

    expected, is_stock = differentiate()
    assert not is_stock
    strided = lse.mT.contiguous().mT
    found, is_stock = differentiate(lse=strided)
    assert not is_stock and all(map(torch.equal, found, expected))
    padded = lse.new_zeros(2, 4, 30) if is_packed else F.pad(lse, (0, 14))
    for other in (padded, lse[..., :-1], lse.mT, lse.double(), lse.flatten()):
        assert differentiate(lse=other)[1]
    for name in ("d_out", "out"):
        for other in (out[..., :32], out.float(), out[..., :3, :]):
            assert differentiate(**{name: other})[1]


@needs_registry  # Before 2.11 `varlen_attn` has no window_size either.
def test_packed_sequences(stock):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q, k, v = torch.randn(3, 50, 4, 64, dtype=torch.bfloat16)
    ends = torch.tensor([0, 20, 50], dtype=torch.int32)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    for window in ((-1, -1), (-1, 0), (8, 0)):
        out = varlen.varlen_attn(q, k, v, ends, ends, 30, 30, window_size=window)
        expected = fa3.flash_attn_varlen_func(q, k, v, ends, ends, 30, 30, window_size=window)
        assert torch.equal(out, expected)
        d_out = torch.randn_like(out)
        found, wanted = (torch.autograd.grad(x, inputs, d_out) for x in (out, expected))
        assert all(map(torch.equal, found, wanted))
    assert not stock.called


def test_packed_sequences_with_lengths_that_fa3_does_not_read(stock):
    call = torch.ops.aten._flash_attention_backward
    q, d_out = torch.randn(2, 50, 4, 64, dtype=torch.bfloat16)
    state, ends = torch.zeros(2, dtype=torch.uint64), torch.tensor([0, 20, 50])
    lse, unused = torch.zeros(4, 50), torch.empty(0)
    stock.result = q, q, q
    for ends_k in (ends, None):
        call(d_out, q, q, q, q, lse, ends.int(), ends_k, 30, 30, 0.0, True, state, unused)
    call(d_out, q, q, q, q, lse, ends.int(), ends.int(), 30, 30, 0.5, True, state, unused)
    assert stock.called == 3 * ["_flash_attention_backward"]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_wanted", [False, True])
def test_gradients_have_a_fixed_order_if_torch_wants_it(stock, monkeypatch, is_wanted, is_packed):
    compute = Mock(wraps=integration.run_backward)
    monkeypatch.setattr(integration, "run_backward", compute)
    torch.use_deterministic_algorithms(is_wanted)
    try:
        if is_packed:
            varlen = pytest.importorskip("torch.nn.attention.varlen")
            q = torch.randn(50, 4, 64).bfloat16().requires_grad_()
            ends = torch.tensor([0, 20, 50], dtype=torch.int32)
            out = varlen.varlen_attn(q, q, q, ends, ends, 30, 30)
        else:
            q, _, _ = (x.requires_grad_() for x in heads_first())
            out = torch.ops.aten._scaled_dot_product_flash_attention(q, q, q)[0]
        torch.autograd.grad(out, q, torch.ones_like(out))
    finally:
        torch.use_deterministic_algorithms(False)
    compute.assert_called_once()
    assert compute.call_args.kwargs["deterministic"] == is_wanted and not stock.called


def test_a_kernel_that_writes_to_a_tensor_of_the_callers(stock):
    operator = getattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace", None)
    if operator is None:
        pytest.skip("this torch has no such operator")
    q, k, v = torch.randn(3, 2, 30, 4, 64, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    lse = operator(out, q, k, v, None, None, 30, 30, 0.0, True, False)
    expected = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


@needs_registry  # Before 2.11 an operator's kernel can be replaced only once.
def test_removing_brings_back_what_was_there(stock, monkeypatch):
    q, k, v = heads_first()
    second = integration.activate("CPU")
    second.remove()
    torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)
    assert not stock.called


@needs_registry
def test_registered_by_name(monkeypatch):
    from torch.nn.attention import _registry

    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", {})
    made = []
    monkeypatch.setattr(integration, "stock_kernel", lambda name, key: made.append((name, key)))
    integration.register()
    assert torch_attention.list_flash_attention_impls() == ["fa3"]
    torch_attention.activate_flash_attention_impl("fa3")
    assert torch_attention.current_flash_attention_impl() == "fa3"
    torch_attention.restore_flash_attention_impl()
    assert torch_attention.current_flash_attention_impl() is None
    assert made == [(f"aten::{name}", "CUDA") for name in integration.KERNELS]


def test_a_torch_without_the_kernels_is_told_what_it_lacks():
    with pytest.raises(RuntimeError, match="torch's flash attention for MPS, which this torch"):
        integration.activate("MPS")


@pytest.mark.parametrize("absent", ["register", "restore"])
def test_an_older_torch_is_told_what_it_lacks(absent, monkeypatch):
    monkeypatch.delattr(torch_attention, f"{absent}_flash_attention_impl", raising=False)
    with pytest.raises(RuntimeError, match=r"from torch 2.11 on, this is"):
        integration.register()


# ---------------------------------------------------------------------------------------- GPU


@pytest.fixture
def active():
    """Activate fa3 on the GPU."""
    integration.register()
    torch_attention.activate_flash_attention_impl("fa3")
    yield
    torch_attention.restore_flash_attention_impl()


@needs_registry
@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [True, False])
def test_sdpa_on_a_gpu(active, device, monkeypatch, is_causal):
    run = Mock(wraps=integration.attend_into)
    monkeypatch.setattr(integration, "attend_into", run)
    q, k, v = (x.to(device).requires_grad_() for x in heads_first(seqlen=300))
    with torch_attention.sdpa_kernel(torch_attention.SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    d_out = torch.randn_like(out)
    found = out, *torch.autograd.grad(out, (q, k, v), d_out)
    run.assert_called_once()
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    with torch_attention.sdpa_kernel(torch_attention.SDPBackend.MATH):
        exact = F.scaled_dot_product_attention(*inputs, is_causal=is_causal)
    expected = exact, *torch.autograd.grad(exact, inputs, d_out.double())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=3e-2, rtol=3e-2)


@needs_registry
@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [True, False])
def test_gradients_of_sdpa_in_a_graph_on_a_gpu(active, device, monkeypatch, transposed):
    """Inductor checks the strides of what comes back."""
    run = Mock(wraps=integration.differentiate)
    monkeypatch.setattr(integration, "differentiate", run)

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    inputs = [x.to(device).requires_grad_() for x in heads_first(seqlen=300, transposed=transposed)]
    torch.compiler.reset()
    out, expected = torch.compile(attend, fullgraph=True)(*inputs), attend(*inputs)
    d_out = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(x, inputs, d_out) for x in (out, expected))
    assert run.call_count == 2
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
