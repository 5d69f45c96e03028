"""Numbers that several kernels share."""

from __future__ import annotations

import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Below every logit, but finite: 0 * (LOWEST - m) is 0.
LOWEST = tl.constexpr(-1.0e30)
# Numbers of a stretch and head: 28 range masses in 32 columns, then m, L and S.
PARTIAL = tl.constexpr(36)
# Where, of the 32 numbers of a row and head, the logsumexp is.
LOGSUMEXP = tl.constexpr(29)
# Addresses of a layer: keys, their scales, learned sinks, queries.
ADDRESSES = tl.constexpr(4)
