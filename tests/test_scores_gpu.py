"""Scores, masks and sinks on a Hopper GPU, against dense attention in float64."""

import math
import random
from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass.cute as cute
import pytest
import torch
from pairs import pairs
from problems import make_operands, make_problem, poisoned_allocations
from reference import check_attention, largest_difference
from score_problems import NOTHING, Recipe, RelativeBias, Span, Stairs, modify

import fa3
from fa3.planning.planner import plan_forward
from fa3.problem import NO_BOUND, Problem, Window

pytestmark = pytest.mark.gpu

CAUSAL = Window(right=0)
SCHEDULES = ("single", "static", "list")
"""Those that give the same bits; the planner may also choose one that merges parts of tiles."""

WINDOWS = (Window(), CAUSAL, Window(100, 0), Window(100, 30), Window(left=70))
SIZES = (
    *3 * [(64, 64), (128, 128)],
    *((96, 96), (256, 256), (192, 128), (40, 40), (192, 192), (64, 128), (128, 64)),
)
STRUCTURES = 39
WITH_FUNCTIONS = 5
"""One of so many structures has functions of the user's, whose kernels every process compiles."""

EVERYTHING = Recipe(20.0, 2, "float32", "relative", "documents")
BUILT_IN = Recipe(20.0, 1, "q")
EDGES = ((1, 1), (1, 2000), (2000, 1), (127, 129), (191, 161))
"""(queries, keys)."""


def attend(q, k, v, arguments: dict, **others):
    """Run the kernel into memory that is NaN wherever it does not write."""
    with poisoned_allocations():
        return fa3.flash_attn_func(q, k, v, return_lse=True, **arguments, **others)


def check(problem: Problem, arguments: dict, operands) -> tuple[torch.Tensor, torch.Tensor]:
    window = problem.window
    out, lse = attend(*operands, arguments, window_size=window)
    check_attention(out, lse, *operands, window=window, **arguments)
    return out, lse


def check_recipe(problem: Problem, recipe: Recipe, device, seed: int = 0):
    operands = make_operands(problem, seed, device)
    return check(problem, recipe.make(problem, operands[0], seed), operands)


# ------------------------------------------------------------------------------- combinations


class Structure(NamedTuple):
    """What of a random combination shapes the code."""

    dtype: str
    head_dims: tuple[int, int]
    qhead_per_kvhead: int
    window: str
    recipe: Recipe
    write_lse: bool
    schedule: str | None

    @classmethod
    def draw(cls, number: int) -> "Structure":
        draw = random.Random(f"structure {number}")
        recipe = Recipe(
            draw.choice((0.0, 0.0, 3.0, 30.0)),
            draw.choice((0, 1, 1, 2)),
            draw.choice((None, None, "float32", "q")),
        )
        if number % WITH_FUNCTIONS == 0:
            score = draw.choice((None, "relative", "gate"))
            masks = ("documents", "prefix", "span")
            recipe = recipe._replace(
                score=score, mask=draw.choice(masks if score is None else (None, *masks))
            )
        return cls(
            draw.choice(("bfloat16", "bfloat16", "float16")),
            SIZES[number % len(SIZES)],
            draw.choice((1, 2, 4)),
            draw.choice(("full", "causal", "causal", "left", "behind", "band")),
            recipe,
            draw.random() < 0.75,
            draw.choice((None, *SCHEDULES)),
        )


def random_window(kind: str, seqlen_q: int, seqlen_k: int, draw: random.Random) -> Window:
    """Draw a window whose bounds hide something, as far as the lengths allow it."""
    left = draw.randint(0, max(0, draw.choice((100, seqlen_k)) - 2))
    right = draw.randint(1, max(1, draw.choice((100, seqlen_q)) - 2))
    return {
        "full": Window(),
        "causal": CAUSAL,
        "left": Window(left, NO_BOUND),
        "behind": Window(left, 0),
        "band": Window(left, right),
    }[kind]


@pytest.mark.parametrize("seed", range(2 * STRUCTURES))
def test_random_combinations(seed, device):
    structure = Structure.draw(seed % STRUCTURES)
    draw = random.Random(seed)

    def length() -> int:
        return draw.randint(2, draw.choice((2, 40, 300, 2000)))

    seqlen_q = length()
    seqlen_k = draw.choice((seqlen_q, length()))
    problem = make_problem(
        draw.randint(1, 3),
        seqlen_q,
        seqlen_k,
        draw.randint(1, 3),
        structure.qhead_per_kvhead,
        structure.head_dims[0],
        random_window(structure.window, seqlen_q, seqlen_k, draw),
        structure.dtype,
        structure.head_dims[1],
    )
    operands = make_operands(problem, seed, device)
    steepest = draw.choice((1.0, 1.0, 0.05, -0.05))
    arguments = structure.recipe.make(problem, operands[0], seed, steepest)
    with poisoned_allocations():
        result = fa3.flash_attn_func(
            *operands,
            window_size=problem.window,
            return_lse=structure.write_lse,
            schedule=structure.schedule,
            **arguments,
        )
    out, lse = result if structure.write_lse else (result, None)
    check_attention(out, lse, *operands, window=problem.window, **arguments)


@pairs(lengths=EDGES, window=WINDOWS, recipe=(BUILT_IN, EVERYTHING))
def test_edges_of_tiles(lengths, window, recipe, device):
    check_recipe(make_problem(2, *lengths, 2, 2, 64, window), recipe, device)


@pytest.mark.parametrize("head_dim", range(8, 257, 40))
def test_head_dims(head_dim, device):
    check_recipe(make_problem(2, 300, 400, 2, 2, head_dim, CAUSAL), BUILT_IN, device)


@pytest.mark.parametrize("window", [Window(), CAUSAL, Window(1000, 0)], ids=str)
def test_many_tiles_for_every_cluster(window, device):
    """Several rounds of a persistent schedule: rows' slopes and sinks change with the tile."""
    check_recipe(make_problem(2, 4096, 4096, 8, 2, 128, window), BUILT_IN, device)


# ----------------------------------------------------------------------------------- one by one


@pytest.mark.timeout(600)
@pytest.mark.parametrize("window", [Window(), CAUSAL, Window(3000, 0)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_steep_alibi_over_long_sequences(head_dim, window, device):
    """Biases down to -16384, and a slope that still tells keys apart at that distance."""
    problem = make_problem(1, 16384, 16384, 2, head_dim=head_dim, window=window)
    slopes = torch.tensor([1.0, 2.0**-10], device=device)
    check(problem, NOTHING | {"alibi_slopes": slopes}, make_operands(problem, device=device))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_slopes_may_be_negative(window, device):
    problem = make_problem(2, 900, 1300, 2, 2, 128, window)
    slopes = torch.tensor([-0.1, -0.01, 0.0, 0.5], device=device)
    check(problem, NOTHING | {"alibi_slopes": slopes}, make_operands(problem, device=device))


@pairs(
    sink=(-math.inf, -1e30, -1e4, -5.0, 20.0, 1e4, 1e30),
    softcap=(0.0, 20.0),
    window=(Window(), CAUSAL),
)
def test_extreme_sinks(sink, window, softcap, device):
    """With a bounded softcap the softmax has no reference that would follow the scores."""
    problem = make_problem(2, 500, 300, 2, 1, 128, window)
    q, k, v = make_operands(problem, device=device)
    sinks = torch.tensor([sink, 1.0], device=device)
    out, lse = check(problem, NOTHING | {"sinks": sinks, "softcap": softcap}, (q, k, v))
    plain, plain_lse = attend(q, k, v, {"softcap": softcap}, window_size=window)
    if sink == -math.inf:
        assert (lse[:, 0].isinf() == plain_lse[:, 0].isinf()).all()
        torch.testing.assert_close(out[:, :, 0], plain[:, :, 0], rtol=0.01, atol=1e-5)
    if sink >= 1e4:
        assert (out[:, :, 0] == 0).all()


@pytest.mark.parametrize("sinks", [None, (0.5, -math.inf)])
def test_rows_without_keys(sinks, device):
    problem = make_problem(2, 500, 300, 2, 1, 128, CAUSAL)
    sinks = None if sinks is None else torch.tensor(sinks, device=device)
    operands = make_operands(problem, device=device)
    out, lse = check(problem, NOTHING | {"sinks": sinks}, operands)
    expected = torch.full((2,), -math.inf, device=device) if sinks is None else sinks
    assert (out[:, :200] == 0).all()
    torch.testing.assert_close(lse[:, :, :200], expected[:, None].expand(2, 2, 200))


@pytest.mark.parametrize("sinks", [None, (0.5, -1.0)])
def test_a_mask_that_hides_everything(sinks, device):
    problem = make_problem(1, 500, 900, 2, 1, 128)
    begin, end = torch.tensor([[0, 700], [0, 300]], device=device).int()
    sinks = None if sinks is None else torch.tensor(sinks, device=device)
    arguments = NOTHING | {"mask": Span(begin, end), "sinks": sinks}
    out, _ = check(problem, arguments, make_operands(problem, device=device))
    assert (out == 0).all()


@pytest.mark.parametrize("schedule", ["dynamic", "list", "single"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_warpgroups_whose_keys_begin_far_apart(head_dim, schedule, device):
    """One lets more blocks go by than there are stages, while the producer still has to load them
    before it can tell which tile is next."""
    problem = make_problem(2, 300, 4096, 2, 2, head_dim)
    q, k, v = make_operands(problem, device=device)
    mask = Stairs(700)
    with poisoned_allocations():
        out, lse = fa3.flash_attn_func(q, k, v, mask=mask, schedule=schedule, return_lse=True)
    check_attention(out, lse, q, k, v, mask=mask)


@pairs(
    softcap=(1.0, 5.0, 5.5, 30.0, 60.0, 61.0, 1e4),
    window=(Window(), CAUSAL),
    dtype=("bfloat16", "float16"),
)
def test_softcap_bounds_large_logits(softcap, window, dtype, device):
    problem = make_problem(2, 700, 900, 2, 1, 128, window, dtype)
    q, k, v = make_operands(problem, device=device)
    _, lse = check(problem, NOTHING | {"softcap": softcap}, (8 * q, k, v))
    assert (lse <= softcap * (1 + 2**-11) + math.log(900) + 1e-4).all()


def test_empty_tensors(device):
    problem = make_problem(2, 70, 0, 3)
    check_recipe(problem, EVERYTHING, device)


@pytest.mark.parametrize("window", [Window(), CAUSAL, Window(300, 0)], ids=str)
def test_ranges_change_no_bit(window, device):
    """Blocks that a mask says it hides, or shows, are as if it had not said so."""

    class Unlimited(Span):
        def key_range(self, rows):
            return 0, rows.seqlen_k

        def open_range(self, rows):
            return 0, 0

    problem = make_problem(1, 1000, 1000, 2, 1, 128, window)
    operands = make_operands(problem, device=device)
    begin, end = torch.tensor([[130, 700], [800, 701]], device=device).int()
    results = [
        check(problem, NOTHING | {"mask": mask(begin, end)}, operands) for mask in (Span, Unlimited)
    ]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_classes_made_in_a_loop_do_not_collide(device):
    q, k, v = make_operands(make_problem(1, 200, 300, 2), device=device)
    outs = []
    for factor in (0.0, 3.0):

        @dataclass(frozen=True)
        class Scale(fa3.Score):
            @cute.jit
            def score(self, logit, at, factor=factor):
                return logit * factor

            def reference(self, logits, at, factor=factor):
                return logits * factor

        arguments = NOTHING | {"score": Scale()}
        out, lse = attend(q, k, v, arguments)
        check_attention(out, lse, q, k, v, **arguments)
        outs.append(out)
    assert largest_difference(*outs) > 0.1


# ------------------------------------------------------------------------------------- memory


def in_poison(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy inside of a buffer of NaN, or of huge integers."""
    poison = torch.nan if tensor.is_floating_point() else 1 << 30
    buffer = tensor.new_full([size + 16 for size in tensor.shape], poison)
    view = buffer[(slice(8, -8),) * tensor.ndim]
    return view.copy_(tensor)


def poisoned(arguments: dict) -> dict:
    """Move every tensor of a call's modifiers into poison."""

    def move(value):
        if isinstance(value, torch.Tensor):
            return in_poison(value)
        if isinstance(value, fa3.Score | fa3.Mask):
            tensors = {n: t for n, t in vars(value).items() if isinstance(t, torch.Tensor)}
            return replace(value, **{name: in_poison(t) for name, t in tensors.items()})
        return value

    return {name: move(value) for name, value in arguments.items()}


@pairs(
    recipe=(BUILT_IN, EVERYTHING, Recipe(score="gate", mask="span"), Recipe(mask="prefix")),
    lengths=((1, 1), (130, 70), (200, 333)),
    window=(CAUSAL, Window(100, 30)),
)
def test_nothing_outside_is_read(recipe, lengths, window, device):
    problem = make_problem(2, *lengths, 2, 2, 64, window)
    operands = [in_poison(tensor) for tensor in make_operands(problem, device=device)]
    arguments = recipe.make(problem, operands[0])
    out, lse = attend(*operands, poisoned(arguments), window_size=window)
    check_attention(out, lse, *operands, window=window, **arguments)


def test_tensors_may_have_any_strides(device):
    problem = make_problem(2, 300, 400, 2, 2, 128)
    operands = make_operands(problem, device=device)
    arguments = EVERYTHING.make(problem, operands[0])
    strided = arguments | {
        "alibi_slopes": arguments["alibi_slopes"].T.contiguous().T,
        "sinks": arguments["sinks"].repeat_interleave(3)[::3],
        "score": RelativeBias(arguments["score"].table.T.contiguous().T, 20),
    }
    results = (check(problem, given, operands) for given in (arguments, strided))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
def test_tensors_on_another_device_are_refused(name, device):
    q, k, v = make_operands(make_problem(1, 64, 64, 2), device=device)
    with pytest.raises(ValueError, match=f"^{name} must be on cuda.* got cpu"):
        fa3.flash_attn_func(q, k, v, **{name: torch.zeros(2)})


def test_a_function_that_does_not_compile_is_told_so(device):
    @dataclass(frozen=True)
    class Wrong(fa3.Score):
        @cute.jit
        def score(self, logit, at):
            return logit + at.keys

    q, k, v = make_operands(make_problem(1, 64, 64, 2), device=device)
    with pytest.raises(ValueError, match=r"^Wrong\.score does not compile: .*keys") as caught:
        fa3.flash_attn_func(q, k, v, score=Wrong())
    assert f"{__file__}:" in str(caught.value) and "return logit + at.keys" in str(caught.value)


# --------------------------------------------------------------------- determinism and graphs


@pytest.mark.parametrize("recipe", [BUILT_IN, EVERYTHING], ids=["built in", "everything"])
@pytest.mark.parametrize("window", [Window(), CAUSAL], ids=str)
def test_repeated_calls_give_the_same_bits(window, recipe, device):
    problem = make_problem(2, 1500, 1500, 4, 2, 128, window)
    operands = make_operands(problem, device=device)
    arguments = recipe.make(problem, operands[0])
    out, lse = check(problem, arguments, operands)
    for _ in range(100):
        again, lse_again = attend(*operands, arguments, window_size=window)
        assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pytest.mark.parametrize("recipe", [BUILT_IN, EVERYTHING], ids=["built in", "everything"])
@pytest.mark.parametrize("window", [Window(), CAUSAL], ids=str)
def test_schedules_and_clusters_give_the_same_bits(window, recipe, device):
    problem = make_problem(3, 1500, 700, 4, 2, 128, window)
    operands = make_operands(problem, device=device)
    arguments = recipe.make(problem, operands[0])
    out, lse = attend(*operands, arguments, window_size=window, schedule="list")
    check_attention(out, lse, *operands, window=window, **arguments)
    modified, _ = modify(problem, operands[0], arguments)
    config = plan_forward(modified).config
    for cluster_m in (1, 2):
        for schedule in SCHEDULES:
            plan = plan_forward(
                modified,
                config=replace(config, cluster_m=cluster_m, cluster_h=1),
                schedule=schedule,
            )
            same, same_lse = attend(*operands, arguments, window_size=window, plan=plan)
            assert torch.equal(out, same) and torch.equal(lse, same_lse), plan


@pytest.mark.parametrize("recipe", [BUILT_IN, EVERYTHING], ids=["built in", "everything"])
def test_a_cuda_graph_replays_on_new_inputs(recipe, device):
    """Slopes, sinks and tables are read anew at every replay, like q, k and v."""
    problem = make_problem(2, 700, 700, 2, 2, 128, CAUSAL)
    operands = make_operands(problem, device=device)
    arguments = recipe.make(problem, operands[0])
    fa3.flash_attn_func(*operands, causal=True, return_lse=True, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fa3.flash_attn_func(*operands, causal=True, return_lse=True, **arguments)
    for seed in (1, 2):
        new = make_operands(problem, seed, device)
        new_arguments = recipe.make(problem, new[0], seed)
        for tensor, value in zip(operands, new, strict=True):
            tensor.copy_(value)
        arguments["alibi_slopes"].copy_(new_arguments["alibi_slopes"])
        arguments["sinks"].copy_(new_arguments["sinks"])
        if recipe.score:
            arguments["score"].table.copy_(new_arguments["score"].table)
            arguments["mask"].of_query.copy_(new_arguments["mask"].of_query)
            arguments["mask"].of_key.copy_(new_arguments["mask"].of_key)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        eager_out, eager_lse = attend(*new, new_arguments, causal=True)
        assert torch.equal(out, eager_out) and torch.equal(lse, eager_lse)


def test_the_executor_computes_the_same(device):
    """But for the softcap, whose tanh is exact there."""
    problem = make_problem(1, 300, 400, 2, 2, 128, CAUSAL)
    q, k, v = make_operands(problem, device=device)
    slopes, sinks = torch.rand(4, device=device), torch.randn(4, device=device)
    out, lse = attend(q, k, v, {"alibi_slopes": slopes, "sinks": sinks}, causal=True)
    arguments = {"alibi_slopes": slopes.cpu(), "sinks": sinks.cpu()}
    cpu_out, cpu_lse = attend(q.cpu(), k.cpu(), v.cpu(), arguments, causal=True)
    torch.testing.assert_close(lse.cpu(), cpu_lse, rtol=1e-5, atol=1e-5)
    spacing = torch.finfo(out.dtype).eps * cpu_out.abs().max().item()
    assert largest_difference(out.cpu(), cpu_out) <= spacing
