"""Constants that several kernels share."""

from __future__ import annotations

import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Stands for -inf where a difference is taken: below every logit, but 0 * (LOWEST - m) is 0.
LOWEST = tl.constexpr(-1.0e30)
# Columns of a row's statistics, per head or as the mean over heads (`decode.plan`).
COLUMNS = 32
LOGSUMEXP = tl.constexpr(29)
