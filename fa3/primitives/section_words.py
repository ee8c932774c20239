"""How far the queries of each section are (`fa3.schedules.query_sections`): words in device memory
that warps raise when they have done something, and look at before they rely on it."""

import cutlass.cute as cute
from cutlass import Int32


def raise_word(words: cute.Tensor, place, count) -> None:
    """Add to the word at a place; what this thread has done or seen before is then known, too."""
    cute.arch.atomic_add(words.iterator + place, Int32(count), sem="release", scope="gpu")


@cute.jit
def wait_for(words: cute.Tensor, place: Int32, count: Int32):
    """Wait until the word at a place is so large; a warp calls this."""
    found = Int32(-1)
    while found < count:
        found = cute.arch.load(words.iterator + place, Int32, sem="acquire", scope="gpu")
    cute.arch.sync_warp()
