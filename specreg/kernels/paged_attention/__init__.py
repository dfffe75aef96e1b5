"""Attention over, and writing into, a pool of fixed-size key/value blocks.

For a query q at (slot, position) that sees the keys J of its slot,

    J = { j : max(0, position - sliding_window + 1) <= j < kv_len }
    s_j = cap(scale * q . k_j),  cap(x) = soft_cap * tanh(x / soft_cap)
    out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink))

where key j lies in block `block_table[slot, j // block_size]` at offset `j % block_size`. Bytes
moved: each live key and value of a request once, `len(J) * num_kv_heads * 2 * head_dim` elements;
blocks outside J are not read, so time grows with the context and not with the longest allowed one.

Block 0 of a pool is the null block: never handed to a request, it takes the writes of padding rows
(slot -1), so that a write needs neither a branch nor a host synchronisation.
"""

from specreg.kernels.paged_attention.op import paged_attention, write_kv

__all__ = ["paged_attention", "write_kv"]
