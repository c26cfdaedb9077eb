"""Attention kernels of others under our metadata: the contract, adapters, and its test.

`graphattn.capture(model, max_batch, attention=kernel)` attends with `kernel`, a `ForeignAttention`.
`graphattn.foreign.conformance` tests one; `sdpa` and `flex` are two. docs/foreign-kernels.md.
"""

from graphattn.foreign.calling import attend_by
from graphattn.foreign.contract import Capabilities, ForeignAttention

__all__ = ["Capabilities", "ForeignAttention", "attend_by"]
