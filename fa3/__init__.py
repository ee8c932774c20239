"""fa3: Hopper attention in CuTe DSL."""

from fa3.api import flash_attn_func
from fa3.planner import Plan, plan_forward
from fa3.problem import AttentionSpec, Problem, Window
from fa3.schedules import Tile

__all__ = ["AttentionSpec", "Plan", "Problem", "Tile", "Window", "flash_attn_func", "plan_forward"]
__version__ = "0.1.0"
