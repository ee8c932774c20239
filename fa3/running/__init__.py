"""Running kernels: compiling and caching them; their counters, tables and captured graphs."""
