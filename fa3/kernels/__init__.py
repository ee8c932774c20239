"""Kernels, one a file; `*_launch` files hold configs and arguments of launches."""
