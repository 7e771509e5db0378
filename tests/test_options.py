"""What may stand in vLLM's --model-loader-extra-config."""

import pytest

from weightkeeper.errors import ConfigError
from weightkeeper.options import Options, read


def test_nothing_given_is_zero_copy_with_fallback(monkeypatch):
    """The defaults."""
    monkeypatch.delenv("WEIGHTKEEPER_SOCKET_DIR", raising=False)
    assert read(None) == Options()
    assert (read({}).mode, read({}).fallback, read({}).socket_dir) == ("zero_copy", True, "/run/weightkeeper")


def test_the_socket_directory_comes_from_the_argument_before_the_environment(monkeypatch):
    """Argument, then environment, then default."""
    monkeypatch.setenv("WEIGHTKEEPER_SOCKET_DIR", "/from/environment")
    assert read({}).socket_dir == "/from/environment"
    assert read({"socket_dir": "/given"}).socket_dir == "/given"


def test_vllms_own_keys_are_taken_with_their_meaning():
    """A configuration for `ipc_cache` goes on working."""
    options = read(
        {"socket_path": "/a.sock", "mode": "copy", "fallback": False, "connect_timeout_s": 1, "state_timeout_s": 2.5}
    )
    assert (options.socket_path, options.mode, options.fallback) == ("/a.sock", "copy", False)
    assert (options.connect_timeout_s, options.state_timeout_s) == (1, 2.5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fallbak": True}, "unknown key 'fallbak'"),
        ({"mode": "zerocopy"}, "mode is 'zerocopy', expected zero_copy or copy"),
        ({"fallback": "no"}, "fallback is 'no', expected a bool"),
        ({"connect_timeout_s": True}, "connect_timeout_s is True"),
        ({"connect_timeout_s": float("nan")}, "expected seconds between 0 and 86400"),
        ({"state_timeout_s": 0}, "state_timeout_s is 0"),
        ({"disk_load_format": "ipc_cache"}, "expected a format that reads a disk"),
        ({"is_draft": True, "socket_path": "/a"}, "cannot be combined with a draft"),
    ],
)
def test_a_wrong_key_or_value_is_refused_by_name(given, words):
    """An unknown key is an error, never a shrug."""
    with pytest.raises(ConfigError) as caught:
        read(given)
    assert words in str(caught.value)


def test_all_faults_come_in_one_message():
    """Nobody should fix them one by one."""
    with pytest.raises(ConfigError) as caught:
        read({"a": 1, "mode": 3})
    assert "unknown key 'a'" in str(caught.value)
    assert "mode is 3" in str(caught.value)
