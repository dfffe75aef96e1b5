"""K draft tokens of a request, one after another: each step adds a bias that the last token gives.

For a request with base logits x_1 .. x_K, anchor token y_0, embeddings W1 `[vocab_size, rank]` by
target id and W2 `[num_draft_columns, rank]` by draft column,

    b_k = round(W2 W1[y_{k-1}])            rounded to the dtype of the logits
    b_k = round(scale * cap(b_k))          where there is a scale or a cap
    z_k = round(x_k + b_k)                 cap(b) = soft_cap * tanh(b / soft_cap)
    y_k ~ softmax(z_k / t)                 drawn and stored as `specreg.kernels.draft_sample` does

so the tokens, and the cells of the cache, are those of a loop that computes z_k and calls
`draft_sample` K times. Steps cannot be drawn at once, and each has to read W2 whole.

Bytes that must move for R requests over V columns of s bytes:
`K (V rank s + R V s (1 + 1/num_shards))`.

Source: the Markov head of DSpark drafters; the fused form is specreg's own.
"""
