"""The benchmark of scores, as far as it needs no GPU: what it runs, checks and prints."""

import pytest
from bench_stubs import draw

from benchmarks import shapes
from benchmarks.bench_scores import BUILT_IN, FUNCTIONS, PLAIN, Modified, ModifiedReference
from benchmarks.harness import WrongOutput
from benchmarks.peers import Tensors

CELLS = [shapes.named("cost", 2, (150, 150), (4, 2), (64, 64), causal) for causal in (False, True)]


def reference_of(provider: Modified, cell: shapes.Cell, tensors: Tensors) -> ModifiedReference:
    return ModifiedReference(cell, tensors, provider.arguments(cell, tensors.q.device))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.mask)
@pytest.mark.parametrize("name", [*BUILT_IN, *FUNCTIONS])
def test_calls_pass_their_own_check_and_no_other(name, cell):
    provider = Modified(name, (BUILT_IN | FUNCTIONS)[name])
    tensors = draw(cell)
    (call,) = provider.prepare(cell, tensors).values()
    errors = reference_of(provider, cell, tensors).check(call())
    assert errors.largest <= errors.allowed < 0.05
    # Beside the plain kernel a prefix of no keys is the causal mask, and a window hides one key.
    same = name in (PLAIN, "window") or (name == "prefix" and cell.causal)
    if not same:
        with pytest.raises(WrongOutput):
            reference_of(Modified(PLAIN, []), cell, tensors).check(call())
