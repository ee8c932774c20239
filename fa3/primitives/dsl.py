"""Names of the CuTe DSL that stand in other modules since its version 4.8, for all kernels."""

try:
    from cutlass.memory import SmemAllocator
    from cutlass.tensor_utils import LayoutEnum
except ModuleNotFoundError:  # 4.7
    from cutlass.utils import LayoutEnum, SmemAllocator

__all__ = ["LayoutEnum", "SmemAllocator"]
