"""Kernels: a file holds one kernel and its roles; beside it, what it is compiled for and takes."""
