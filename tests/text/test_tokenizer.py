"""Tokenizers of checkpoints, and chat templates in their sandbox."""

from pathlib import Path

import pytest
from jitney.errors import CheckpointError, InvalidArgumentError
from jitney.text.tokenizer import Tokenizer

from tests.text.tiny_tokenizers import KINDS, save, tiny

TEMPLATE = (
    "{% for m in messages %}<|im start|>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|im start|>assistant{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<quiet>{% endif %}"
)
CHAT = [{"role": "user", "content": "hello"}]


def with_template(folder: Path, template: str | None) -> Tokenizer:
    return Tokenizer.load(save("byte_level", folder, chat_template=template))


@pytest.mark.parametrize("kind", KINDS)
def test_load_encode_decode(tmp_path: Path, kind: str) -> None:
    tokenizer = Tokenizer.load(save(kind, tmp_path))
    ids = tokenizer.encode("the lazy dog")
    assert ids == tiny(kind).encode("the lazy dog").ids
    assert tokenizer.decode(ids) == "the lazy dog"
    assert tokenizer.eos_ids == {tiny(kind).token_to_id("</s>")}
    assert tokenizer.vocab == tiny(kind).get_vocab(with_added_tokens=True)


@pytest.mark.parametrize("kind", ["byte_level", "llama_style", "gemma_style"])
def test_parts_of_a_character_have_bytes(tmp_path: Path, kind: str) -> None:
    tokenizer = Tokenizer.load(save(kind, tmp_path))
    ids = tokenizer.encode("the 😀", add_special_tokens=False)
    found = [tokenizer.partial_bytes(token_id) for token_id in ids]
    assert found[0] is None, "a whole text"
    joined = b""
    for token_id, partial in zip(ids, found, strict=True):
        text = tokenizer.token_text(token_id)
        assert (partial is not None) == ("\ufffd" in text)
        joined += text.encode() if partial is None else partial
    assert joined.endswith("😀".encode())
    assert tokenizer.partial_bytes(1 << 30) is None


def test_missing_or_broken_files(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save("byte_level", folder)
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="the tokenizer in 'checkpoint' cannot be loaded"):
        Tokenizer.load(folder)


def test_a_sentencepiece_model_alone_says_how_to_convert_it(tmp_path: Path) -> None:
    """Where it cannot be read. A folder without any tokenizer is another matter."""
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(tmp_path)
    message = str(caught.value)
    assert "it is tokenizer.model alone" in message
    assert "pip install transformers sentencepiece protobuf" in message
    assert "T.from_pretrained('FOLDER').save_pretrained('FOLDER')" in message


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.data.missing
    assert tokenizer.vocab == {}
    assert tokenizer.decode([5, 6]) == ""
    decoder = tokenizer.decoder([5], skip_special_tokens=True)
    assert decoder.feed(6) + decoder.flush() == ""
    with pytest.raises(InvalidArgumentError, match=r"^messages cannot be used: .* no tokenizer"):
        tokenizer.render_chat([], {})


def test_chat(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, TEMPLATE)
    expected = "<|im start|>user\nhello</s><|im start|>assistant"
    assert tokenizer.render_chat(CHAT, {}) == expected
    ids = tokenizer.encode(expected, add_special_tokens=False)
    assert ids[0] == tokenizer.vocab["<|im start|>"]
    quiet = {"add_generation_prompt": False, "enable_thinking": False}
    assert tokenizer.render_chat(CHAT, quiet) == "<|im start|>user\nhello</s><quiet>"


def test_no_template(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, None)
    with pytest.raises(InvalidArgumentError, match="this model has no chat template"):
        tokenizer.render_chat(CHAT, {})


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5]['content'] }}", "messages do not fit"),
        ("{{ messages[0]['content'] + 1 }}", "messages do not fit"),
        ("{{ 1 / 0 }}", "messages do not fit"),
        ("{% if %}", "messages do not fit"),
        ("{{ none_such.attribute }}", "messages do not fit"),
        ("{{ range(10000000) | list }}", "messages do not fit"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "messages do not fit"),
    ],
)
def test_a_template_that_fails(tmp_path: Path, template: str, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason) as caught:
        with_template(tmp_path, template).render_chat(CHAT, {})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ cycler.__init__.__globals__['os'].system('true') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ ('' | attr('format_map'))(messages[0]) }}{{ ''.__class__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{% set f = '{0.__class__}'.format %}{{ f(1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% set ns = namespace() %}{{ ns.__init__.__globals__ }}",
    ],
)
def test_a_malicious_template_reaches_nothing(tmp_path: Path, template: str) -> None:
    chat = [dict(CHAT[0])]
    try:
        rendered = with_template(tmp_path, template).render_chat(chat, {})
    except InvalidArgumentError:
        rendered = ""
    assert "class" not in rendered
    assert "os" not in rendered
    assert chat == CHAT
