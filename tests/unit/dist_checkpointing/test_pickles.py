"""Members of enums are read however Python pickles them; any other use of getattr is refused."""

import io
import pickle

import pytest
import torch

from megatron.base.errors import CheckpointError
from megatron.core.dist_checkpointing.pickles import Record, RecordUnpickler, load_objects

# {"iteration": 7, "args": Namespace(exit_signal=SIGTERM, model_type=ModelType.encoder_or_decoder)} by Python 3.11.2.
BY_3_11_2 = (
    b"\x80\x02}q\x00(X\t\x00\x00\x00iterationq\x01K\x07X\x04\x00\x00\x00argsq\x02cargparse\nNamespace\nq\x03)\x81"
    b"q\x04}q\x05(X\x0b\x00\x00\x00exit_signalq\x06csignal\nSIGTERM\nq\x07X\n\x00\x00\x00model_typeq\x08"
    b"c__builtin__\ngetattr\nq\tcmegatron.core.enums\nModelType\nq\nX\x12\x00\x00\x00encoder_or_decoderq\x0b\x86q\x0c"
    b"Rq\rubu."
)


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
    with pytest.raises(TypeError, match="getattr"):
        read(pickled(owner, b"__class__"))


def test_other_names_are_refused():
    with pytest.raises(pickle.UnpicklingError, match=r"it names os\.system"):
        read(b"cos\nsystem\n(Vtrue\ntR.")


def as_file(data):
    """The file of torch.save around a pickle."""
    file = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(file)
    writer.write_record("data.pkl", data, len(data))
    writer.write_end_of_file()
    file.seek(0)
    return file


def test_members_among_the_arguments_of_a_run():
    found = load_objects(as_file(BY_3_11_2), "common.pt")
    assert found["iteration"] == 7
    assert repr(found["args"].model_type) == "<megatron.core.enums.ModelType>"
    assert found["args"].exit_signal is not None


# Two classes that torch may make objects of, a text, a function, and an object.
@pytest.mark.parametrize(
    "owner",
    [
        b"ctorch\nTensor\n",
        b"cargparse\nNamespace\n",
        b"X\x03\x00\x00\x00abc",
        b"cbuiltins\ngetattr\n",
        b"cknown.module\nKind\n)\x81",
    ],
)
def test_nothing_else_among_them_has_members(owner):
    data = b"\x80\x02cbuiltins\ngetattr\n" + owner + b"X\x09\x00\x00\x00__class__\x86R."
    with pytest.raises(CheckpointError, match=r"^common\.pt cannot be read: TypeError: it calls builtins\.getattr"):
        load_objects(as_file(data), "common.pt")


@pytest.mark.parametrize("member", [b"__subclasses__", b"__init__", b"__globals__"])
def test_a_member_of_a_class_is_never_an_attribute_of_it(member):
    """Its name is not looked up: what comes back is an object that does nothing, and cannot be called."""
    name = b"X" + len(member).to_bytes(4, "little") + member
    found = b"cbuiltins\ngetattr\n(cknown.module\nKind\n" + name + b"tR"
    assert repr(load_objects(as_file(b"\x80\x02" + found + b"."), "common.pt")) == "<known.module.Kind>"
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_objects(as_file(b"\x80\x02" + found + b")R."), "common.pt")


def test_other_names_of_the_library_are_refused():
    with pytest.raises(CheckpointError, match=r"is refused: its pickle would call os\.system, signal\.raise_signal"):
        load_objects(as_file(b"\x80\x02cos\nsystem\ncsignal\nraise_signal\n\x86."), "common.pt")
