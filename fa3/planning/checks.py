"""Checks of what a caller gives the planner: problems, GPUs and configs made by hand.

Sizes must be of type int: 300.0 equals 300, so caches would take the one for the other.
"""

from typing import Any

from fa3.complaints import shown
from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.gpu import Gpu
from fa3.problem import (
    ELEMENTS,
    FP8,
    FP8_HEAD_DIM_UNIT,
    HEAD_DIM_UNIT,
    MAX_HEAD_DIM,
    NO_BOUND,
    AttentionSpec,
    Problem,
    Window,
)
from fa3.scores.masks import Band


def check_types(problem: Problem, gpu: Gpu, config: ForwardConfig | None) -> None:
    """Raise unless the planner's arguments are valid."""
    for name, value, kind in (("problem", problem, Problem), ("gpu", gpu, Gpu)):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, got {shown(value)}")
    if not isinstance(config, ForwardConfig | None):
        raise TypeError(f"config must be a ForwardConfig or None, got {shown(config)}")
    check_type("gpu.name", gpu.name, str)
    check_size("gpu.num_sms", gpu.num_sms)
    check_size("gpu.l2_bytes", gpu.l2_bytes)
    for name in ("batch", "seqlen_q", "seqlen_k", "num_heads_kv"):
        check_size(f"problem.{name}", getattr(problem, name), least=0)
    check_size("problem.qhead_per_kvhead", problem.qhead_per_kvhead)
    spec, window = problem.spec, problem.window
    check_type("problem.spec", spec, AttentionSpec)
    check_type("problem.window", window, Window)
    for name, bound in window._asdict().items():
        check_type(f"problem.window.{name}", bound, int)
        if bound < NO_BOUND:
            raise ValueError(f"problem.window.{name} must be -1 (none) or more, got {bound}")
    if not spec.is_fp8 and spec.dtype not in ELEMENTS:
        kinds = [*ELEMENTS, FP8]
        raise ValueError(f"problem.spec.dtype must be one of {kinds}, got {spec.dtype!r}")
    outs = [*ELEMENTS] if spec.is_fp8 else [None]
    if spec.fp8_out not in outs:
        raise ValueError(
            f"problem.spec.fp8_out must be one of {outs} with {spec.dtype}, got {spec.fp8_out!r}"
        )
    unit = FP8_HEAD_DIM_UNIT if spec.is_fp8 else HEAD_DIM_UNIT
    for name in ("head_dim", "head_dim_v"):
        size = getattr(spec, name)
        check_size(f"problem.spec.{name}", size)
        if size % unit or size > MAX_HEAD_DIM:
            raise ValueError(
                f"problem.spec.{name} must be a multiple of {unit} up to {MAX_HEAD_DIM}, got {size}"
            )
    band = getattr(spec.mask, "band", spec.mask)
    check_type("problem.spec.mask", band, Band)
    if band != Band.of(window):
        raise ValueError(
            f"problem.spec.mask must have the bounds that problem.window has, got {band} and "
            f"{window}"
        )


def check_type(name: str, value: object, kind: type) -> None:
    """Raise TypeError unless a value is of a type; a bool does not count as an int."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{name} must be of type {kind.__name__}, got {shown(value)}")


def check_size(name: str, value: Any, least: int = 1) -> None:
    """Raise unless a value is an integer of at least `least`."""
    check_type(name, value, int)
    if value < least:
        raise ValueError(f"{name} must be {least} or more, got {value}")
