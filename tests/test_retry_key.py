"""What counts as a change after a failed load."""

import os

import pytest

from weightkeeper.retry_key import MAX_FILES, key_of


@pytest.fixture
def model(tmp_path):
    """A config file and the model that it names, with a link into another folder as caches have them."""
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    (model / "a.safetensors").write_bytes(b"a")
    (model / "sub/b.json").write_bytes(b"b")
    (tmp_path / "blob").write_bytes(b"c")
    (model / "c.safetensors").symlink_to("../blob")
    (tmp_path / "engine.yaml").write_text(f"model: {model}\n")
    return model


CHANGES = {
    "a file's content": lambda model: (model / "a.safetensors").write_bytes(b"x"),
    "a file's times": lambda model: os.utime(model / "a.safetensors", (1, 1)),
    "a new file": lambda model: (model / "d.safetensors").write_bytes(b""),
    "a file gone": lambda model: (model / "sub/b.json").unlink(),
    "a file below": lambda model: (model / "sub/b.json").write_bytes(b"bb"),
    "what a link leads to": lambda model: (model.parent / "blob").write_bytes(b"y"),
    "a link that breaks": lambda model: (model.parent / "blob").unlink(),
    "another file of the same name": lambda model: (model / "sub/b.json").replace(model / "a.safetensors"),
    "the model gone": lambda model: model.rename(model.with_name("away")),
    "the config's content": lambda model: (model.parent / "engine.yaml").write_text(f"model: {model}\n# x\n"),
    "the config unreadable": lambda model: (model.parent / "engine.yaml").unlink(),
    "the config broken": lambda model: (model.parent / "engine.yaml").write_text("model: ["),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_makes_another_key(model, name):
    """Each of these can make the next load end differently."""
    config = str(model.parent / "engine.yaml")
    before = key_of(config)
    CHANGES[name](model)
    assert key_of(config) != before


def test_without_a_change_the_key_stays(model):
    """Looking again, touching the config, or a change beside the model is none."""
    config = str(model.parent / "engine.yaml")
    before = key_of(config)
    os.utime(config, (1, 1))
    (model.parent / "beside").write_bytes(b"x")
    assert key_of(config) == before


@pytest.mark.parametrize("text", ["", "[]", "model: 5", "model: org/name", 'model: "a\\0b"', "{", "\udcff"])
def test_any_config_has_a_key(tmp_path, text):
    """Whatever is in the file, asking costs no error."""
    config = tmp_path / "engine.yaml"
    config.write_bytes(text.encode(errors="surrogateescape"))
    assert key_of(str(config))[0] == config.read_bytes()
    assert key_of(str(tmp_path / "missing"))[1] == ()
    assert key_of(str(tmp_path))[1] == ()


def test_a_directory_without_end_is_not_walked_to_its_end(tmp_path):
    """`model: /` in a config costs a bounded number of stats."""
    (tmp_path / "engine.yaml").write_text("model: /usr\n")
    assert len(key_of(str(tmp_path / "engine.yaml"))[1]) <= MAX_FILES
