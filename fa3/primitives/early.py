"""What a kernel may do with memory that the previous kernel may still write."""

import cutlass.cute as cute
from cutlass import Int32


def read_early(tensor: cute.Tensor, coord) -> Int32:
    """Read an integer that the previous kernel may still write; skips L1, which is not coherent."""
    address = tensor.iterator + cute.crd2idx(coord, tensor.layout)
    return cute.arch.load(address, Int32, sem="relaxed", scope="gpu")


@cute.jit
def ask_l2(vector: cute.Tensor, index: Int32):
    """Have L2, which is coherent, load an entry that is read as soon as the previous kernel has
    ended; its address is looked up meanwhile, too. Nothing happens if there is no such entry."""
    if index < vector.shape[0]:
        address = (vector.iterator + index).toint()
        cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])
