"""fa3 inside of other libraries: PyTorch's own attention functions, Transformers."""
