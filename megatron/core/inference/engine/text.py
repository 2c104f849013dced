"""The text of a growing sequence of tokens: incremental decoding and stop strings."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron.core.datasets.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"  # tokenizers decode bytes of an incomplete character to this
_LONGEST = 4  # bytes of a character, and so its most tokens


class TextStream:
    """The text of one growing sequence. Text that `take` has returned never changes."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop_ids: Collection[int],
        stop_strings: Sequence[str],
        *,
        hidden_ids: Collection[int] = (),
        keeps_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """hidden_ids: tokens without text, but a stop string that spells one ends the sequence there. keeps_stop: the
        text includes the stop that ends it. min_tokens: stop strings end no text before it has this many tokens.
        """
        self.ids: list[int] = []
        self.text = ""
        self.place = 0  # where the last token begins in the text
        self.reason = "length"
        self._tokenizer, self._decoder = tokenizer, TokenDecoder(tokenizer, prompt)
        self._stop_ids, self._stop_strings = stop_ids, stop_strings
        self._hidden_ids, self._keeps_stop, self._min_tokens = hidden_ids, keeps_stop, min_tokens
        self._held = ""  # decoded, but possibly the beginning of a stop string
        self._taken = 0  # number of characters of `text`

    def push(self, token: int) -> bool:
        """Adds the sequence's next token; returns True if it ends the sequence."""
        self.ids.append(token)
        self.place = len(self.text) + len(self._held)
        hidden = token in self._hidden_ids
        spelled = self._tokenizer.decode([token]) if hidden else ""
        if token not in self._stop_ids and spelled not in self._stops():
            piece = "" if hidden else self._decoder.push(token)
            self.place += 0 if hidden else self._decoder.ahead
            return self._add(piece)
        if self._keeps_stop:
            self._add(spelled if spelled in self._stops() else "" if hidden else self._decoder.push(token))
        self.close()
        self.reason = "stop"
        return True

    def take(self) -> str:
        """Returns the text that has become final since the last call."""
        piece = self.text[self._taken :]
        self._taken = len(self.text)
        return piece

    def close(self) -> None:
        """Ends the sequence: all text held back becomes final. Calling it again changes nothing."""
        if self.reason == "length" and not self._add(self._decoder.flush()):
            self.text += self._held
            self._held = ""

    def _add(self, piece: str) -> bool:
        self._held += piece
        places = [(start, start + len(stop)) for stop in self._stops() if (start := self._held.find(stop)) >= 0]
        if places:
            start, end = min(places)
            self.text += self._held[: end if self._keeps_stop else start]
            self._held, self.reason = "", "stop"
            return True
        final = len(self._held) - self._beginning_of_a_stop()
        self.text += self._held[:final]
        self._held = self._held[final:]
        return False

    def _stops(self) -> Sequence[str]:
        """Returns the stop strings that count now."""
        return self._stop_strings if len(self.ids) >= self._min_tokens else ()

    def _beginning_of_a_stop(self) -> int:
        """Returns the length of the longest end of the held text with which a stop string begins."""
        longest = max((len(stop) - 1 for stop in self._stop_strings), default=0)
        lengths = range(min(longest, len(self._held)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(self._held[-n:]) for stop in self._stop_strings)), 0)


def finished(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """Returns how many of the tokens are left without those of an incomplete character at their end."""
    if not tokenizer.decode(ids).endswith(_UNFINISHED):
        return len(ids)
    shorter = range(len(ids) - 1, max(len(ids) - _LONGEST, -1), -1)
    left = next((n for n in shorter if not tokenizer.decode(ids[:n]).endswith(_UNFINISHED)), len(ids))
    is_whole = tokenizer.encode(_UNFINISHED) == list(ids[left:])  # a text may contain this character itself
    return len(ids) if is_whole else left


def token_places(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Returns where each token begins in their text: tokens of one character, all at its beginning."""
    decoder, places, length = TokenDecoder(tokenizer, ()), [], 0
    for token in ids:
        piece = decoder.push(token)
        places.append(length + decoder.ahead)
        length += len(piece)
    return places


class TokenDecoder:
    """Decodes token by token.

    A token's text depends on those before it (leading spaces, characters of several tokens): each is decoded together
    with the previous piece's tokens, and held back while it ends inside a character. A character that begins in the
    prompt belongs to the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        whole = finished(tokenizer, prompt)
        self._context = list(prompt[:whole])  # tokens whose text has been returned
        self._new = list(prompt[whole:])  # tokens whose text has not been returned
        self.ahead = 0  # characters before the last token that had not been returned when it came

    def push(self, token: int) -> str:
        """Returns text that has become complete with this token, often ""."""
        before = self._piece() if self._new else ""
        self._new.append(token)
        piece = self._piece()
        goes_on = len(piece) > len(before) and piece.startswith(before)  # or the token is a part of the last character
        self.ahead = len(before) if goes_on else len(before.rstrip(_UNFINISHED))
        return "" if piece.endswith(_UNFINISHED) else self._hand_out(piece)

    def flush(self) -> str:
        """Returns text that has been held back, complete or not."""
        return self._hand_out(self._piece())

    def _piece(self) -> str:
        context = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._new)[len(context) :]

    def _hand_out(self, piece: str) -> str:
        if piece:
            self._context, self._new = self._new, []
        return piece
