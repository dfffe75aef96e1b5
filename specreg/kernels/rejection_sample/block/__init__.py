"""Method `block`: a round's drafts are judged together, which keeps more of them.

For drafts d_1 .. d_K, target distributions p_1 .. p_{K+1} and draft distributions q_1 .. q_K,

    P_0 = 1,  P_i = min(1, P_{i-1} p_i(d_i) / q_i(d_i))        chance of the prefix d_1 .. d_i
    S_i = sum over x of max(P_i p_{i+1}(x) - q_{i+1}(x), 0)
    h_i = S_i / (S_i + 1 - P_i) for i < K;  1 where that is 0 / 0;  h_K = P_K
    keep d_1 .. d_t for the last t with  u_t < h_t ; none where there is none
    draw from  max(P_t p_{t+1} - q_{t+1}, 0) ; from p where that is rounding only, and behind d_K

Each i has a uniform of its own, and passing at one i needs no passing before it. A draft without a
distribution (-1, or a cell that is not stored) ends the block at the draft before it, whose h is P.
With one-hot q, S_i = P_i (1 - p_{i+1}(d_{i+1})). For one draft this is method `standard`, token for
token.

Beside the target's rows that any method reads, S takes target row and draft row of every draft in
the block, `N K V (s + s_draft)` bytes for N requests. Where a cell holds k candidates it takes k
pairs instead, and rows are read of what is drawn from alone:

    S_i = max(P_i (1 - sum over candidates of p), 0) + sum over candidates of max(P_i p - q, 0)

Source: Sun et al., 2024, Block verification accelerates speculative decoding (arXiv 2403.10444).
"""
