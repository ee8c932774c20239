"""fa3: Hopper attention in CuTe DSL."""

# First, since it reads the sources before they run.
import fa3.running.code_cache  # noqa: F401
from fa3.calls.combine import flash_attn_combine
from fa3.calls.forward import flash_attn_func
from fa3.calls.kvcache import flash_attn_with_kvcache
from fa3.calls.scheduler_metadata import SchedulerMetadata, get_scheduler_metadata
from fa3.calls.varlen import flash_attn_varlen_func
from fa3.planning.plan import Plan
from fa3.planning.planner import plan_forward
from fa3.primitives.coords import Position
from fa3.problem import AttentionSpec, Problem, Window
from fa3.schedules import Tile
from fa3.scores.masks import Mask
from fa3.scores.scores import Score
from fa3.tools.recording import record_timeline

__all__ = [
    "AttentionSpec",
    "Mask",
    "Plan",
    "Position",
    "Problem",
    "SchedulerMetadata",
    "Score",
    "Tile",
    "Window",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "plan_forward",
    "record_timeline",
]
__version__ = "0.1.0"
