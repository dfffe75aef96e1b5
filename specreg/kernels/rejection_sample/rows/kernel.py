"""Triton kernel that judges each row's draft by itself, and device helpers around it.

Every method begins with `target_blocks_kernel` (`rejection_sample.blocks`) and a kernel like
`judge_kernel`; what they find lies in a record a row, `RowArgs`. Then the method decides how many
drafts to keep and draws (`rejection_sample.draws`).
"""

import triton
import triton.language as tl

from specreg.kernels.common import view
from specreg.kernels.common.cells.kernel import cell_element, statistics_of
from specreg.kernels.common.kernel import (
    LOGIT_MAX,
    clean_logits,
    owned_row,
    sum_weights,
)
from specreg.kernels.draft_sample.reference import MASS_BITS
from specreg.kernels.random.kernel import STREAM_ACCEPT, random_words, uniform
from specreg.kernels.rejection_sample.blocks.kernel import (
    LOG2E,
    NUM_FLOATS,
    NUM_INTS,
    blocks_of,
    finite,
    float_record,
    int_record,
    load_target,
    mass_units,
    request,
    scale_of,
)

__all__ = [
    "GREEDY",
    "RESIDUAL",
    "TARGET",
    "WITHOUT_DRAFT",
    "accept_word",
    "draft_of",
    "first_rejection",
    "greedy_token",
    "judge_kernel",
    "passes",
    "row_total",
    "store_judgement",
    "verdicts",
]

CELL_STORED = tl.constexpr(view.CELL_STORED)
MASS_UNIT = tl.constexpr(2.0**-MASS_BITS)

# Where a draft is not kept, its row's token is ...
TARGET = tl.constexpr(0)  # drawn from p: there is no draft, or none with a distribution
WITHOUT_DRAFT = tl.constexpr(1)  # drawn from p without the draft, whose distribution was one-hot
RESIDUAL = tl.constexpr(2)  # drawn from what the draft's distribution leaves of p
GREEDY = tl.constexpr(3)  # known: the argmax

# A verdict: whether the draft is kept by itself, a kind shifted by one, and whether the row holds a
# NaN or nothing above -inf.
ACCEPTED = tl.constexpr(1)
UNUSABLE = tl.constexpr(8)


@triton.jit
def _mended_blocks(
    rows, target, req, step, row, scale, block, peak, mass,
    NUM_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Peaks and masses of a row's blocks, and whether the row holds a NaN.

    Blocks that came out wrong, rare, are reduced again here, one by one, and stored.
    """
    is_odd = tl.where(peak <= LOGIT_MAX, 0, 1)  # 1 for NaN
    num_odd = tl.sum(is_odd, 0)
    has_nan = num_odd < 0
    while num_odd > 0:
        odd = tl.argmax(is_odd, 0)
        columns = odd * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        x = load_target(target, row, columns, True)
        has_nan = has_nan | (tl.sum((x != x).to(tl.int32), 0) > 0)
        x = clean_logits(x)
        odd_peak = tl.max(x, 0)
        odd_mass = sum_weights(tl.exp2((x - finite(odd_peak)) * scale), 0)
        tl.store(float_record(rows, req, step, NUM_ROWS) + NUM_FLOATS + odd, odd_peak)
        tl.store(int_record(rows, req, step, NUM_ROWS) + NUM_INTS + odd, odd_mass)
        peak = tl.where(block == odd, odd_peak, peak)
        mass = tl.where(block == odd, odd_mass, mass)
        is_odd = tl.where(block == odd, 0, is_odd)
        num_odd -= 1
    return peak, mass, has_nan


@triton.jit
def row_total(
    rows, target, req, step, row, scale, block, peak, mass,
    NUM_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Top logit and log2 of the softmax denominator over it, block peaks, and whether unusable.

    Block numbers, peaks and masses are what `blocks_of` gives.
    """
    peak, mass, has_nan = _mended_blocks(
        rows, target, req, step, row, scale, block, peak, mass, NUM_ROWS, BLOCK_SIZE
    )
    top = tl.max(peak, 0)
    is_unusable = has_nan | (top == float("-inf"))
    top = finite(top)
    total = tl.sum(mass_units(peak, mass, top, scale), 0)
    log2_total = tl.log2(tl.maximum(total, 1).to(tl.float32) * MASS_UNIT)
    return top, log2_total, peak, is_unusable


@triton.jit
def greedy_token(target, row, peak, BLOCK_SIZE: tl.constexpr):
    """Column of the largest logit, the lowest on ties, from a row's block peaks."""
    home = tl.argmax(peak, 0)
    columns = home * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = clean_logits(load_target(target, row, columns, True))
    return (home * BLOCK_SIZE + tl.argmax(x, 0)).to(tl.int64)


@triton.jit
def draft_of(batch, req, step, num_rows, vocab_size):
    """The draft that a row judges, and whether it is a token."""
    at = batch.draft_tokens + req * batch.draft_stride + step
    draft = tl.load(at, mask=step < num_rows - 1, other=-1)
    return draft, (draft >= 0) & (draft < vocab_size)


@triton.jit
def accept_word(batch, req, slot, step):
    """The word that accepts or rejects the draft of `step`, a scalar or a vector."""
    seed = tl.load(batch.seeds + slot, mask=slot >= 0, other=0)
    position = tl.load(batch.positions + req) + step
    word, _, _, _ = random_words(seed, position, step, STREAM_ACCEPT)
    return word


@triton.jit
def passes(word, log2_chance):
    """Whether a uniform lies below 2^log2_chance; always where that is 1."""
    return (log2_chance >= 0.0) | (tl.log2(uniform(word)) < log2_chance)


@triton.jit
def store_judgement(
    rows, req, step, top, log2_total, log2_ratio, is_accepted, kind, is_unusable, token,
    NUM_ROWS: tl.constexpr,
):  # fmt: skip
    """Write what precedes the blocks in a row's records."""
    floats = float_record(rows, req, step, NUM_ROWS)
    tl.store(floats, top)
    tl.store(floats + 1, log2_total)
    tl.store(floats + 2, log2_ratio)
    ints = int_record(rows, req, step, NUM_ROWS)
    accepted = tl.where(is_accepted, ACCEPTED, 0)
    tl.store(ints, accepted + kind * 2 + tl.where(is_unusable, UNUSABLE, 0))
    tl.store(ints + 1, token.to(tl.int32))


@triton.jit
def judge_kernel(
    rows,
    target,
    batch,
    cache,
    NUM_ROWS: tl.constexpr,
    NUM_SHARDS: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program (step, req): compare p and q of a row's draft."""
    step = tl.program_id(0)
    req = tl.program_id(1).to(tl.int64)
    block, peak, mass = blocks_of(rows, req, step, NUM_ROWS, NUM_BLOCKS)  # on its way meanwhile
    slot, first_row, num_rows = request(batch, req, NUM_ROWS)
    if step >= num_rows:
        return
    row = first_row + step
    draft, has_draft = draft_of(batch, req, step, num_rows, target.vocab_size)
    temperature = tl.load(batch.temperature + slot)
    scale = scale_of(temperature)
    top, log2_total, peak, is_unusable = row_total(
        rows, target, req, step, row, scale, block, peak, mass, NUM_ROWS, BLOCK_SIZE
    )
    x = clean_logits(load_target(target, row, draft, has_draft))
    log2_p = (x - top) * scale - log2_total

    log2_q = 0.0
    is_known = has_draft
    kind = tl.where(has_draft, WITHOUT_DRAFT, TARGET)
    if cache.state is not None:
        cell_row = owned_row(slot, NUM_SHARDS, cache.shard_idx)
        is_known = has_draft & (cell_row >= 0)
        at = statistics_of(cache, cell_row, step)
        drafted_at = tl.load(cache.temperature + at, mask=is_known, other=0.0)
        is_stored = tl.load(cache.state + at, mask=is_known, other=0) == CELL_STORED
        is_read = is_known & (drafted_at != 0.0)
        y = cell_element(cache, cell_row, step, draft, is_read, NUM_CANDIDATES)
        logsumexp = tl.load(cache.logsumexp + at, mask=is_read, other=0.0)
        log2_q = tl.where(drafted_at == 0.0, 0.0, y * scale_of(drafted_at) - logsumexp * LOG2E)
        is_known = is_known & is_stored & (log2_q > float("-inf"))
        kind = tl.where(drafted_at == 0.0, WITHOUT_DRAFT, RESIDUAL)
        kind = tl.where(is_known, kind, TARGET)
    log2_ratio = log2_p - log2_q
    is_accepted = is_known & passes(accept_word(batch, req, slot, step), log2_ratio)
    token = draft
    if temperature == 0.0:
        token = greedy_token(target, row, peak, BLOCK_SIZE)
        is_accepted = has_draft & (draft == token)
        kind = tl.full([], GREEDY, tl.int32)
    store_judgement(
        rows, req, step, top, log2_total, log2_ratio, is_accepted, kind, is_unusable, token,
        NUM_ROWS,
    )  # fmt: skip


@triton.jit
def verdicts(rows, req, step, num_rows, NUM_ROWS: tl.constexpr):
    """Of a vector of steps: whether each draft is kept by itself, and the kind of its row's token;
    then how many of the request's rows are unusable."""
    # Rows that are not there are loaded too, so that the load need not wait for their number.
    verdict = tl.load(int_record(rows, req, step, NUM_ROWS), mask=step < NUM_ROWS, other=0)
    verdict = tl.where(step < num_rows, verdict, 0)
    num_unusable = tl.sum(verdict >> 3, 0)
    return (verdict & ACCEPTED) == ACCEPTED, (verdict >> 1) & 3, num_unusable


@triton.jit
def first_rejection(rows, req, num_rows, NUM_ROWS: tl.constexpr, NUM_STEPS: tl.constexpr):
    """Drafts kept when each is judged by itself, the kind of the token behind them, and how many
    rows are unusable."""
    step = tl.arange(0, NUM_STEPS)
    is_accepted, kinds, num_unusable = verdicts(rows, req, step, num_rows, NUM_ROWS)
    stop = tl.min(tl.where(is_accepted, NUM_STEPS, step), 0)
    return stop, tl.sum(tl.where(step == stop, kinds, 0), 0), num_unusable
