"""What `warmup` must know of a model, and a table of well-known ones.

Needs the standard library only: the command line lists the names before anything else is imported.
"""

from dataclasses import dataclass, replace

from fa3.problem import HEAD_DIM_UNIT, LEAST_FLOAT, MAX_HEAD_DIM, MOST_FLOAT, Window

SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
"""The command line's names of dtypes."""

ROTARIES = {"halves": False, "pairs": True, "none": None}
"""Rotary embeddings by what turns together -> `rotary_interleaved`; None for no embedding."""

PAGE_SIZES = (0, 64)
"""Page sizes of caches by default; 0 stands for a cache without pages."""

CALLS = {
    "dense": "flash_attn_func",
    "packed": "flash_attn_varlen_func",
    "cache": "flash_attn_with_kvcache",
    "paged": "flash_attn_varlen_func with page_table, as vLLM calls it",
}
"""Kinds of calls through which a model may be run: each kind has kernels of its own."""

CAUSAL = Window(right=0)

MOST_HEADS = 1024
"""Query heads of a model, at most: with more, calls would have no room for the tiles of some sizes
that the planner is asked about."""


@dataclass(frozen=True, slots=True)
class Model:
    """The attention of a model, on one GPU.

    Fields:
        heads_q, heads_kv: query heads, and key/value heads.
        head_dim, head_dim_v: columns of q and k, and of v.
        dtype: of q, k and v.
        windows: what its layers see; several if they differ.
        softcap: bound of the scores; 0 for none.
        sinks: whether heads have sinks.
    """

    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str = "bfloat16"
    windows: tuple[Window, ...] = (CAUSAL,)
    softcap: float = 0.0
    sinks: bool = False

    def check(self) -> None:
        """Raise ValueError unless there are kernels for such a model."""
        if min(self.heads_q, self.heads_kv) < 1 or self.heads_q % self.heads_kv:
            raise ValueError(
                "heads must be query heads and key/value heads that divide them, got "
                f"{self.heads_q},{self.heads_kv}"
            )
        if self.heads_q > MOST_HEADS:
            raise ValueError(f"heads must be at most {MOST_HEADS} query heads, got {self.heads_q}")
        for name in ("head_dim", "head_dim_v"):
            size = getattr(self, name)
            if size % HEAD_DIM_UNIT or not 0 < size <= MAX_HEAD_DIM:
                raise ValueError(
                    f"{name} must be a multiple of {HEAD_DIM_UNIT} up to {MAX_HEAD_DIM}, got {size}"
                )
        if self.dtype not in SHORT_DTYPES.values():
            raise ValueError(f"dtype must be bf16 or fp16, got {self.dtype!r}")
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


def model_of(
    preset: str | None,
    heads: tuple[int, int] | None,
    head_dim: int | None,
    head_dim_v: int | None,
    dtype: str,
    window: Window | None,
    softcap: float,
    sinks: bool,
) -> Model:
    """The model that the options describe; `warmup` says what they mean.

    Raises:
        ValueError: options are missing, do not go together, or no kernel can run the model.
    """
    dtype = SHORT_DTYPES.get(dtype, dtype)
    if preset is not None:
        if preset not in PRESETS:
            raise ValueError(f"preset must be one of {sorted(PRESETS)}, got {preset!r}")
        options: dict[str, object] = {
            "heads": heads,
            "head_dim": head_dim,
            "head_dim_v": head_dim_v,
            "mask": window,
            "softcap": softcap or None,
            "sinks": sinks or None,
        }
        given = [f"{name} {value}" for name, value in options.items() if value is not None]
        if given:
            raise ValueError(
                f"preset {preset!r} says heads, head_dim, mask, softcap and sinks; got beside it "
                + ", ".join(given)
            )
        model = replace(PRESETS[preset], dtype=dtype)
    else:
        if heads is None or head_dim is None:
            raise ValueError(
                f"heads and head_dim must be given, or a preset; got heads {heads} and head_dim "
                f"{head_dim}"
            )
        windows = (CAUSAL if window is None else window,)
        columns_v = head_dim if head_dim_v is None else head_dim_v
        model = Model(*heads, head_dim, columns_v, dtype, windows, softcap, sinks)
    model.check()
    return model
