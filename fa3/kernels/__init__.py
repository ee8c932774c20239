"""Kernels, one a file; `*_launch` files hold the larger kernels' configs and launch arguments."""
