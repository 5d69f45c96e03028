"""How passes of a step overlap: "programmatic dependent launch", from Hopper on.

A kernel may begin once all programs of the one before it have let it, or have ended. Passes need
nothing of each other. The first one waits for all that was launched before it, and only then lets
the next begin: what that one reads is there as well. The others wait when they are done. What comes
after a kernel waits for this kernel alone, and relies on it for all that came before: so each
program waits at some time, also one that has nothing to do.

Only passes overlap: steps took longer on an H200 where what finishes them was let begin early too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin_pass(follows, OVERLAPS: tl.constexpr):
    """`follows`: whether the kernel before is another pass of the same step."""
    if OVERLAPS:
        if follows == 0:
            gdc_wait()
        gdc_launch_dependents()


@triton.jit
def end_pass(OVERLAPS: tl.constexpr):
    if OVERLAPS:
        gdc_wait()
