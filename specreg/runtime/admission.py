"""Prompts and parameters become requests, or are refused before anything runs."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence

from specreg.errors import AdmissionError
from specreg.runtime.loading import LoadedModels
from specreg.runtime.request import Request
from specreg.runtime.text_decoder import TextDecoder
from specreg.sampling_params import SEED_RANGE, SamplingParams

__all__ = ["Admitter"]


class Admitter:
    """Makes requests for what was loaded.

    Args:
        models: of rank 0.
        seeds: gives a seed to a request without one.
    """

    def __init__(self, models: LoadedModels, seeds: random.Random) -> None:
        self._models = models
        self._seeds = seeds

    def admit(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
    ) -> list[Request]:
        """A request a prompt. Raises `AdmissionError`, and then none is admitted."""
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise AdmissionError(
                "the prompts are no list",
                where="prompts",
                got=f"{type(prompts).__name__}; allowed: a sequence of texts or of token id lists",
                fix="put a single prompt into a list",
            )
        each = _one_each(params, len(prompts))
        return [
            self._request(index, prompt, own)
            for index, (prompt, own) in enumerate(zip(prompts, each, strict=True))
        ]

    def _request(self, index: int, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        models = self._models
        token_ids = self._token_ids(index, prompt)
        room = models.max_model_len - len(token_ids)
        vocab_size = models.target.vocab_size
        if not token_ids or room < 1 or not all(0 <= token < vocab_size for token in token_ids):
            raise AdmissionError(
                "a prompt cannot be admitted",
                where=f"prompt {index}",
                got=f"{len(token_ids)} token ids; allowed: 1 to {models.max_model_len - 1}, "
                f"each of 0..{vocab_size - 1}",
                fix="shorten the prompt, raise max_model_len, or mend its token ids",
            )
        params.check_vocabulary(vocab_size)
        tokenizer = models.tokenizer
        if params.stop and tokenizer is None:
            raise AdmissionError(
                "stop strings cannot be found",
                where=f"SamplingParams.stop of prompt {index}",
                got="a target without a tokenizer",
                fix="use stop_token_ids, or add the tokenizer's files to the target directory",
            )
        return Request(
            index=index,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            max_len=len(token_ids) + min(params.max_tokens, room),
            params=params,
            seed=self._seeds.randrange(*SEED_RANGE) if params.seed is None else params.seed,
            eos_token_ids=models.eos_token_ids,
            decoder=TextDecoder(tokenizer.decode) if tokenizer is not None else None,
        )

    def _token_ids(self, index: int, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            try:
                return [operator.index(token) for token in prompt]
            except TypeError as error:
                raise AdmissionError(
                    "a prompt is neither text nor token ids",
                    where=f"prompt {index}",
                    got=f"{type(prompt).__name__}: {error}; allowed: a string, or integers",
                    fix="pass the text, or a list of the token ids",
                ) from error
        if self._models.tokenizer is None:
            raise AdmissionError(
                "a text prompt cannot be tokenised",
                where=f"prompt {index}",
                got="a target without a tokenizer",
                fix="pass token ids, or add the tokenizer's files to the target directory",
            )
        return self._models.tokenizer.encode(prompt)


def _one_each(
    params: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> Sequence[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise AdmissionError(
            "sampling parameters do not match the prompts",
            where="sampling_params",
            got=f"{len(params)} for {num_prompts} prompts; allowed: one for all, or one a prompt",
            fix="pass a single SamplingParams, or a list as long as the prompts",
        )
    return params
