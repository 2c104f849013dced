"""Models whose values have half as many channels as their queries and keys: no flag describes one yet."""

import contextlib
import dataclasses
from unittest import mock

from megatron.kernels import choose
from megatron.spec import decoder


def _halved(config, window):
    core = _core(config, window)
    return dataclasses.replace(core, v_dim=core.qk_dim // 2)


_core = decoder.attention_core


@contextlib.contextmanager
def narrow_values():
    """Every description and choice of kernels that is made inside is that of such a model."""

    def forget():
        for cached in (decoder.decoder_spec, decoder._layer):
            cached.cache_clear()

    forget()
    try:
        with (
            mock.patch.object(decoder, "attention_core", _halved),
            mock.patch.object(choose, "attention_core", _halved),
        ):
            yield
    finally:
        forget()
