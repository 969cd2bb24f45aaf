"""A start-up check, in milliseconds, of what losslessness rests on: that a row's logits do not depend on the rows that
share its forward, nor on whether its keys came from the cache or from the same forward.

Measured to hold on AVX-512 CPUs; other processors and libraries may round otherwise. On a GPU it should hold by the
construction of our kernels (fixed tiles, sums in one order) and does not hold with library kernels (exact=False); it is
checked there too, with recorded steps where those are asked for. When it fails, speculation is still right up to
near-ties, but no longer bit for bit.
"""

from __future__ import annotations

import torch

from minieagle.models.attention import KEY_BLOCK
from minieagle.models.deepseek import Target
from minieagle.models.rows import Rows, Span


def row_difference(target: Target) -> float:
    """The largest difference in any logit of KEY_BLOCK + 16 rows between one forward of them all and the same rows in
    pieces of 1 to 40, the last piece as a tree: 0.0 when rows are independent of their company."""
    pieces = (40, 1, 6, 16, 2, KEY_BLOCK + 16 - 65)
    num_rows = sum(pieces)
    token_ids = torch.arange(num_rows, device=target.device) * 7919 % target.config.vocab_size
    slots = torch.arange(1, num_rows + 1, device=target.device)
    whole = target(Rows.of(token_ids, [Span(slots, 0, num_rows)]), target.new_cache(num_rows + 1)).logits
    cache, start, worst = target.new_cache(num_rows + 1), 0, 0.0
    for index, size in enumerate(pieces):
        chain = torch.arange(size, device=target.device).expand(size, size)
        as_tree = chain.masked_fill(chain > chain.t(), -1) if index == len(pieces) - 1 else None
        rows = Rows.of(token_ids[start : start + size], [Span(slots, start, size, as_tree)])
        logits = target(rows, cache).logits
        worst = max(worst, float((logits - whole[start : start + size]).abs().max()))
        start += size
    return worst
