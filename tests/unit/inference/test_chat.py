import pytest

from megatron.core.datasets.tokenizer import NullTokenizer
from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from megatron.core.errors import ConfigError, DataError
from megatron.core.inference.chat import open_template
from tests.unit.inference.serving import write_tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tokenizer with a template, and one without."""
    own, bare = (tmp_path_factory.mktemp(name) for name in ("own", "bare"))
    return write_tokenizer(own), write_tokenizer(bare, template=None)


def test_the_tokenizers_own_template(folders):
    assert open_template(HuggingFaceTokenizer(folders[0]), None).render(HELLO) == "<s><|user|>Hello<|assistant|>"


def test_a_file_replaces_it(folders, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}{{ eos_token }}")
    for folder in folders:
        assert open_template(HuggingFaceTokenizer(folder), str(file)).render(HELLO) == "[Hello]</s>"


def test_a_tokenizer_may_have_none(folders):
    assert open_template(HuggingFaceTokenizer(folders[1]), None) is None
    assert open_template(NullTokenizer(9), None) is None


def test_messages_that_it_does_not_take(folders):
    template = open_template(HuggingFaceTokenizer(folders[0]), None)
    with pytest.raises(DataError, match="does not take these messages: the system speaks first"):
        template.render([*HELLO, {"role": "system", "content": "x"}])


@pytest.mark.parametrize(("text", "message"), [(None, "cannot be read"), ("{% for %}", "does not take")])
def test_a_bad_file_is_found_at_once(folders, tmp_path, text, message):
    file = tmp_path / "template.jinja"
    if text is not None:
        file.write_text(text)
    with pytest.raises(DataError, match=message):
        open_template(HuggingFaceTokenizer(folders[0]), str(file))


def test_other_tokenizers_cannot_render_one(tmp_path):
    with pytest.raises(ConfigError, match="needs --tokenizer-type HuggingFaceTokenizer"):
        open_template(NullTokenizer(9), str(tmp_path / "template.jinja"))


def test_a_template_reaches_nothing(folders, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(DataError, match=r"unsafe|access"):
        open_template(HuggingFaceTokenizer(folders[0]), str(file))
