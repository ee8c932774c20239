"""What `warmup` must know of a model: from a table of well-known ones, or from a `config.json`.

Needs the standard library only: the command line lists the names before anything else is imported.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fa3.problem import FP8_UNIT, HEAD_DIM_UNIT, LEAST_FLOAT, MAX_HEAD_DIM, MOST_FLOAT, Window

SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}  # the command line's names of dtypes
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

FLAGS = {"causal": "--full", "window_size": "--window"}
"""The command line's names of options of `warmup`, where these differ."""

ENCODERS = ("albert", "bert", "deberta-v2", "distilbert", "electra", "modernbert", "roberta", "vit")
"""Values of `model_type` of models that hide no keys, unless they say `is_decoder`."""

CAUSAL = Window(right=0)

MUST_BE_CONFIG = "preset must be a model's config.json"

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
    has_fp8_cache: bool = False  # whether its cache is float8_e4m3fn

    def check(self) -> None:
        """Raise ValueError unless there are kernels for such a model."""
        if min(self.heads_q, self.heads_kv) < 1 or self.heads_q % self.heads_kv:
            raise ValueError(
                "heads must be query heads and key/value heads that divide them, got "
                f"{self.heads_q},{self.heads_kv}"
            )
        if self.heads_q > MOST_HEADS:
            raise ValueError(f"heads must be at most {MOST_HEADS} query heads, got {self.heads_q}")
        for name, size in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if size % HEAD_DIM_UNIT or not 0 < size <= MAX_HEAD_DIM:
                raise ValueError(
                    f"{name} must be a multiple of {HEAD_DIM_UNIT} up to {MAX_HEAD_DIM}, got {size}"
                )
        if self.dtype not in SHORT_DTYPES.values():
            raise ValueError(f"dtype must be bf16 or fp16, got {self.dtype!r}")
        if self.has_fp8_cache and (self.head_dim % FP8_UNIT or self.head_dim_v % FP8_UNIT):
            raise ValueError(
                f"head_dim and head_dim_v must be multiples of {FP8_UNIT} with a cache in FP8, got "
                f"{self.head_dim} and {self.head_dim_v}"
            )
        if self.softcap != 0 and not LEAST_FLOAT <= self.softcap <= MOST_FLOAT:
            raise ValueError(
                f"softcap must be 0 (none) or positive and finite in float32, got {self.softcap}"
            )


def sliding(keys: int) -> Window:
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
    "mistral-7b": Model(32, 8, 128, 128, windows=(sliding(4096),)),
    # Gemma Team (arXiv 2408.00118), table 1 and section 2: every other layer has the window.
    "gemma2-9b": Model(16, 8, 256, 256, windows=(sliding(4096), CAUSAL), softcap=50.0),
    # OpenAI (arXiv 2508.10925), section 2.3: every other layer has the window.
    "gpt-oss": Model(64, 8, 64, 64, windows=(sliding(128), CAUSAL), sinks=True),
}
"""Well-known models, with where their sizes are from."""


LAYERS_WITHOUT_KERNELS = ("linear_attention", "conv", "mamba", "recurrent")
"""Types of layers in a `config.json` that do not attend."""


class ConfigFile:
    """A Hugging Face `config.json`; raises ValueError where it is not as a model's must be."""

    def __init__(self, path: Path) -> None:
        self.path, self.fields = path, {}
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{MUST_BE_CONFIG}, got {path}: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{MUST_BE_CONFIG}, got {path}: it holds no object")
        self.fields = fields
        # Models that also see pictures have the language model's part of its own.
        self.fields = {**fields, **(self.get("text_config", "an object", dict) or {})}

    def get(self, name: str, what: str, *kinds: type) -> Any:
        """Return a field of one of these types, which `what` describes; None if not there."""
        value = self.fields.get(name)
        if value is not None and type(value) not in kinds:
            raise ValueError(f"{self.path} must have {what} {name!r}, got {value!r:.200}")
        return value

    def number(self, *names: str) -> int:
        """Return the first of some integers that is there."""
        name = next((name for name in names if self.fields.get(name) is not None), names[0])
        value = self.get(name, "an integer", int)
        if value is None:
            how = "got None; else give --heads and --head-dim (heads and head_dim)"
            raise ValueError(f"{self.path} must have an integer {name!r}, {how}")
        return value

    def model(self) -> Model:
        """Return the attention of the causal decoder that the file describes."""
        fields, kind = self.fields, self.fields.get("model_type")
        if fields.get("is_encoder_decoder") or (kind in ENCODERS and not fields.get("is_decoder")):
            raise ValueError(
                f"preset must be the config.json of a causal decoder, got {self.path} of "
                f"{kind!r}: give heads, head_dim and causal=False instead (--heads, --head-dim and "
                "--full)"
            )
        heads_q = heads_kv = self.number("num_attention_heads", "n_head", "num_heads")
        if fields.get("multi_query") is True and not fields.get("new_decoder_architecture"):
            heads_kv = 1
        elif any(fields.get(name) is not None for name in ("num_key_value_heads", "num_kv_heads")):
            heads_kv = self.number("num_key_value_heads", "num_kv_heads")
        if fields.get("qk_rope_head_dim"):
            # Multi-head latent attention, as DeepSeek's.
            head_dim = self.number("qk_nope_head_dim") + self.number("qk_rope_head_dim")
            head_dim_v = self.number("v_head_dim")
        elif fields.get("head_dim") is not None:
            head_dim_v = head_dim = self.number("head_dim")
        else:
            head_dim_v = head_dim = self.number("hidden_size", "n_embd") // max(1, heads_q)
        softcap = self.get("attn_logit_softcapping", "a number", int, float) or 0.0
        if abs(softcap) > MOST_FLOAT:
            most = f"{MOST_FLOAT:.3g}"
            raise ValueError(f"{self.path} has a softcap above {most}, got {softcap!r:.50}")
        dtype = fields.get("dtype") or fields.get("torch_dtype") or "bfloat16"
        sizes = heads_q, heads_kv, head_dim, head_dim_v
        return Model(*sizes, dtype, self.windows(), float(softcap), kind == "gpt_oss")

    def windows(self) -> tuple[Window, ...]:
        """Return what the layers see, each window once.
        Without a list of layers, a window may be one of all layers or of some: both are returned.
        """
        keys = self.get("sliding_window", "an integer", int)
        if not keys or self.fields.get("use_sliding_window") is False:
            return (CAUSAL,)
        if keys < 0:
            raise ValueError(f"{self.path} must have a positive 'sliding_window', got {keys}")
        known = {"sliding_attention": sliding(keys), "full_attention": CAUSAL}
        layers = self.get("layer_types", "a list", list) or list(known)
        attending = [layer for layer in layers if layer not in LAYERS_WITHOUT_KERNELS]
        unknown = [layer for layer in attending if layer not in list(known)]
        if unknown or not attending:
            came = repr(unknown[0]) if unknown else "none of them"
            raise ValueError(f"{self.path} must have layer_types of {list(known)}, got {came:.200}")
        return tuple(dict.fromkeys(known[layer] for layer in attending))


def preset_of(preset: str | Path) -> Model:
    """The well-known model of this name, or the model of a `config.json`."""
    if isinstance(preset, str) and preset in PRESETS:
        return PRESETS[preset]
    if str(preset).endswith(".json"):
        return ConfigFile(Path(preset)).model()
    raise ValueError(
        f"preset must be one of {sorted(PRESETS)} or the path of a config.json, got {preset!r}"
    )


def model_of(preset: str | Path | None, dtype: str | None = None, **options: object) -> Model:
    """Return the model that the options of `warmup` describe; None stands for a default.
    Raises ValueError if options are missing, do not go together, or no kernel can run the model."""
    named: dict[str, Any] = {name: one for name, one in options.items() if one is not None}
    if preset is not None:
        if named:
            flags = {name: FLAGS.get(name, f"--{name.replace('_', '-')}") for name in named}
            typed = ", ".join(f"{name}={one} ({flags[name]})" for name, one in named.items())
            raise ValueError(
                f"preset {str(preset)!r} says heads, head_dim, mask, softcap and sinks; it does "
                f"not go with {typed}"
            )
        model = preset_of(preset)
    elif "heads" in named and "head_dim" in named:
        window = named.get("window_size", CAUSAL if named.get("causal", True) else Window())
        (heads_q, heads_kv), head_dim = named["heads"], named["head_dim"]
        modifiers = {name: named[name] for name in ("softcap", "sinks") if name in named}
        head_dim_v = named.get("head_dim_v", head_dim)
        model = Model(heads_q, heads_kv, head_dim, head_dim_v, windows=(window,), **modifiers)
    else:
        raise ValueError(
            f"heads and head_dim must be given, or a preset; got heads {options.get('heads')} and "
            f"head_dim {options.get('head_dim')}"
        )
    if dtype is not None:
        model = replace(model, dtype=SHORT_DTYPES.get(dtype, dtype))
    model.check()
    return model
