"""Writes docs/support.md: what each function takes, found by calling it.

    python -m docs.pages.support

Each option is given to each function in a small call on the CPU. docs/conventions.md says what only
a GPU refuses. Tilings come from the planner, versions from pyproject.toml.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

import fa3
from docs.examples.documents import Documents
from docs.examples.relative_bias import RelativeBias
from fa3.planning.costs import H200
from fa3.planning.tilings import choose_config
from fa3.problem import FP8_HEAD_DIM_UNIT, HEAD_DIM_UNIT, MAX_HEAD_DIM, Problem, Window
from fa3.scores.masks import Band

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "support.md"

TITLE = """# Support matrix

What each function takes. `python -m docs.pages.support` writes this page from the code, and a test
fails if it is out of date. Each option was given to each function in a small call on the CPU. *yes*
means that the call worked, *-* that there is no such argument. Otherwise the cell names the error.
What GPUs refuse beyond that is in [conventions.md](conventions.md#what-is-refused).
"""

BATCH, SEQLEN, HEADS_Q, HEADS_KV, HEAD_DIM, PAGE_SIZE = 2, 8, 4, 2, 16, 4
FP8_HEAD_DIMS = FP8_HEAD_DIM_UNIT, FP8_HEAD_DIM_UNIT
YES = "yes"

Inputs = dict[str, object]


def dense(dtype: torch.dtype, head_dims: tuple[int, int], heads_kv: int) -> Inputs:
    """Return what `flash_attn_func` needs."""
    q = torch.zeros(BATCH, SEQLEN, HEADS_Q, head_dims[0], dtype=dtype)
    k, v = (torch.zeros(BATCH, SEQLEN, heads_kv, size, dtype=dtype) for size in head_dims)
    return {"q": q, "k": k, "v": v}


def packed(dtype: torch.dtype, head_dims: tuple[int, int], heads_kv: int) -> Inputs:
    """What `flash_attn_varlen_func` needs."""
    ends = torch.arange(0, (BATCH + 1) * SEQLEN, SEQLEN, dtype=torch.int32)
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    longest = {"max_seqlen_q": SEQLEN, "max_seqlen_k": SEQLEN}
    tensors = {name: t.flatten(0, 1) for name, t in dense(dtype, head_dims, heads_kv).items()}
    return {**tensors, **lengths, **longest}


def cached(dtype: torch.dtype, head_dims: tuple[int, int], heads_kv: int) -> Inputs:
    """What `flash_attn_with_kvcache` needs."""
    given = dense(dtype, head_dims, heads_kv)
    caches = {"k_cache": given["k"], "v_cache": given["v"]}
    return {"q": given["q"][:, :1].contiguous(), **caches, "cache_seqlens": SEQLEN - 2}


FUNCTIONS: dict[str, tuple[Callable, Callable[..., Inputs]]] = {
    "flash_attn_func": (fa3.flash_attn_func, dense),
    "flash_attn_varlen_func": (fa3.flash_attn_varlen_func, packed),
    "flash_attn_with_kvcache": (fa3.flash_attn_with_kvcache, cached),
}
"""Each function, and what makes its inputs."""

DENSE, PACKED, CACHED = FUNCTIONS

CACHES = "k_cache", "v_cache"

SHAPES = {
    DENSE: (BATCH, SEQLEN, HEADS_Q, HEAD_DIM),
    PACKED: (BATCH * SEQLEN, HEADS_Q, HEAD_DIM),
    CACHED: (BATCH, 1, HEADS_Q, HEAD_DIM),
}
"""Of q and of the output."""


@dataclass(frozen=True)
class Option:
    """Something to ask of a function.

    Fields:
        arguments: how it is asked of every function that has all of these arguments.
        of: how it is asked of some functions alone; of the others it is not.
    """

    name: str
    arguments: Inputs = field(default_factory=dict)
    of: dict[str, Inputs] = field(default_factory=dict)

    def arguments_of(self, function: str) -> Inputs | None:
        """The arguments of a call; None where the function has none for it."""
        parameters = inspect.signature(FUNCTIONS[function][0]).parameters
        chosen = self.of.get(function) if self.of else self.arguments
        if chosen is None or not set(chosen) <= set(parameters):
            return None
        make = FUNCTIONS[function][1]
        return make(torch.bfloat16, (HEAD_DIM, HEAD_DIM), HEADS_KV) | chosen


def integers(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


NEW: Inputs = {name: zeros(BATCH, 1, HEADS_KV, HEAD_DIM) for name in "kv"}
ROTARY: Inputs = {name: torch.zeros(SEQLEN, HEAD_DIM // 2) for name in ("rotary_cos", "rotary_sin")}

PAGES = BATCH * SEQLEN // PAGE_SIZE
TABLE: Inputs = {"page_table": torch.arange(PAGES, dtype=torch.int32).view(BATCH, -1)}
IN_PAGES = zeros(PAGES, PAGE_SIZE, HEADS_KV, HEAD_DIM)
LENGTHS = integers(5, SEQLEN)
IDS = torch.zeros(BATCH, SEQLEN, dtype=torch.int32)
SCORE: Inputs = {"score": RelativeBias(torch.zeros(HEADS_Q, 9), reach=4)}
MASK: Inputs = {"mask": Documents(IDS, IDS)}


def options() -> Iterator[Option]:
    """Yield the options that are tried."""
    yield Option("causal", {"causal": True})
    yield Option("sliding window", {"window_size": (3, 0)})
    yield Option("softcap", {"softcap": 30.0})
    yield Option("ALiBi", {"alibi_slopes": torch.ones(HEADS_Q)})
    yield Option("sinks", {"sinks": torch.zeros(HEADS_Q)})
    yield Option("score of your own", SCORE)
    yield Option("mask of your own", MASK)
    yield Option("log-sum-exp (`return_lse`)", {"return_lse": True})
    outs = {name: {"out": zeros(*shape)} for name, shape in SHAPES.items()}
    yield Option("`out`", of=outs)
    wide = {name: {"out": torch.zeros(shape)} for name, shape in SHAPES.items()}
    yield Option("`out` in float32", of=wide)
    yield Option("tile order of your own (`schedule`)", {"schedule": lambda tiles: tiles})
    yield Option("`seqused_q`, `seqused_k`", {"seqused_q": LENGTHS, "seqused_k": LENGTHS})
    on_pages: Inputs = {
        "k": IN_PAGES, "v": IN_PAGES, "cu_seqlens_k": None, "seqused_k": LENGTHS, **TABLE
    }  # fmt: skip
    in_cache: Inputs = {"k_cache": IN_PAGES, "v_cache": IN_PAGES, **TABLE}
    yield Option("pages", of={PACKED: on_pages, CACHED: in_cache})
    for name, option in (
        ("a score of your own", SCORE),
        ("a mask of your own", MASK),
        ("`seqused_q`", {"seqused_q": LENGTHS}),
        ("dropout", {"dropout_p": 0.1}),
        ("`num_splits` above 1", {"num_splits": 2}),
    ):
        yield Option(f"pages with {name}", of={PACKED: on_pages | option})
    yield Option("append", of={CACHED: NEW})
    for name, interleaved in (("pairs", True), ("halves", False)):
        rotary = {**NEW, **ROTARY, "rotary_interleaved": interleaved}
        yield Option(f"append, rotary embedding by {name}", of={CACHED: rotary})
    yield Option("left padding (`cache_leftpad`)", {"cache_leftpad": integers(1, 0)})
    yield Option(
        "chosen rows of the cache (`cache_batch_idx`)", {"cache_batch_idx": integers(1, 0)}
    )
    packed = {
        "q": zeros(3, HEADS_Q, HEAD_DIM), "cu_seqlens_q": integers(0, 1, 3), "max_seqlen_q": 2
    }  # fmt: skip
    yield Option("packed queries on a cache (`cu_seqlens_q`)", of={CACHED: packed})
    yield Option("`batch_invariant`", {"batch_invariant": True})
    yield Option("`num_splits` above 1", {"num_splits": 2})
    yield Option("`pack_gqa=True`", {"pack_gqa": True})
    yield Option("`pack_gqa=False`", {"pack_gqa": False})
    yield Option("`sm_margin`", {"sm_margin": 4})
    yield Option("`deterministic`", {"deterministic": True})
    yield Option("dropout", {"dropout_p": 0.1})
    yield Option("`qv`", {"qv": zeros(BATCH, SEQLEN, HEADS_Q, HEAD_DIM)})
    fp8, descale = torch.float8_e4m3fn, {"k_descale": torch.ones(BATCH, HEADS_KV)}
    pages = {name: tensor.to(fp8) for name, tensor in in_cache.items() if name in CACHES}
    of_packed = {"k": IN_PAGES.to(fp8), "v": IN_PAGES.to(fp8)}
    yield Option("pages in FP8", of={PACKED: on_pages | of_packed, CACHED: in_cache | pages})
    no_pages = cached(fp8, (HEAD_DIM, HEAD_DIM), HEADS_KV)
    no_pages = {name: no_pages[name] for name in CACHES} | descale
    without = {CACHED: no_pages}
    for name in (DENSE, PACKED):
        without[name] = FUNCTIONS[name][1](fp8, FP8_HEAD_DIMS, HEADS_KV) | descale
    yield Option("`k_descale` with tensors in FP8, without pages", of=without)
    scaled = {PACKED: on_pages | of_packed | descale, CACHED: in_cache | pages | descale}
    yield Option("`k_descale` with pages in FP8", of=scaled)
    yield Option("`attention_chunk`", {"attention_chunk": 4})
    differentiable = {name: {"q": zeros(*shape).requires_grad_()} for name, shape in SHAPES.items()}
    yield Option("gradients", of=differentiable)


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = ((64, 64), (72, 72), (128, 128), (192, 128), (64, 256), (256, 256), (264, 264))
TILED = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
HEADS = {"MHA": HEADS_Q, "GQA": HEADS_KV, "MQA": 1}


def answer(function: str, arguments: Inputs | None) -> str:
    """Return what a function does with arguments: yes, or the error that it raises."""
    if arguments is None:
        return "-"
    try:
        FUNCTIONS[function][0](**arguments)
    except (NotImplementedError, TypeError, ValueError) as error:
        return f"`{type(error).__name__}`"
    return "yes"


def table(head: Sequence[str], lines: Iterator[Sequence[str]]) -> str:
    """A table in Markdown."""
    rows = (head, ["---"] * len(head), *lines)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def answers(name: str, of: Callable[[str], Inputs | None]) -> list[str]:
    """Return a line of a table: the answer of every function."""
    return [name, *(answer(function, of(function)) for function in FUNCTIONS)]


def option_lines() -> Iterator[list[str]]:
    for option in options():
        yield answers(option.name, option.arguments_of)


def operand_lines() -> Iterator[list[str]]:
    """Dtypes, head sizes and numbers of heads."""
    same, usual = torch.bfloat16, (HEAD_DIM, HEAD_DIM)
    cases = {
        **{str(dtype).removeprefix("torch."): (dtype, usual, HEADS_KV) for dtype in DTYPES},
        "float8_e4m3fn": (torch.float8_e4m3fn, FP8_HEAD_DIMS, HEADS_KV),
        **{f"head sizes {q}, {v}": (same, (q, v), HEADS_KV) for q, v in HEAD_DIMS},
        **{name: (same, usual, heads_kv) for name, heads_kv in HEADS.items()},
    }
    for name, case in cases.items():
        yield answers(name, lambda function, case=case: FUNCTIONS[function][1](*case))


def tiling_lines() -> Iterator[list[str]]:
    """The planner's tilings of long sequences."""
    for head_dim, head_dim_v in (
        (64, 64),
        (96, 96),
        (128, 128),
        (192, 128),
        (192, 192),
        (256, 256),
    ):
        for name, window in (("none", Window()), ("causal", Window(right=0))):
            spec = fa3.AttentionSpec("bfloat16", head_dim, head_dim_v, Band.of(window))
            config = choose_config(Problem(spec, 1, 1 << 14, 1 << 14, 8, 1, window), H200)
            yield [
                f"{head_dim}, {head_dim_v}",
                name,
                f"{config.tile_m} x {config.tile_n}",
                f"{config.q_stages}, {config.kv_stages}",
                str(config.cluster),
                f"{config.smem_bytes(spec):,}",
            ]


TESTED = {
    "Python": "3.11",
    "nvidia-cutlass-dsl": "4.7.1 (kernels compile), 4.8.1",
    "cuda-python": "13.4.4",
    "apache-tvm-ffi": "0.1.15",
    "torch-c-dlpack-ext": "0.1.5",
    "numpy": "2.4.6",
    "torch": "2.10.0, 2.13.0, 2.14.1",
    "transformers": "5.16.1, 5.24.0",
}
"""Versions that the quick tests on the CPU were run with."""


def version_lines() -> Iterator[list[str]]:
    """What pyproject.toml asks for, and what of it was tested."""
    text = (ROOT / "pyproject.toml").read_text()
    yield ["Python", re.search(r'requires-python = "(.*)"', text)[1], TESTED["Python"]]
    required = re.search(r"\ndependencies = \[\n(.*?)\n\]", text, re.DOTALL)[1]
    optional = re.search(r"\ntransformers = \[(.*)\]", text)[1]
    for requirement in re.findall(r'"(.*)"', f"{required}\n{optional}"):
        name, versions = re.fullmatch(r"([\w-]+)(?:\[\w+\])?(.*)", requirement).groups()
        yield [name, versions or "any", TESTED.get(name, "")]


def page() -> str:
    """The page as it should be."""
    of_gpu = (
        "The planner's first candidate for 16k tokens on an H200, with as many key/value heads as "
        "query heads. It compares this one with others. Causal heads of 128 that share key/value "
        "heads get clusters of 2: [pairs of heads](planning.md#how-the-planner-chooses)."
    )
    sizes = f"Head sizes are multiples of {HEAD_DIM_UNIT} up to {MAX_HEAD_DIM}. Some of them:"
    tilings = (
        "head sizes",
        "mask",
        "tile",
        "stages of Q; of K and V",
        "CTAs of a cluster",
        "bytes of shared memory",
    )
    return "\n".join(
        (
            TITLE,
            "## Options\n",
            table(("option", *(f"`{name}`" for name in FUNCTIONS)), option_lines()),
            f"## Operands\n\n{sizes}\n",
            table(("operands", *(f"`{name}`" for name in FUNCTIONS)), operand_lines()),
            f"## Tilings\n\n{of_gpu}\n",
            table(tilings, tiling_lines()),
            "## Versions\n",
            table(("package", "versions", "tested with"), version_lines()),
        )
    )


if __name__ == "__main__":
    PAGE.write_text(page())
