"""Text as it comes: whole characters, nothing taken back, and in the end the whole output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specreg.runtime.request import Request
from specreg.runtime.text_decoder import REPLACEMENT, TextDecoder
from specreg.sampling_params import SamplingParams

Decode = Callable[[Sequence[int]], str]


def byte_level() -> Tokenizer:
    """One token a byte, as in GPT-2 without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Words with a leading space and bytes for the rest, as in Llama 2."""
    words = ["▁", "▁a", "▁the", "b", "c", ".", "é", "▁é"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}


def decode_of(name: str) -> Decode:
    tokenizer: Any = TOKENIZERS[name]
    return lambda ids: str(tokenizer.decode(list(ids)))


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_text_only_grows_and_ends_as_the_whole_output_decoded(
    name: str, data: st.DataObject
) -> None:
    decode = decode_of(name)
    size = TOKENIZERS[name].get_vocab_size()
    words = st.lists(st.integers(0, size - 1), max_size=12)
    texts = st.text(alphabet="aé∑🂡 .", max_size=6).map(
        lambda text: TOKENIZERS[name].encode(text).ids
    )
    ids = [token for part in data.draw(st.lists(words | texts, max_size=4)) for token in part]
    decoder = TextDecoder(decode)
    seen = ""
    size = data.draw(st.integers(1, 4))
    for start in range(0, len(ids), size):
        decoder.append(ids[start : start + size])
        assert decoder.text.startswith(seen)
        seen = decoder.text
    decoder.finish()
    assert decoder.text.startswith(seen)
    # A run of bytes that is no text is replaced whole, so there the end depends on what had come.
    if name == "byte_level" or REPLACEMENT not in decode(ids):
        assert decoder.text == decode(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_character_appears_with_its_last_byte(name: str) -> None:
    decoder = TextDecoder(decode_of(name))
    shown = []
    for token in TOKENIZERS[name].encode("b🂡c").ids:
        decoder.append([token])
        shown.append(decoder.text)
    assert list(dict.fromkeys(shown)) == ["b", "b🂡", "b🂡c"]
    assert shown.count("b") == 4


def test_half_a_character_is_shown_when_nothing_follows() -> None:
    decoder = TextDecoder(decode_of("byte_level"))
    for token in TOKENIZERS["byte_level"].encode("b🂡").ids[:-1]:
        decoder.append([token])
    assert decoder.text == "b"
    decoder.finish()
    assert decoder.text == "b\ufffd"


def test_a_token_is_decoded_with_few_others_however_long_the_output() -> None:
    decode, lengths = decode_of("byte_level"), []

    def measured(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return decode(ids)

    decoder = TextDecoder(measured)
    for token in TOKENIZERS["byte_level"].encode("é" * 300).ids:
        decoder.append([token])
    assert max(lengths) <= 4


def request_for(text: str, stop: tuple[str, ...]) -> tuple[Request, list[int]]:
    ids = TOKENIZERS["byte_level"].encode(text).ids
    decoder = TextDecoder(decode_of("byte_level"))
    params = SamplingParams(stop=stop)
    return Request(0, [1], 1, 1000, params, seed=0, decoder=decoder), ids


def deltas_of(text: str, stop: tuple[str, ...]) -> list[str]:
    request, ids = request_for(text, stop)
    deltas = []
    for token in ids:
        request.accept([token])
        deltas.append(request.take_delta().text)
        if request.finish_reason is not None:
            break
    assert request.text == "".join(deltas)
    return deltas


def test_what_may_begin_a_stop_string_is_held_back_until_it_does_not() -> None:
    assert deltas_of("a<<b", ("<<>>",)) == ["a", "", "", "<<b"]
    assert deltas_of("a<<>>b", ("<<>>", "zz")) == ["a", "", "", "", ""]
    assert deltas_of("aabab", ("abab",)) == ["", "a", "", "", ""]


def test_a_stop_string_over_several_tokens_ends_the_text_before_it() -> None:
    request, ids = request_for("one. two. three", (" three", ". t"))
    request.accept(ids)
    assert request.finish_reason == "stop"
    assert request.text == "one"
    assert len(request.output_token_ids) == len("one. t")


def test_a_request_that_ends_otherwise_shows_what_was_held_back() -> None:
    request, ids = request_for("ab<", ("<<",))
    request.accept(ids)
    assert request.text == "ab"
    request.finish_reason = "cancelled"
    assert request.take_delta().text == "ab<"


def test_without_stop_strings_nothing_is_decoded_until_somebody_looks() -> None:
    request, ids = request_for("abc", ())
    calls = 0

    def counting(token_ids: Sequence[int]) -> str:
        nonlocal calls
        calls += 1
        return decode_of("byte_level")(token_ids)

    request.decoder = TextDecoder(counting)
    for token in ids:
        request.accept([token])
    assert calls == 0
    assert request.text == "abc"
    assert calls > 0
