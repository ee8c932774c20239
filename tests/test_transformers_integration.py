"""fa3 as an attention implementation of Transformers: small models of all architectures."""

import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from pairs import pairs
from problems import make_operands, make_problem
from reference import positions, visible
from torch._subclasses.fake_tensor import FakeTensorMode

import fa3
from fa3.problem import Window

transformers = pytest.importorskip(
    "transformers", minversion="5.16.1", reason="needs Transformers 5.16.1 or newer"
)

from transformers import StaticCache, masking_utils  # noqa: E402

from fa3.integrations import transformers as integration  # noqa: E402

integration.register()

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

SMALL = {
    "vocab_size": 99,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 98,
}
WINDOW = 8
BOTH_LAYERS = ["sliding_attention", "full_attention"]

FAMILIES = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "qwen3": ("Qwen3", {}),
    "gemma2": (
        "Gemma2",
        {"sliding_window": WINDOW, "layer_types": BOTH_LAYERS, "attn_logit_softcapping": 5.0},
    ),
    "gpt_oss": (
        "GptOss",
        {
            "sliding_window": WINDOW,
            "layer_types": BOTH_LAYERS,
            "num_local_experts": 2,
            # A choice of experts would depend on rounding.
            "num_experts_per_tok": 2,
        },
    ),
}


families = pytest.mark.parametrize("family", FAMILIES)
devices = pytest.mark.parametrize("device_type", DEVICES)


def make_model(family: str, device_type: str = "cpu") -> torch.nn.Module:
    """Return a model with random weights, bfloat16, that attends with fa3."""
    name, options = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**SMALL | options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(device_type, torch.bfloat16)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1 or "sinks" in parameter_name:
                # Weights that make attention matter.
                parameter.normal_(0, 1 if "sinks" in parameter_name else 0.08)
    model.set_attn_implementation("fa3")
    return model.eval()


def tokens(*shape: int, device_type: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, 98, shape, generator=generator).to(device_type)


def as_eager(model: torch.nn.Module, run):
    """Return what a function gives with eager attention."""
    model.set_attn_implementation("eager")
    try:
        return run()
    finally:
        model.set_attn_implementation("fa3")


def in_float32(model: torch.nn.Module, run):
    """Return what a function gives in eager attention and float32."""
    model.float()
    try:
        return as_eager(model, run)
    finally:
        model.bfloat16()


def check_logits(model: torch.nn.Module, run) -> None:
    """Assert that an output is as near to float32's as eager attention's in bfloat16."""
    found = run().float()
    rounded, exact = as_eager(model, run).float(), in_float32(model, run)
    allowed = 2 * (rounded - exact).abs().max() + 1e-3
    assert (found - exact).abs().max() <= allowed


PADDED = {"left": slice(0, 11), "right": slice(29, 40), "holes": slice(9, 13)}


def padded(ids: torch.Tensor, side: str | None) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return an attention mask, or None, and which tokens count."""
    kept = torch.ones_like(ids)
    if side is not None:
        kept[0, PADDED[side]] = 0
    return None if side is None else kept, kept.bool()


@families
@devices
@torch.no_grad()
def test_prefill(family, device_type):
    check_prefill(make_model(family, device_type), (None, *PADDED))


def check_prefill(model: torch.nn.Module, sides: tuple) -> None:
    """Check the logits of tokens that count, with padding on each of these sides."""
    ids = tokens(2, 40, device_type=model.device.type)
    for side in sides:
        mask, seen = padded(ids, side)
        check_logits(
            model, lambda mask=mask, seen=seen: model(ids, attention_mask=mask).logits[seen]
        )


@devices
@pairs(family=tuple(FAMILIES), cache=("dynamic", "static"), padded=(False, True))
@torch.no_grad()
def test_every_step_of_a_generation(family, device_type, cache, padded):
    """Each step's logits are those of the whole sequence, computed at once without a cache."""
    model, ids = make_model(family, device_type), tokens(2, 24, device_type=device_type)
    kept = torch.ones_like(ids)
    if padded:
        kept[0, :5] = 0
    position = (kept.cumsum(1) - 1).clamp(min=0)
    at_once = in_float32(
        model, lambda: model(ids, attention_mask=kept, position_ids=position).logits
    )
    rounded = as_eager(model, lambda: model(ids, attention_mask=kept, position_ids=position).logits)
    allowed = 3 * (rounded - at_once)[kept.bool()].abs().max() + 1e-3
    past = StaticCache(config=model.config, max_cache_len=32) if cache == "static" else None
    begin = 0
    for end in (15, 16, 17, 21, 22, 23, 24):
        result = model(
            ids[:, begin:end],
            attention_mask=kept[:, :end],
            position_ids=position[:, begin:end],
            past_key_values=past,
            use_cache=True,
        )
        past, part = result.past_key_values, slice(begin, end)
        difference = (result.logits.float() - at_once[:, part])[kept[:, part].bool()]
        assert difference.abs().max() <= allowed
        begin = end


@families
@devices
def test_generate(family, device_type):
    for cache in (None, "static"):
        check_generated(family, device_type, cache)


def check_generated(family: str, device_type: str, cache: str | None) -> None:
    """Assert that generated tokens are the most likely ones."""
    model, ids = make_model(family, device_type), tokens(2, 12, device_type=device_type)
    kept = torch.ones_like(ids)
    kept[0, :4] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "disable_compile": True}
    found = model.generate(ids, attention_mask=kept, cache_implementation=cache, **options)
    assert found.shape == (2, 20)
    # Where two tokens are as likely bfloat16 may choose either: the logits decide.
    with torch.no_grad():
        all_kept = torch.cat([kept, kept.new_ones(2, 8)], dim=1)
        position = (all_kept.cumsum(1) - 1).clamp(min=0)
        logits = in_float32(
            model, lambda: model(found, attention_mask=all_kept, position_ids=position).logits
        )[:, 11:-1]
    chosen = logits.gather(2, found[:, 12:, None])[..., 0]
    ended = (found[:, 12:] == 98).cumsum(1) - (found[:, 12:] == 98).int() > 0
    assert ((logits.amax(dim=2) - chosen)[~ended] < 0.05).all()


def gradients_of(model: torch.nn.Module, run) -> dict[str, torch.Tensor]:
    model.zero_grad()
    run().backward()
    return {
        name: parameter.grad.float()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def check_gradients(model: torch.nn.Module, run) -> None:
    """Assert that gradients are as near to float32's as eager attention's in bfloat16."""
    found = gradients_of(model, run)
    rounded = as_eager(model, lambda: gradients_of(model, run))
    exact = in_float32(model, lambda: gradients_of(model, run))
    assert found.keys() == rounded.keys()
    for name, one in found.items():
        error, allowed = ((x - exact[name]).norm() for x in (one, rounded[name]))
        # Sums that nearly cancel: eager attention may be lucky.
        assert error <= 3 * allowed + 0.08 * exact[name].norm() + 1e-6, name


@families
@devices
def test_a_training_step(family, device_type):
    model, ids = make_model(family, device_type), tokens(2, 24, device_type=device_type)
    model.train()
    check_gradients(model, lambda: model(ids, labels=ids).loss)


PACKED = (9, 4, 17)


def packed(device_type: str, has_lengths: bool) -> tuple[torch.Tensor, dict]:
    """Return tokens of packed sequences, and what says where they lie."""
    position = torch.cat([torch.arange(n) for n in PACKED])[None].to(device_type)
    ends = torch.tensor([0, *PACKED], device=device_type).cumsum(0).int()
    lengths = {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(PACKED),
        "max_length_k": max(PACKED),
    }
    options = {"position_ids": position} | (lengths if has_lengths else {})
    return tokens(1, sum(PACKED), device_type=device_type), options


def logits_of_packed(model: torch.nn.Module, ids: torch.Tensor, options: dict) -> torch.Tensor:
    """Return logits of packed sequences; with eager attention, of one after the other."""
    if model.config._attn_implementation == "fa3":
        return model(ids, use_cache=False, **options).logits
    parts = ids.split(PACKED, dim=1)
    return torch.cat([model(part, use_cache=False).logits for part in parts], dim=1)


packings = pytest.mark.parametrize(
    ("family", "has_lengths"),
    # GPT-OSS's model does not look at position ids for packed sequences, whatever attends.
    [(family, n) for family in FAMILIES for n in (True, False) if n or family != "gpt_oss"],
)


@packings
@devices
@torch.no_grad()
def test_packed_sequences(family, device_type, has_lengths):
    model = make_model(family, device_type)
    ids, options = packed(device_type, has_lengths)
    check_logits(model, lambda: logits_of_packed(model, ids, options))


@packings
@devices
def test_packed_training(family, device_type, has_lengths):
    model = make_model(family, device_type).train()
    ids, options = packed(device_type, has_lengths)
    check_gradients(model, lambda: logits_of_packed(model, ids, options).float().square().mean())


def describe_packed(window: int | None = None, **options) -> torch.Tensor:
    """Return what the layers get as the mask of packed sequences, by their positions."""
    _, given = packed("cpu", False)
    length, position = sum(PACKED), given["position_ids"]
    mask_function = masking_utils.causal_mask_function
    if window is not None:
        mask_function = masking_utils.sliding_window_causal_mask_function(window)
    sequences = masking_utils.find_packed_sequence_indices(position)
    mask_function = masking_utils.and_masks(
        mask_function, masking_utils.packed_sequence_mask_function(sequences)
    )
    options = {
        "mask_function": mask_function, "local_size": window, "allow_is_causal_skip": False,
        "config": transformers.MistralConfig(sliding_window=WINDOW),
    } | options  # fmt: skip
    return integration.describe_mask(1, length, length, **options)


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_mask_of_packed_sequences_says_where_they_end(window):
    found = describe_packed(window)
    assert found.dtype == torch.int32 and found.shape == (1, 1, len(PACKED) + 1, 1)
    assert found.flatten().tolist() == [0, 9, 13, 30]


def test_a_mask_that_says_more_stays_a_mask():
    for options in (
        {"mask_function": lambda batch, head, query, key: (query >= key) & (key != 4)},
        {"mask_function": lambda batch, head, query, key: query + key >= 0},
        {"window": WINDOW - 1},
        {"attention_mask": torch.arange(sum(PACKED))[None] != 20},
    ):
        assert describe_packed(**options).dtype == torch.bool


def test_a_model_under_fake_tensors():
    model, ids = make_model("llama"), tokens(1, 8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(ids, use_cache=False).logits.shape == (1, 8, 99)


@pytest.mark.compiles
@pytest.mark.parametrize(("family", "has_lengths"), [("llama", False), ("gemma2", True)])
def test_no_graph_breaks_in_packed_training(family, has_lengths):
    model = make_model(family).train()
    ids, options = packed("cpu", has_lengths)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found, expected = (
        gradients_of(
            model, lambda run=run: run(ids, use_cache=False, **options).logits.float().mean()
        )
        for run in (compiled, model)
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-2)


@pytest.mark.compiles
@torch.no_grad()
def test_no_graph_breaks_in_a_step_with_a_static_cache():
    model, ids = make_model("gpt_oss"), tokens(2, 12)
    caches = [StaticCache(config=model.config, max_cache_len=32) for _ in range(2)]
    for cache in caches:
        model(ids, past_key_values=cache)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for step in tokens(3, 2, 1):
        found, expected = (
            run(step, past_key_values=cache).logits
            for run, cache in zip((compiled, model), caches, strict=True)
        )
        assert torch.equal(found, expected)


def with_dropout(model: torch.nn.Module, dropout_p: float) -> torch.nn.Module:
    """Make a model drop weights of attention when it is trained."""
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = dropout_p
    return model.train()


@families
@devices
def test_dropout(family, device_type, monkeypatch):
    """Eager attention gets the mask that fa3 draws."""
    state = torch.tensor([11], device=device_type)
    monkeypatch.setattr("fa3.calls.modifiers.draw_rng_state", lambda device: state)

    def drop(weights, p, training):
        return weights * fa3.dropout_mask(state, p, *weights.shape) / (1 - p)

    monkeypatch.setattr(torch.nn.functional, "dropout", drop)
    check_prefill(with_dropout(make_model(family, device_type), 0.25), (None, "left", "holes"))


def test_what_is_refused():
    model, ids = make_model("llama"), tokens(1, 8)
    with_dropout(model, 0.1)
    cache = StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(NotImplementedError, match="dropout of attention is not supported on a sta"):
        model(ids, past_key_values=cache)
    model.eval()
    with pytest.raises(TypeError, match="attention_mask must be a bool mask"):
        model(ids, attention_mask=torch.zeros(1, 1, 8, 8))
    with pytest.raises(TypeError, match=r"q must be torch.bfloat16, torch.float16 or"):
        model.float()(ids)


MASKS = {
    "after padding": lambda: integration.AfterPadding(torch.tensor([0, 70, 300]).int()),
    "listed": lambda: integration.Listed(torch.ones(3, 400, 400, dtype=torch.uint8).tril()),
}


@pytest.mark.parametrize("mask", MASKS)
def test_ranges_of_masks_hide_nothing_that_is_seen(mask):
    problem = make_problem(3, 400, 400, 2, 2, window=Window(right=0))
    q, k, v = make_operands(problem)
    mask = MASKS[mask]()
    found = fa3.flash_attn_func(q, k, v, causal=True, mask=mask)
    at = positions(3, torch.arange(4), 400, 400)
    seen = mask.reference(at).expand(3, 4, 400, 400) & visible(400, 400, problem.window)
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, enable_gqa=True
    ).nan_to_num()
    torch.testing.assert_close(found.double(), expected.transpose(1, 2), atol=2e-2, rtol=2e-2)


# ------------------------------------------------------------------------- all architectures

PAGE = Path(__file__).parents[1] / "docs" / "transformers.md"
ARCHITECTURES = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)

EXPERTS = {
    "num_experts": 2,
    "num_local_experts": 2,
    "n_routed_experts": 2,
    # All experts are taken: a choice among them would depend on rounding.
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_every_layer_of_an_architecture_is_a_call(name, monkeypatch):
    pytest.importorskip("transformers", minversion="5.23", reason="needs Transformers 5.23")
    attend = Mock(wraps=integration.flash_attn_func)
    monkeypatch.setattr(integration, "flash_attn_func", attend)
    model_class = getattr(transformers, name)
    default = model_class.config_class()
    experts = {key: value for key, value in EXPERTS.items() if hasattr(default, key)}
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**SMALL, **experts)).to(torch.bfloat16).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0, 0.08)
    model.set_attn_implementation("fa3")
    check_logits(model, lambda: model(tokens(2, 40)).logits)
    assert attend.call_count == model.config.num_hidden_layers
