"""Explains compile errors in users' scores and masks by their own lines.

The compiler traces a user's method as part of the kernel, so its errors may name any line between
the two. `explain`, for `fa3.running.compiler`, finds the method and the line. `check_class`, for
`fa3.calls.modifiers`, says before every call, on the CPU too, what the source alone shows.
"""

import dataclasses
import functools
import inspect
import linecache
import re
import traceback
from pathlib import Path
from typing import NamedTuple

import cutlass
from cutlass.base_dsl.common import DSLBaseError

from fa3.problem import REMEMBERED, AttentionSpec

PYTHON_MATH = re.compile(r"(?<![\w.])math\.(\w+)\(")  # a call of Python's module `math`

OURS = Path(__file__).parent
THEIRS = Path(cutlass.__file__).parent

EXPECTED = {
    "score": "score(self, logit, at) must return one number",
    "visible": "visible(self, at) must return one bool",
    "key_range": "key_range(self, rows) must return two integers (begin, end)",
    "open_range": "open_range(self, rows) must return two integers (begin, end)",
}
"""The users' methods that kernels call, and the signature that each must have."""


class SourcePlace(NamedTuple):
    """A line of source."""

    file: str
    line: int

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def is_in(self, folder: Path) -> bool:
        return folder in Path(self.file).parents


class Method(NamedTuple):
    """A user's method that a kernel calls."""

    kind: type
    name: str
    file: str
    lines: range

    @classmethod
    def of(cls, kind: type, name: str) -> "Method | None":
        """The class's method of this name; None if missing or ours."""
        function = inspect.unwrap(getattr(kind, name, None))
        if not inspect.isfunction(function):
            return None
        code = function.__code__
        last = max(line for _, _, line in code.co_lines() if line)
        method = cls(kind, name, code.co_filename, range(code.co_firstlineno, last + 1))
        return None if method.definition.is_in(OURS) else method

    @property
    def definition(self) -> SourcePlace:
        """The line of its `def`."""
        places = [SourcePlace(self.file, line) for line in self.lines]
        return next((place for place in places if place.text.startswith("def ")), places[0])

    def error(self, cause: BaseException, places: list[SourcePlace]) -> ValueError:
        """The error that the user sees, with cause and source lines."""
        if not linecache.getlines(self.file):
            return ValueError(
                f"{self.kind.__name__}.{self.name} does not compile: its source is not in a file "
                "(a class typed at Python's prompt, or made by exec). Save the class in a .py "
                "file and import it"
            )
        is_dsl = isinstance(cause, DSLBaseError)
        message = cause.message if is_dsl else " ".join(str(cause).split("\n"))
        advice = (cause.suggestion if is_dsl else None) or []
        if places == [self.definition]:
            advice = EXPECTED[self.name]
        if places and (called := PYTHON_MATH.search(places[-1].text)):
            advice = (
                f"math.{called[1]} takes numbers of Python, but this is a value of the kernel: use "
                f"cute.math.{called[1]}"
            )
        return ValueError(
            "\n  ".join(
                [
                    f"{self.kind.__name__}.{self.name} does not compile: {message}",
                    *(f"{place.file}:{place.line}: {place.text}" for place in places),
                    *([advice] if isinstance(advice, str) else advice),
                ]
            )
        )


def explain(error: Exception, spec: AttentionSpec) -> ValueError | None:
    """Trace a compile error of this spec to a user's method.
    Returns an error that names the class, the method, its line of source and the cause; None if the
    error does not come from a user's score or mask."""
    kinds = [template.kind for template in (*spec.scores, *spec.mask.templates)]
    all_methods = (Method.of(kind, name) for kind in kinds for name in EXPECTED)
    methods = [method for method in all_methods if method]
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    for cause in reversed(causes):
        places = places_of(cause)
        for i, place in enumerate(places):
            for method in methods:
                if place.file == method.file and place.line in method.lines:
                    inner = [p for p in places[i:] if not (p.is_in(OURS) or p.is_in(THEIRS))]
                    return method.error(cause, list(dict.fromkeys(inner)))
    # No line of a user's method failed. Did our code fail where it calls one, or uses its result?
    calls = [place for place in places_of(error) if place.is_in(OURS)][-2:]
    for method in methods:
        if any(f".{method.name}(" in place.text for place in calls):
            return method.error(error, [method.definition])
    return None


@functools.lru_cache(maxsize=REMEMBERED)
def check_class(kind: type, base: type, name: str) -> None:
    """Raise unless objects of a class can go to a kernel.
    `base` is `Score` or `Mask`, `name` the method that kernels call. TypeError if the class is no
    frozen dataclass or does not define the method, ValueError if the method does not compile."""
    if not (dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen):
        raise TypeError(f"{kind.__name__} must be a frozen dataclass")
    if getattr(kind, name) is getattr(base, name):
        signature, _, _ = EXPECTED[name].partition(" must ")
        raise TypeError(f"{kind.__name__} must define {signature}, a @cute.jit method")
    method = Method.of(kind, name)
    if method is None:
        return
    function = inspect.unwrap(getattr(kind, name))
    parameters = tuple(inspect.signature(getattr(base, name)).parameters)
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        raise method.error(error, [method.definition]) from error


def places_of(error: BaseException) -> list[SourcePlace]:
    """The lines of an error's traceback, outermost first, then its own."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [SourcePlace(frame.filename, frame.lineno) for frame in frames]
    if isinstance(error, DSLBaseError) and error.filename and error.line:
        places.append(SourcePlace(error.filename, error.line))
    return places
