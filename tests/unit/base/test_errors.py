"""What users read of an error."""

import pytest

from megatron.base.errors import CheckpointError, ConfigError, DataError


@pytest.mark.parametrize("kind", [ConfigError, DataError, CheckpointError])
def test_a_message_is_one_line_that_can_be_printed(kind):
    text = str(kind("--save a\nb\r\x1b[2J \udcff \u00e9\u4e16 is not a folder"))
    assert text == "--save a\\nb\\r\\x1b[2J \\udcff \u00e9\u4e16 is not a folder"
    text.encode("utf-8")
