"""Device building blocks that kernels share."""
