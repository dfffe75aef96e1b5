"""Who verifies what: the owner-sorted order of logits rows and each rank's local batch.

With S shards, `owner(b) = idx_mapping[b] mod S` for a request and nobody for a padding row (-1),
and `count(b) = cu[b + 1] - cu[b]` logits rows for batch row b,

    order      = rows 0 .. num_logits - 1 sorted by owner of their request, stable; nobody's last
    restore[b] = place of b among the requests sorted by owner, stable; -1 for a padding row
    local      = { b : owner(b) = shard_idx }, ascending, with cumulative counts of its own

so that all-to-all sends consecutive rows of `logits[order]`, a rank's rows arrive in the order of
its local batch, and `concatenated_outputs[restore]` is in batch order again. Nothing but the two
index tensors is read: every rank computes the same plan by itself. A rank that owns nothing has an
empty local batch.
"""
