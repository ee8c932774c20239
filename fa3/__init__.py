"""fa3: Hopper attention in CuTe DSL.

The public names are imported when they are asked for: `import fa3` needs neither torch nor the
compiler, and a program that never calls a kernel never waits for them.
"""

import importlib
import sys
from typing import TYPE_CHECKING

# First, since it reads the sources before they run.
from fa3.running import code_cache

if TYPE_CHECKING:
    from fa3.calls.attention import flash_attn_func as flash_attn_func
    from fa3.calls.attention import flash_attn_varlen_func as flash_attn_varlen_func
    from fa3.calls.attention import flash_attn_with_kvcache as flash_attn_with_kvcache
    from fa3.calls.combine import flash_attn_combine as flash_attn_combine
    from fa3.calls.modifiers import dropout_mask as dropout_mask
    from fa3.calls.passes import flash_attn_backward as flash_attn_backward
    from fa3.calls.quantize import quantize as quantize
    from fa3.calls.scheduler_metadata import SchedulerMetadata as SchedulerMetadata
    from fa3.calls.scheduler_metadata import get_scheduler_metadata as get_scheduler_metadata
    from fa3.planning.planner import Plan as Plan
    from fa3.planning.planner import plan_forward as plan_forward
    from fa3.primitives.fragments import Position as Position
    from fa3.problem import AttentionSpec as AttentionSpec
    from fa3.problem import Problem as Problem
    from fa3.problem import Window as Window
    from fa3.schedules import Tile as Tile
    from fa3.scores.masks import Mask as Mask
    from fa3.scores.scores import Score as Score
    from fa3.tools.function_check import check as check
    from fa3.tools.recording import record_timeline as record_timeline
    from fa3.tools.warmup import warmup as warmup

__version__ = "0.1.0"

HOMES = {
    "AttentionSpec": "fa3.problem",
    "Mask": "fa3.scores.masks",
    "Plan": "fa3.planning.planner",
    "Position": "fa3.primitives.fragments",
    "Problem": "fa3.problem",
    "SchedulerMetadata": "fa3.calls.scheduler_metadata",
    "Score": "fa3.scores.scores",
    "Tile": "fa3.schedules",
    "Window": "fa3.problem",
    "check": "fa3.tools.function_check",
    "dropout_mask": "fa3.calls.modifiers",
    "flash_attn_backward": "fa3.calls.passes",
    "flash_attn_combine": "fa3.calls.combine",
    "flash_attn_func": "fa3.calls.attention",
    "flash_attn_varlen_func": "fa3.calls.attention",
    "flash_attn_with_kvcache": "fa3.calls.attention",
    "get_scheduler_metadata": "fa3.calls.scheduler_metadata",
    "plan_forward": "fa3.planning.planner",
    "quantize": "fa3.calls.quantize",
    "record_timeline": "fa3.tools.recording",
    "warmup": "fa3.tools.warmup",
}
"""The module of each public name, as imported above for type checkers."""

__all__ = list(HOMES)


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if "fa3.problem" not in sys.modules:
        # No module that shapes code runs yet, and sources may have been edited since the import.
        code_cache.read_again()
    value = globals()[name] = getattr(importlib.import_module(HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
