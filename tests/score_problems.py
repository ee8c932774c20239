"""Scores, masks and sinks that tests draw."""

import random
from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from hypothesis import strategies as st
from problems import make_problem

import fa3
from docs.examples.documents import Documents
from docs.examples.prefix_lm import PrefixLM
from docs.examples.relative_bias import RelativeBias
from fa3.calls.modifiers import functions_of, modifier_tensors, standard_scores
from fa3.kernels.forward import Forward
from fa3.kernels.forward_launch import ForwardConfig
from fa3.problem import AttentionSpec, Problem, Window
from fa3.schedules import StaticPersistent
from fa3.scores.masks import Band, Intersection
from fa3.scores.templates import Template

NOTHING = {"softcap": 0.0, "alibi_slopes": None, "sinks": None, "score": None, "mask": None}
"""The arguments of a call that changes no scores."""


@dataclass(frozen=True)
class Gate(fa3.Score):
    """Scale the logits of each head; hide those of odd keys where a flag is set.

    A score with a plain field, a tensor of rank 1, a branch and -inf.
    """

    factor: torch.Tensor
    hides_odd: bool

    @cute.jit
    def score(self, logit, at: fa3.Position):
        scaled = logit * self.factor[at.head]
        if self.hides_odd and at.key % 2 == 1:
            scaled = -cutlass.Float32.inf
        return scaled

    def reference(self, logits, at):
        scaled = logits * self.factor[at.head]
        odd = torch.as_tensor(at.key % 2 == 1)
        return scaled.masked_fill(odd, -torch.inf) if self.hides_odd else scaled


@dataclass(frozen=True)
class Times(fa3.Score):
    """The logits of a head times a number of the tensor's and a plain one."""

    of_head: torch.Tensor
    factor: float = 1.0

    def score(self, logit, at):
        return logit * self.of_head[at.head] * self.factor

    def reference(self, logits, at):
        return logits * self.of_head[at.head] * self.factor


@dataclass(frozen=True)
class Near(fa3.Mask):
    """Keys up to a distance."""

    reach: torch.Tensor

    def visible(self, at):
        return cutlass.max(at.query - at.key, at.key - at.query) <= self.reach[at.head]

    def reference(self, at):
        return (at.query - at.key).abs() <= self.reach[at.head]


@dataclass(frozen=True)
class Span(fa3.Mask):
    """Keys [begin, end) of each head, whatever the query; its ranges say all of it."""

    begin: torch.Tensor
    end: torch.Tensor

    @cute.jit
    def visible(self, at: fa3.Position):
        return at.key >= self.begin[at.head] and at.key < self.end[at.head]

    def reference(self, at):
        return (at.key >= self.begin[at.head]) & (at.key < self.end[at.head])

    def key_range(self, rows):
        return self.begin[rows.head], self.end[rows.head]

    def open_range(self, rows):
        return self.begin[rows.head], self.end[rows.head]


@dataclass(frozen=True)
class Stairs(fa3.Mask):
    """Every 64 queries the first visible key is `step` keys further on; the ranges say so."""

    step: int

    @cute.jit
    def visible(self, at: fa3.Position):
        return at.key >= at.query // 64 * self.step

    def reference(self, at):
        return at.key >= at.query // 64 * self.step

    def key_range(self, rows):
        return rows.first // 64 * self.step, rows.seqlen_k


class Recipe(NamedTuple):
    """What of a call's modifiers shapes the code; the tensors are drawn for a problem.

    Fields:
        softcap: the cap; 0 for none.
        alibi_rank: dimensions of the slopes; 0 for none.
        sinks: "float32", "q" for the dtype of q, or None.
        score: "relative", "gate" or None.
        mask: "documents", "prefix", "span" or None.
    """

    softcap: float = 0.0
    alibi_rank: int = 0
    sinks: str | None = None
    score: str | None = None
    mask: str | None = None

    def make(self, problem: Problem, q: torch.Tensor, seed: int = 0, steepest: float = 1.0) -> dict:
        """Draw the arguments of a call.

        Args:
            q: the call's q; the tensors lie on its device.
            steepest: the largest ALiBi slope.
        """
        generator = torch.Generator(q.device).manual_seed(seed)
        batch, heads = problem.batch, problem.num_heads_q
        arguments = dict(NOTHING, softcap=self.softcap)

        def uniform(*shape: int) -> torch.Tensor:
            return torch.rand(shape, generator=generator, device=q.device)

        if self.alibi_rank:
            shape = (heads,) if self.alibi_rank == 1 else (batch, heads)
            arguments["alibi_slopes"] = steepest * uniform(*shape)
        if self.sinks:
            sinks = 12 * uniform(heads) - 3
            arguments["sinks"] = sinks.to(q.dtype) if self.sinks == "q" else sinks
        if self.score == "relative":
            arguments["score"] = RelativeBias(2 * uniform(heads, 2 * 20 + 1), reach=20)
        elif self.score == "gate":
            arguments["score"] = Gate(uniform(heads), hides_odd=True)
        if self.mask:
            arguments["mask"] = getattr(self, f"make_{self.mask}")(problem, uniform)
        return arguments

    @staticmethod
    def make_documents(problem: Problem, uniform) -> Documents:
        """Up to four documents in a row, which need not begin at the same query and key."""
        of_query, of_key = (
            (4 * uniform(problem.batch, seqlen)).sort(dim=1).values.int()
            for seqlen in (problem.seqlen_q, problem.seqlen_k)
        )
        return Documents(of_query, of_key)

    @staticmethod
    def make_prefix(problem: Problem, uniform) -> PrefixLM:
        return PrefixLM((uniform(problem.batch) * (problem.seqlen_k + 1)).int())

    @staticmethod
    def make_span(problem: Problem, uniform) -> Span:
        """Spans of which some are empty, and some go past the last key."""
        begin, end = (uniform(2, problem.num_heads_q) * 1.3 * problem.seqlen_k).int()
        return Span(begin, end)


RECIPES = st.builds(
    Recipe,
    st.sampled_from([0.0, 0.0, 2.0, 30.0]),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([None, "float32", "q"]),
    st.sampled_from([None, "relative", "gate"]),
    st.sampled_from([None, "documents", "prefix", "span"]),
)

RECIPES_WITH_GRADIENTS = RECIPES.map(lambda recipe: recipe._replace(score=None))


class Modifiers(NamedTuple):
    """What is compiled of a call's scores, mask and sinks, and what a kernel takes of them."""

    scores: tuple[Template, ...]
    mask: Template | None
    sinks: str | None
    tensors: tuple[torch.Tensor, ...] | None


def modifiers_of(q, softcap, alibi_slopes, sinks, score, mask, is_causal=False) -> Modifiers:
    functions, function_tensors = functions_of(q, score, mask)
    scores = *standard_scores(softcap, alibi_slopes, is_causal), *functions.scores
    dtype = None if sinks is None else str(sinks.dtype).removeprefix("torch.")
    tensors = modifier_tensors(alibi_slopes, function_tensors, sinks)
    return Modifiers(scores, functions.mask, dtype, tensors)


HEAD_DIMS = (
    *3 * [(64, 64), (128, 128)],
    *((256, 256), (192, 128), (40, 40), (72, 72), (96, 96), (160, 160), (192, 192)),
    *((64, 128), (128, 64), (128, 192), (192, 64), (96, 80), (64, 256), (256, 64)),
)
"""Sizes (of q and k, of v) that `random_dense` draws."""

STRUCTURES = 2 * len(HEAD_DIMS)


def random_dense(seed: int, longest: int = 2000) -> tuple[Problem, Recipe]:
    """Draw a problem without a cache, and modifiers: lengths of all sizes, equal or far apart.

    What changes the generated code is one of so many structures, since each takes seconds to
    compile. Of three, one has no modifiers; of five, one has functions of the user's.
    """
    number = seed % STRUCTURES
    code, draw = random.Random(f"structure {number}"), random.Random(seed)
    head_dim, head_dim_v = HEAD_DIMS[number % len(HEAD_DIMS)]

    def length() -> int:
        return draw.randint(1, draw.choice((1, 40, 300, longest)))

    def bound(exists: bool) -> int:
        return draw.choice((0, draw.randint(0, 200), draw.randint(0, longest))) if exists else -1

    seqlen_q = length()
    has_left, has_right = code.choice(((False, False), (True, False), (False, True), (True, True)))
    window = Window(bound(has_left), 0 if code.random() < 0.5 else bound(has_right))
    recipe = Recipe(
        code.choice((0.0, 0.0, 3.0, 30.0)),
        code.choice((0, 0, 1, 2)),
        code.choice((None, None, "float32", "q")),
    )
    if number % 5 == 0:
        score = code.choice((None, "relative", "gate"))
        mask = code.choice(("documents", "prefix", "span"))
        recipe = recipe._replace(score=score, mask=mask)
    problem = make_problem(
        draw.randint(1, 3),
        seqlen_q,
        draw.choice((seqlen_q, length())),
        draw.randint(1, 3),
        code.choice((1, 2, 4, 8)),
        head_dim,
        window,
        code.choice(("bfloat16", "float16")),
        head_dim_v,
    )
    return problem, Recipe() if number % 3 == 0 else recipe


def modify(problem: Problem, q: torch.Tensor, arguments: dict) -> tuple[Problem, Modifiers]:
    """Give a problem the modifiers of a call: its spec, and what a kernel takes."""
    is_causal = problem.window.right == 0
    modifiers = modifiers_of(q, **arguments, is_causal=is_causal)
    scores, template, sinks, _ = modifiers
    mask = Intersection(problem.spec.mask, template) if template else problem.spec.mask
    spec = replace(problem.spec, scores=scores, mask=mask, sinks=sinks)
    return replace(problem, spec=spec), modifiers


def kernel_of(function: fa3.Score | fa3.Mask) -> Forward:
    """Return a kernel of which a score or a mask of the user's is the only modifier."""
    spec, template = AttentionSpec("bfloat16", 64, 64, Band()), Template.of(function)
    if isinstance(function, fa3.Score):
        spec = replace(spec, scores=(template,))
    else:
        spec = replace(spec, mask=Intersection(spec.mask, template))
    return Forward(spec, ForwardConfig(128, 64), StaticPersistent)
