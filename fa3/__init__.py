"""fa3: Hopper attention in CuTe DSL."""

from fa3.api import flash_attn_func
from fa3.cache_schedule import SchedulerMetadata, get_scheduler_metadata
from fa3.kvcache import flash_attn_combine, flash_attn_with_kvcache
from fa3.masks import Mask
from fa3.planner import Plan, plan_forward
from fa3.primitives.coords import Position
from fa3.problem import AttentionSpec, Problem, Window
from fa3.recording import record_timeline
from fa3.schedules import Tile
from fa3.scores import Score

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
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "plan_forward",
    "record_timeline",
]
__version__ = "0.1.0"
