"""What `warmup` must know of a model: from a table or `config.json`.

Needs the standard library only: the command line lists the names before anything else is imported.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa3.problem import FP8, FP8_UNIT, Problem, Window

SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "e4m3": FP8}
"""The command line's names of dtypes."""

CACHE_DTYPES = "auto", "fp8"  # of a cache: the model's dtype, or float8_e4m3fn

ROTARIES = {"halves": False, "pairs": True, "none": None}
"""Rotary embeddings by what turns together -> `rotary_interleaved`; None for no embedding."""

PAGE_SIZES = (0, 64)  # page sizes of caches by default; 0 stands for a cache without pages

CALLS = {
    "dense": "flash_attn_func",
    "packed": "flash_attn_varlen_func",
    "cache": "flash_attn_with_kvcache",
    "paged": "flash_attn_varlen_func with page_table, as vLLM calls it, or flash_attn_with_kvcache "
    "with page_table and cu_seqlens_q",
}
"""Kinds of calls through which a model may be run: each kind has kernels of its own."""

ENCODERS = ("albert", "bert", "deberta-v2", "distilbert", "electra", "modernbert", "roberta", "vit")
"""Values of `model_type` of models that hide no keys, unless they say `is_decoder`."""

LAYERS_WITHOUT_KERNELS = ("linear_attention", "conv", "mamba", "recurrent")
"""Types of layers in a `config.json` that do not attend."""

CAUSAL = Window(right=0)

MOST_HEADS = 1024
"""Query heads of a model, at most: with more, calls would have no room for the tiles of some sizes
that the planner is asked about."""


@dataclass(frozen=True, slots=True)
class Model:
    """The attention of a model, on one GPU."""

    # heads_q, heads_kv: query heads, and key/value heads.
    heads_q: int
    heads_kv: int
    # head_dim, head_dim_v: columns of q and k, and of v.
    head_dim: int
    head_dim_v: int
    dtype: str = "bfloat16"  # of q, k and v
    windows: tuple[Window, ...] = (CAUSAL,)  # what its layers see; several if they differ
    softcap: float = 0.0  # bound of the scores; 0 for none
    sinks: bool = False  # whether heads have sinks
    has_fp8_cache: bool = False  # whether its cache is float8_e4m3fn, as q, k and v may be

    @property
    def is_fp8(self) -> bool:
        """Whether q, k and v are FP8."""
        return self.dtype == FP8

    @property
    def out_dtype(self) -> str:
        """Dtype of the output, and of tokens that are appended."""
        return "bfloat16" if self.is_fp8 else self.dtype

    def check(self) -> None:
        """Raise ValueError unless there are kernels for such a model."""
        heads = self.heads_q, self.heads_kv
        if min(heads) < 1 or self.heads_q % self.heads_kv or self.heads_q > MOST_HEADS:
            raise ValueError(
                f"heads must be up to {MOST_HEADS} query heads, and key/value heads that divide "
                f"them, got {heads}"
            )
        q, k, v = (
            (1, 1, self.heads_kv, d) for d in (self.head_dim, self.head_dim, self.head_dim_v)
        )
        Problem.of(q, k, v, dtype=self.dtype, softcap=self.softcap)
        if self.has_fp8_cache and (self.head_dim % FP8_UNIT or self.head_dim_v % FP8_UNIT):
            raise ValueError(
                f"head_dim and head_dim_v must be multiples of {FP8_UNIT} with a cache in FP8, got "
                f"{self.head_dim} and {self.head_dim_v}"
            )


def causal_window(keys: int) -> Window:
    """A causal window of so many keys, the query's own one included."""
    return Window(keys - 1, 0)


PRESETS = {
    # Grattafiori et al. (arXiv 2407.21783), table 3.
    "llama3-8b": Model(32, 8, 128, 128),
    "llama3-70b": Model(64, 8, 128, 128),
    # The same on one of eight GPUs.
    "llama3-70b-tp8": Model(8, 1, 128, 128),
    # Yang et al., Qwen3 (arXiv 2505.09388), table 1; head_dim as in Qwen/Qwen3-32B's config.json.
    "qwen3-32b": Model(64, 8, 128, 128),
    # Jiang et al. (arXiv 2310.06825), table 1. Later versions have no window.
    "mistral-7b": Model(32, 8, 128, 128, windows=(causal_window(4096),)),
    # Gemma Team (arXiv 2408.00118), table 1 and section 2: every other layer has the window.
    "gemma2-9b": Model(16, 8, 256, 256, windows=(causal_window(4096), CAUSAL), softcap=50.0),
    # OpenAI (arXiv 2508.10925), section 2.3: every other layer has the window.
    "gpt-oss": Model(64, 8, 64, 64, windows=(causal_window(128), CAUSAL), sinks=True),
}
"""Well-known models, with where their sizes are from."""


def preset_of(preset: str | Path) -> Model:
    """Return a well-known model by name, or a `config.json`'s model."""
    if isinstance(preset, str) and preset in PRESETS:
        return PRESETS[preset]
    if not str(preset).endswith(".json"):
        raise ValueError(
            f"preset must be one of {sorted(PRESETS)} or the path of a config.json, got {preset!r}"
        )
    try:
        fields = json.loads(Path(preset).read_text(encoding="utf-8"))
        # Models that also see pictures have the language model's part of its own.
        return decoder_of({**fields, **(fields.get("text_config") or {})})
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"preset must be the config.json of a causal decoder, got {preset}: {error}. For other "
            "models give heads and head_dim (--heads and --head-dim)"
        ) from error


def decoder_of(fields: dict[str, Any]) -> Model:
    """Return the attention of the causal decoder that a `config.json` describes."""
    kind = fields.get("model_type")
    if fields.get("is_encoder_decoder") or (kind in ENCODERS and not fields.get("is_decoder")):
        raise ValueError(f"a {kind!r} hides no keys, which causal=False says (--full)")
    heads_q = first_field(fields, int, "num_attention_heads", "n_head", "num_heads")
    heads_kv = first_field(fields, int, "num_key_value_heads", "num_kv_heads", default=heads_q)
    if fields.get("multi_query") is True and not fields.get("new_decoder_architecture"):
        heads_kv = 1
    if fields.get("qk_rope_head_dim"):
        # Multi-head latent attention, as DeepSeek's.
        head_dim = sum(first_field(fields, int, f"qk_{part}_head_dim") for part in ("nope", "rope"))
        head_dim_v = first_field(fields, int, "v_head_dim")
    else:
        columns = 0 if fields.get("head_dim") else first_field(fields, int, "hidden_size", "n_embd")
        head_dim = first_field(fields, int, "head_dim", default=columns // max(1, heads_q))
        head_dim_v = head_dim
    return Model(
        heads_q,
        heads_kv,
        head_dim,
        head_dim_v,
        first_field(fields, str, "dtype", "torch_dtype", default="bfloat16"),
        windows_of(fields),
        first_field(fields, int | float, "attn_logit_softcapping", default=0.0),
        sinks=kind == "gpt_oss",
    )


def windows_of(fields: dict[str, Any]) -> tuple[Window, ...]:
    """Return what the layers see, each window once.
    Without a list of layers, a window may be one of all layers or of some: both are returned."""
    keys = first_field(fields, int, "sliding_window", default=0)
    if not keys or fields.get("use_sliding_window") is False:
        return (CAUSAL,)
    windows = {"sliding_attention": causal_window(keys), "full_attention": CAUSAL}
    layers = first_field(fields, list, "layer_types", default=list(windows))
    attending = [layer for layer in layers if layer not in LAYERS_WITHOUT_KERNELS]
    if keys < 0 or not attending or not {*attending} <= {*windows}:
        raise ValueError(f"its layers must have one of {list(windows)}, got {layers!r:.200}")
    return tuple(dict.fromkeys(windows[layer] for layer in attending))


def first_field(fields: dict[str, Any], kind: Any, *names: str, default: Any = None) -> Any:
    """Return the first field that is there; ValueError names it otherwise."""
    name = next((name for name in names if fields.get(name) is not None), names[0])
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(
            f"it must have {name!r} as {getattr(kind, '__name__', kind)}, got {value!r:.200}"
        )
    return value
