"""Members of enums are read however Python pickles them; any other use of getattr is refused."""

import io
import pickle

import pytest

from megatron.core.dist_checkpointing.pickles import Record, RecordUnpickler


def read(data):
    return RecordUnpickler(io.BytesIO(data), ("known.module",)).load()


def pickled(owner, attribute):
    """getattr(owner, attribute), where owner is the text of a global."""
    return b"cbuiltins\ngetattr\n(c" + owner + b"\nV" + attribute + b"\ntR."


def test_a_member_of_a_known_class():
    found = read(pickled(b"known.module\nEncoding", b"PLAIN"))
    assert isinstance(found, Record) and type(found).__name__ == "Encoding" and found.args == ("PLAIN",)


@pytest.mark.parametrize("owner", [b"collections\nOrderedDict", b"torch\nfloat32", b"builtins\ngetattr"])
def test_nothing_else_has_members(owner):
    with pytest.raises(pickle.UnpicklingError, match="getattr"):
        read(pickled(owner, b"__class__"))


def test_other_names_are_refused():
    with pytest.raises(pickle.UnpicklingError, match=r"it names os\.system"):
        read(b"cos\nsystem\n(Vtrue\ntR.")
