"""Every architecture that docs/transformers.md lists attends with fa3, and rightly."""

import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip(
    "transformers", minversion="5.23", reason="needs Transformers 5.23 or newer"
)

from fa3.integrations import transformers as integration  # noqa: E402

integration.register()

PAGE = Path(__file__).parents[1] / "docs" / "transformers.md"
MODELS = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)

SIZES = {
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


def make_model(name: str) -> torch.nn.Module:
    """Return a small model of an architecture with random weights."""
    model_class = getattr(transformers, name)
    default = model_class.config_class()
    experts = {key: value for key, value in EXPERTS.items() if hasattr(default, key)}
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**SIZES, **experts)).to(torch.bfloat16).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0, 0.08)
    return model


def test_the_page_lists_about_twenty():
    assert len(set(MODELS)) == len(MODELS) >= 20


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_are_as_near_to_float32_as_eager_attention_s(name, monkeypatch):
    calls = []
    attend = integration.flash_attn_func

    def counted(*operands, **options):
        calls.append(options)
        return attend(*operands, **options)

    monkeypatch.setattr(integration, "flash_attn_func", counted)
    model = make_model(name)
    ids = torch.randint(2, 98, (2, 40), generator=torch.Generator().manual_seed(1))
    model.set_attn_implementation("fa3")
    found = model(ids).logits.float()
    assert len(calls) == model.config.num_hidden_layers
    model.set_attn_implementation("eager")
    rounded, exact = model(ids).logits.float(), model.float()(ids).logits
    assert len(calls) == model.config.num_hidden_layers
    allowed = 2 * (rounded - exact).abs().max() + 1e-3
    assert (found - exact).abs().max() <= allowed
