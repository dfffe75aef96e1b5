"""Verification: keep a prefix of the drafts and draw one more token, exactly as the target would.

Method `standard`. For the target distribution p of a row, draft d, the distribution q that d was
drawn from and uniforms u in (0, 1),

    p(x) = exp(target_logits / temperature) / its sum         temperature of the request, now
    q(x) = exp(draft_logits / t - logsumexp)                  t and logsumexp of the cache cell
    keep d while  log p(d) > log u + log q(d)
    at the first d that fails draw from  max(p - q, 0); from p where that is rounding only
    behind the last kept d draw from  p

With one-hot q (no cache, or t = 0) d is kept with probability p(d), else p without d is drawn from.
At temperature 0 p is one-hot at its argmax. A draft without a distribution (-1, or a cell that is
not stored) is replaced by a draw from p. Every draw takes a block of 512 columns with one random
word and a column of it with a second, as in `draft_sample`; acceptance, residual, bonus and plain
draws use streams of their own.

Bytes that must move for N logits rows over V columns of s bytes, of which R reject: `N V s` for the
block sums, `R V (s + s_draft)` for the residuals, an element of p and q a draft, a block a draw.

Source: Leviathan et al., 2023, Fast inference from transformers via speculative decoding (arXiv
2211.17192).
"""
