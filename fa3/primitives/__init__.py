"""Device building blocks shared by kernels."""
