"""Reading vLLM's config file as values."""

import pytest

from weightkeeper import engine_config
from weightkeeper.errors import ConfigError


def test_options_come_with_dashes_and_typed_values():
    """Underscores and dashes are one option."""
    assert engine_config.parse(b"max_model_len: 2048\nenforce-eager: true\nmodel: /model\n", "engine.yaml") == {
        "max-model-len": 2048,
        "enforce-eager": True,
        "model": "/model",
    }


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "engine.yaml: empty"),
        (b"# only a comment\n", "engine.yaml: empty"),
        (b"- a\n- b\n", "found a list"),
        (b"model: [\n", "engine.yaml, line 2 column 1"),
        (b"model: a\nmodel: b\n", "the key 'model' is given twice"),
        (b"max-model-len: 1\nmax_model_len: 2\n", "max-model-len is given twice, with a dash and with an underscore"),
        (b"a: \xff\n", "not readable as YAML"),
        (b"day: 2026-13-01\n", "not readable as YAML: month must be in 1..12"),
        (b"[" * 5000, "not readable as YAML"),
        (b"a: !override b\n", "could not determine a constructor"),
        (b"? [1, 2]\n: 3\n", "unhashable key"),
    ],
    ids=[
        "empty",
        "comment",
        "list",
        "cut",
        "twice",
        "two spellings",
        "not text",
        "no such day",
        "deep",
        "tag",
        "list as key",
    ],
)
def test_a_file_that_cannot_be_used_says_why(raw, words):
    """With line and column where there is one."""
    with pytest.raises(ConfigError) as caught:
        engine_config.parse(raw, "engine.yaml")
    assert words in str(caught.value)


def test_merge_keys_and_anchors_work():
    """They are plain YAML."""
    raw = b"base: &base {a: 1}\nother:\n  <<: *base\n  b: 2\n"
    assert engine_config.parse(raw, "engine.yaml")["other"] == {"a": 1, "b": 2}


def test_a_missing_file_and_a_directory_are_named(tmp_path):
    """The path is in the message."""
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            engine_config.read(path)


def test_an_endless_file_is_cut_off():
    """No read without a limit."""
    with pytest.raises(ConfigError, match="over 65536 bytes"):
        engine_config.read("/dev/zero")


def test_a_required_option_is_asked_for_by_name():
    """With the file it belongs into."""
    with pytest.raises(ConfigError, match=r"engine\.yaml: `model:` is missing"):
        engine_config.required({"model": None}, "model", "engine.yaml")
