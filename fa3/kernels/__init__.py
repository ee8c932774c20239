"""Kernels: a file holds a kernel class with its roles; beside it what it is compiled for and takes."""
