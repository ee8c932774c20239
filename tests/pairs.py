"""Few combinations of a test's parameters, in which any two values of two parameters meet.

A fault mostly needs one value, or two that meet. The product of all parameters has each such pair
many times over, and on a GPU most combinations are a kernel to compile. Tests give what they would
have the product of, and beside it the combinations of three and more that have to be there.
"""

import itertools
from collections.abc import Iterable, Sequence

import pytest


def pairs(*corners: dict, **values: Sequence) -> pytest.MarkDecorator:
    """Parametrize a test with combinations that have every pair of values.

    Args:
        corners: combinations that have to be there.
        values: the values of each parameter.
    """
    given = [[corner[name] for name in values] for corner in corners]
    return pytest.mark.parametrize(tuple(values), combine(list(values.values()), given))


def places(names: str, cpu: Iterable, gpu: Iterable) -> pytest.MarkDecorator:
    """Parametrize a test with `where` and values: some on the CPU, others on a GPU.

    Args:
        names: of the values, with commas between them.
        cpu, gpu: the values of each case: a tuple if there are several names.
    """
    few = "," not in names
    cases = [
        pytest.param(where, *((values,) if few else values), marks=marks)
        for where, chosen, marks in (("cpu", cpu, ()), ("cuda", gpu, pytest.mark.gpu))
        for values in chosen
    ]
    return pytest.mark.parametrize(["where", *names.split(",")], cases)


def combine(values: Sequence[Sequence], corners: Sequence[Sequence] = ()) -> list[tuple]:
    """Combinations, one value of each list, after the corners: always that with the most new pairs.

    The same ones in every process, as workers that share tests want it.
    """
    lists = [list(of_one) for of_one in values]

    def pairs_of(row: tuple[int, ...]) -> set:
        return set(itertools.combinations(enumerate(row), 2))

    product = {row: pairs_of(row) for row in itertools.product(*(range(len(x)) for x in lists))}
    rows = [
        tuple(of_one.index(value) for of_one, value in zip(lists, corner, strict=True))
        for corner in corners
    ]
    missing = set().union(*product.values()).difference(*(product[row] for row in rows))
    while missing:
        rows.append(max(product, key=lambda row: len(product[row] & missing)))
        missing -= product[rows[-1]]
    return [tuple(of_one[i] for of_one, i in zip(lists, row, strict=True)) for row in rows]
