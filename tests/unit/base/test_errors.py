"""What users read of an error."""

import pytest

from megatron.base.errors import CheckpointError, ConfigError, DataError, first_line


@pytest.mark.parametrize("kind", [ConfigError, DataError, CheckpointError])
def test_a_message_is_one_line_that_can_be_printed(kind):
    text = str(kind("--save a\nb\r\x1b[2J \udcff \u00e9\u4e16 is not a folder"))
    assert text == "--save a\\nb\\r\\x1b[2J \\udcff \u00e9\u4e16 is not a folder"
    text.encode("utf-8")


def test_an_error_is_quoted_by_its_first_line():
    assert first_line(RuntimeError("\nlost a peer \nat tcp.cc:12")) == "lost a peer"
    assert first_line(KeyError()) == "KeyError" and first_line(OSError(" ")) == "OSError"
