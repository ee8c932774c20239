"""Kernels: one file holds one kernel class and its frozen Config."""
