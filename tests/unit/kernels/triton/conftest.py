"""Lets kernels count to a number that they have loaded: Triton's interpreter keeps it in an array of one element, which
numpy no longer converts (since 2.4)."""

import importlib.util
import os

if importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patched(tensor, scope):
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patched
