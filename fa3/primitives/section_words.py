"""How far the queries of each section are (`fa3.schedules.query_sections`): words in device memory
that warps raise when they have done something, and look at before they rely on it."""

import cutlass.cute as cute
from cutlass import Int32


def raise_word(words: cute.Tensor, section, count) -> None:
    """Add to a section's word; what this thread has done or seen before is then known, too."""
    cute.arch.atomic_add(words.iterator + section, Int32(count), sem="release", scope="gpu")


@cute.jit
def wait_for(words: cute.Tensor, section: Int32, count: Int32):
    """Wait until a section's word is so large; a warp calls this."""
    found = Int32(-1)
    while found < count:
        found = cute.arch.load(words.iterator + section, Int32, sem="acquire", scope="gpu")
    cute.arch.sync_warp()
