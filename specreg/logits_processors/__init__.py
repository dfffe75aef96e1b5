"""Changes that requests ask of their target logits, made before drafts are judged."""

from specreg.logits_processors.allowed_tokens import AllowedTokenBitmask, AllowedTokenIds
from specreg.logits_processors.logit_bias import LogitBias
from specreg.logits_processors.penalties import Penalties
from specreg.logits_processors.protocol import LogitsProcessor

__all__ = [
    "AllowedTokenBitmask",
    "AllowedTokenIds",
    "LogitBias",
    "LogitsProcessor",
    "Penalties",
]
