"""LiLiCorr's scores of a draft behind another: products of vectors that know the whole lattice."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specreg.nn.norms import RMSNorm
from specreg_dflash.lilicorr.config import LiLiCorrConfig
from specreg_dflash.lilicorr.lattice import LatticeLayer, UpDown

__all__ = ["LiLiCorrHead"]

NUM_FEATURES = 5
FEATURE_EPS = 1e-5
# Stands for a log probability of -inf where it is a feature: every dtype has it, no token does.
LEAST_LOG_PROB = -1e4


class LiLiCorrHead(nn.Module):
    """A bidirectional transformer over the candidates of all steps, then a product an edge.

    Call `fold` once weights are loaded.

    Args:
        config: of the drafter.
    """

    def __init__(self, config: LiLiCorrConfig) -> None:
        super().__init__()
        lattice, num_candidates = config.lattice, config.num_candidates
        width, backbone_width = lattice.hidden_size, config.backbone.shape.hidden_size
        block_size = config.backbone.block_size
        self.config, self.num_candidates, self.block_size = lattice, num_candidates, block_size
        self.token_proj: nn.Module = nn.Identity()
        if width != backbone_width:
            self.token_proj = _linear(backbone_width, width)
        self.pass_hidden_proj = _linear(backbone_width, width)
        self.context_proj = _linear(backbone_width, width)
        self.feature_norm = nn.LayerNorm(NUM_FEATURES, eps=FEATURE_EPS, device="meta")
        self.feature_mlp = UpDown(NUM_FEATURES, width, width)
        self.slot_embedding = _parameter(1, 1, block_size - 1, 1, width)
        self.rank_embedding = _parameter(1, 1, 1, num_candidates, width)
        self.relative_slot_bias = _parameter(lattice.num_heads, 2 * block_size - 1)
        self.same_slot_bias = _parameter(lattice.num_heads)
        self.layers = nn.ModuleList(LatticeLayer(lattice) for _ in range(lattice.num_layers))
        self.output_norm = RMSNorm(width, lattice.eps)
        self.anchor_norm = RMSNorm(width, lattice.eps)
        self.factor_input_proj = _linear(3 * width, width)
        self.out_head = _linear(width, lattice.factor_dim)
        self.in_head = _linear(width, lattice.factor_dim)
        self.anchor_out_head = _linear(width, lattice.factor_dim)
        self.places = torch.empty(0)
        self.bias = torch.empty(0)

    def fold(self, num_steps: int) -> None:
        """Compute what depends on the number of drafts alone, at most that of the training.

        Fewer drafts take the first slots; the offset between two slots keeps its place.
        """
        places = self.slot_embedding[0, 0, :num_steps] + self.rank_embedding[0, 0]
        slots = torch.arange(num_steps, device=places.device)
        slots = slots.repeat_interleave(self.num_candidates)
        offsets = slots[:, None] - slots
        same = self.same_slot_bias[:, None, None] * (offsets == 0)
        self.places = places
        self.bias = self.relative_slot_bias[:, offsets + self.block_size - 1] + same

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        log_probs: Tensor,
        context: Tensor,
        has_context: Tensor,
    ) -> Tensor:
        """Score every candidate of a step behind every one of the step before.

        Args:
            hidden: `[num_reqs, num_steps, hidden_size]`, the rows that predict the drafts.
            embedded: `[num_reqs, num_steps, num_candidates, hidden_size]`, target embeddings of the
                candidates, best first.
            log_probs: fp32 `[num_reqs, num_steps, num_candidates]`, over the whole vocabulary; a
                candidate with -inf is scored -inf, and is no harm to the others.
            context: `[num_reqs, hidden_size]`, context state of the token before the anchor.
            has_context: bool `[num_reqs]`; without it nothing of `context` is read.

        Returns:
            fp32 `[num_reqs, num_steps, num_candidates, num_candidates]`, predecessor first; at the
            first step all rows are equal.
        """
        features = self.feature_norm(self._features(log_probs).to(hidden.dtype))
        x = self.token_proj(embedded) + self.pass_hidden_proj(hidden)[:, :, None]
        x = x + self.feature_mlp(features) + self.places
        lattice = x.flatten(1, 2)
        for layer in self.layers:
            lattice = layer(lattice, self.bias)
        x = self.output_norm(lattice).view_as(x)

        projected = self.context_proj(context)
        anchor = self.anchor_norm(torch.where(has_context[:, None], projected, 0.0))
        state = anchor[:, None, None].expand_as(x)
        mixed = F.silu(self.factor_input_proj(torch.cat((x, state, x * state), dim=-1)))
        leaving = self._unit(self.out_head(mixed))
        entering = self._unit(self.in_head(mixed))
        start = self._unit(self.anchor_out_head(anchor))
        start = start[:, None, None].expand(-1, 1, self.num_candidates, -1)
        before = torch.cat((start, leaving[:, :-1]), dim=1)
        edges = self.config.logit_scale * (before @ entering.mT)
        return edges.masked_fill(log_probs.isneginf()[:, :, None], -torch.inf)

    def _features(self, log_probs: Tensor) -> Tensor:
        """fp32 `[..., num_candidates, 5]`: how likely a candidate is, and its rank."""
        log_probs = log_probs.clamp(min=LEAST_LOG_PROB)
        rank = torch.arange(self.num_candidates, device=log_probs.device)
        share = rank / max(1, self.num_candidates - 1)
        features = (
            log_probs,
            log_probs.exp(),
            log_probs - log_probs.amax(-1, keepdim=True),
            share.expand_as(log_probs),
            (rank == 0).float().expand_as(log_probs),
        )
        return torch.stack(features, dim=-1)

    def _unit(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors.float(), dim=-1, eps=self.config.vector_eps)


def _linear(width: int, out: int) -> nn.Linear:
    return nn.Linear(width, out, device="meta")


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"))
