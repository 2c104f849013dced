import pytest

from megatron.base.errors import DataError
from megatron.core.datasets.tokenizer import NullTokenizer
from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from megatron.core.inference.chat import open_template
from tests.unit.inference.serving import write_tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tokenizer with a template, and one without."""
    own, bare = (tmp_path_factory.mktemp(name) for name in ("own", "bare"))
    return write_tokenizer(own), write_tokenizer(bare, template=None)


def test_the_tokenizers_own_template(folders):
    assert open_template(HuggingFaceTokenizer(folders[0])).render(HELLO) == "<s><|user|>Hello<|assistant|>"


def test_a_given_template_replaces_it(folders):
    text = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ eos_token }}"
    for folder in folders:
        assert open_template(HuggingFaceTokenizer(folder, chat_template=text)).render(HELLO) == "[Hello]</s>"


def test_a_tokenizer_may_have_none(folders):
    assert open_template(HuggingFaceTokenizer(folders[1])) is None
    assert open_template(NullTokenizer(9)) is None


def test_messages_that_it_does_not_take(folders):
    template = open_template(HuggingFaceTokenizer(folders[0]))
    with pytest.raises(DataError, match="does not take these messages: the system speaks first"):
        template.render([*HELLO, {"role": "system", "content": "x"}])


def test_a_bad_template_is_found_at_once(folders):
    with pytest.raises(DataError, match="does not take"):
        open_template(HuggingFaceTokenizer(folders[0], chat_template="{% for %}"))


def test_a_template_reaches_nothing(folders):
    text = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(DataError, match=r"unsafe|access"):
        open_template(HuggingFaceTokenizer(folders[0], chat_template=text))
