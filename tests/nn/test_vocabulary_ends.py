from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from specreg.errors import CheckpointError, TensorError
from specreg.nn.vocabulary_ends import VocabularyEnds

VOCAB, REDUCED, HIDDEN = 8, 4, 6


class Target(SimpleNamespace):
    def __init__(self, vocab_size: int = VOCAB, hidden_size: int = HIDDEN) -> None:
        super().__init__(vocab_size=vocab_size, hidden_size=hidden_size)
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(vocab_size, hidden_size, generator=generator)
        self.head = torch.randn(vocab_size, hidden_size, generator=generator)

    def embed(self, token_ids):
        return self.table[token_ids]

    def compute_logits(self, hidden):
        return hidden @ self.head.T


def ends(draft_vocab_size: int = VOCAB, hidden_size: int = HIDDEN, **own: Any) -> VocabularyEnds:
    made = VocabularyEnds(VOCAB, draft_vocab_size, hidden_size, "draft")
    state = {name.replace("__", "."): tensor for name, tensor in own.items()}
    made.load_state_dict(state, strict=False, assign=True)
    return made.requires_grad_(False)


def own_head(columns: int = REDUCED, hidden_size: int = HIDDEN) -> nn.Parameter:
    return nn.Parameter(torch.randn(columns, hidden_size))


def test_what_the_file_lacks_is_the_targets():
    target, shared = Target(), ends()
    shared.attach(target)
    ids, hidden = torch.tensor([3, 0]), torch.randn(2, HIDDEN)
    assert torch.equal(shared.embed(ids), target.table[ids])
    assert torch.equal(shared.score(hidden), target.compute_logits(hidden))
    assert shared.shares_embedding
    assert shared.shares_head
    assert shared.target_ids is None


def test_what_the_file_holds_is_its_own():
    target, table, head = Target(), nn.Parameter(torch.randn(VOCAB, HIDDEN)), own_head(VOCAB)
    own = ends(embed_tokens__weight=table, lm_head__weight=head)
    own.attach(target)
    ids, hidden = torch.tensor([3, 0]), torch.randn(2, HIDDEN)
    assert torch.equal(own.embed(ids), table[ids])
    assert torch.equal(own.score(hidden), hidden @ head.T)


@pytest.mark.parametrize("own", [{}, {"lm_head__weight": own_head(VOCAB)}])
def test_logits_are_scaled_whoever_scores(own: dict[str, Any]) -> None:
    target, hidden = Target(), torch.randn(2, HIDDEN)
    plain, scaled = ends(**own), ends(**own)
    scaled.logit_scale = 0.5
    for each in (plain, scaled):
        each.attach(target)
    assert torch.equal(scaled.score(hidden), 0.5 * plain.score(hidden))


def test_an_embedding_equal_to_the_targets_is_given_up():
    target = Target()
    own = ends(embed_tokens__weight=nn.Parameter(target.table.clone()))
    own.attach(target)
    assert own.shares_embedding


def test_a_map_holds_offsets():
    d2t = torch.tensor([1, 2, 2, 3])
    reduced = ends(REDUCED, lm_head__weight=own_head(), d2t=d2t)
    reduced.attach(Target())
    assert reduced.target_ids.tolist() == [1, 3, 4, 6]


def test_a_map_of_zeros_over_the_whole_vocabulary_is_none():
    full = ends(d2t=torch.zeros(VOCAB, dtype=torch.int64))
    full.attach(Target())
    assert full.target_ids is None


@pytest.mark.parametrize(
    ("made", "target", "message"),
    [
        (lambda: ends(REDUCED, d2t=torch.zeros(4, dtype=torch.int64)), Target(), "no head and"),
        (lambda: ends(REDUCED, lm_head__weight=own_head()), Target(), "has no map"),
        (lambda: ends(), Target(hidden_size=5), "no embedding and"),
        (lambda: ends(), Target(vocab_size=7), "larger vocabulary than"),
        (
            lambda: ends(hidden_size=5, embed_tokens__weight=nn.Parameter(torch.randn(VOCAB, 5))),
            Target(),
            "no head and",
        ),
        (
            lambda: ends(
                embed_tokens__weight=nn.Parameter(torch.randn(VOCAB, HIDDEN)),
                lm_head__weight=own_head(VOCAB),
                d2t=torch.zeros(VOCAB, dtype=torch.int64),
            ),
            Target(vocab_size=9),
            "cannot embed every token",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(made, target, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        made().attach(target)
    assert caught.value.where == "draft"


@pytest.mark.parametrize("d2t", [[0, 0, 0, -1], [0, 0, 0, 5]])
def test_a_map_with_repeated_or_outside_ids_is_refused(d2t):
    reduced = ends(REDUCED, lm_head__weight=own_head(), d2t=torch.tensor(d2t))
    with pytest.raises(TensorError, match="repeat or lie outside") as caught:
        reduced.attach(Target())
    assert caught.value.where == "draft, tensor 'd2t'"
    assert "d2t holds offsets" in caught.value.fix
