"""Statistics of cells whose logits were stored bare, computed before they are verified.

Whoever stores logits without their statistics, such as another engine's kernel, marks the cells
`CELL_BARE` and writes the temperature that each token was drawn at. For a cell with logits x as
stored and temperature t this op computes

    logsumexp = log of the sum of exp(x / t)          as `draft_sample` does, block by block

and marks it `CELL_STORED`; `CELL_EMPTY` where no logit is above -inf. At temperature 0 the token is
an argmax and nothing is to be computed. Other cells stay as they are.

Bytes that must move for N bare cells of W columns of s bytes: `N W s`.
"""
