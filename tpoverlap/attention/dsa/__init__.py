"""DSA candidate blocks: an indexer's logits -> the best blocks of each row -> logits outside of them masked.

The three steps cost what a row's live context costs, whatever the width of the buffer that holds it, and one captured
graph serves every length: the launch shapes come from tensor shapes, the lengths are read on the device.
"""

from tpoverlap.attention.dsa.api import apply_candidate_mask, block_scores, select_candidate_blocks

__all__ = ["apply_candidate_mask", "block_scores", "select_candidate_blocks"]
