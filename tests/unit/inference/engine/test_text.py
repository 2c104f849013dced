from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from megatron.core.inference.engine.text import TextStream

EOD = 256


class ByteTokenizer:
    """UTF-8 bytes, as byte-level BPE decodes them."""

    vocab_size, eod, bos = 257, EOD, None

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i != EOD).decode(errors="replace")


class PieceTokenizer:
    """Pieces with a space mark that is dropped at the beginning of a text, and bytes for rare characters, by the
    `tokenizers` library's own decoders: as LLaMA's tokenizer decodes."""

    PIECES = ("▁a", "b", "▁", *(f"<0x{byte:02X}>" for byte in range(256)), "</s>")
    vocab_size, eod, bos = len(PIECES), len(PIECES) - 1, None

    def __init__(self):
        self._backend = Backend(models.BPE({piece: i for i, piece in enumerate(self.PIECES)}, []))
        replace = decoders.Replace("▁", " ")
        self._backend.decoder = decoders.Sequence(
            [replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )

    def bytes_of(self, text):
        return [self.PIECES.index(f"<0x{byte:02X}>") for byte in text.encode()]

    def decode(self, ids):
        return self._backend.decode(list(ids), skip_special_tokens=False)


def feed(stream, ids):
    """(pieces as they come, whether the last id ended the sequence)"""
    pieces, ended = [], False
    for token in ids:
        assert not ended
        ended = stream.push(token)
        pieces.append(stream.take())
    return pieces, ended


def stream(tokenizer=None, prompt=(), stop_ids=(EOD,), stop_strings=()):
    return TextStream(tokenizer or ByteTokenizer(), prompt, stop_ids, stop_strings)


def test_a_character_comes_when_its_last_byte_has():
    new = stream()
    pieces, ended = feed(new, "aé€x".encode())
    assert pieces == ["a", "", "é", "", "", "€", "x"] and not ended


def test_bytes_that_are_no_character_are_not_lost():
    new = stream()
    assert feed(new, [0xC3, ord("a"), 0xE2, 0x82]) == (["", "\ufffda", "", ""], False)
    new.close()
    assert (new.take(), new.text, new.reason) == ("\ufffd", "\ufffda\ufffd", "length")
    new.close()
    assert new.text == "\ufffda\ufffd", "closing twice adds nothing"


def test_pieces_join_to_the_text_of_all_ids():
    tokenizer = PieceTokenizer()
    a, b, space = range(3)
    prompt = [a, b]
    for ids in (
        [a, space, b, a, b],
        [b, *tokenizer.bytes_of("€"), space, *tokenizer.bytes_of("é€€"), a],
        tokenizer.bytes_of("éé"),
        [*tokenizer.bytes_of("€")[:2], a, b],
    ):
        new = stream(tokenizer, prompt, {tokenizer.eod})
        pieces, _ = feed(new, ids)
        new.close()
        pieces.append(new.take())
        assert "".join(pieces) == new.text == tokenizer.decode(prompt + ids)[len(tokenizer.decode(prompt)) :]
        assert len([piece for piece in pieces if piece]) > 1


def test_a_stop_id_ends_the_text_before_it():
    new = stream()
    assert feed(new, [*b"ab", EOD]) == (["a", "b", ""], True)
    assert (new.text, new.reason, new.ids) == ("ab", "stop", [97, 98, EOD])
    held = stream(stop_strings=["bc"])
    assert feed(held, [*b"ab", EOD]) == (["a", "", "b"], True), "what was held back was no stop string after all"


def test_a_stop_string_ends_the_text_before_it():
    new = stream(stop_strings=["\n\n", "END"])
    pieces, ended = feed(new, b"aENb\nc\n\n")
    assert ended and (new.text, new.reason) == ("aENb\nc", "stop")
    assert pieces == ["a", "", "", "ENb", "", "\nc", "", ""], "a possible beginning is held back, and no more"
    new.close()
    assert new.text == "aENb\nc"


def test_the_earliest_stop_string_counts_whatever_their_order():
    for stops in (["cd", "bcde"], ["bcde", "cd"]):
        new = stream(PairTokenizer(), stop_strings=stops)
        assert feed(new, ["ab", "cdef"])[1] and new.text == "a"


class PairTokenizer(ByteTokenizer):
    """Ids that are texts of several characters."""

    def decode(self, ids):
        return "".join(ids)


def test_what_may_be_a_stop_string_is_given_out_at_the_end():
    new = stream(stop_strings=["END"])
    feed(new, b"xEN")
    assert new.text == "x"
    new.close()
    assert (new.take(), new.text, new.reason) == ("EN", "xEN", "length")
