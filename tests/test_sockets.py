"""Where the keeper's sockets are, whose they are, and which keeper has them."""

import logging
import multiprocessing
import os
import signal
import socket
import subprocess

import pytest
from keepers import as_user, wait_for

from weightkeeper.errors import ConfigError, SocketInUseError, SocketPathError, WrongOwnerError
from weightkeeper.listening import SocketDirectory
from weightkeeper.sockets import (
    allowed_uids,
    check_owner,
    check_peer,
    control_path,
    engine_path,
    peer_of,
    prepare_directory,
)

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's identity, which only root can")
US = os.geteuid()


def mode_of(path):
    return os.lstat(path).st_mode & 0o7777


@pytest.fixture
def open_path(tmp_path):
    """A directory below which every user can look, with a name that they can reach."""
    directory = tmp_path
    while directory != directory.parent:
        if os.stat(directory).st_uid == US and directory.name.startswith(("pytest", "test")):
            directory.chmod(0o755)
        directory = directory.parent
    return tmp_path


def test_sockets_have_the_names_of_their_devices():
    """One control socket, and one socket a device."""
    assert control_path("/run/weightkeeper") == "/run/weightkeeper/control.sock"
    assert engine_path("/run/weightkeeper", "cpu-0") == "/run/weightkeeper/cpu-0.sock"
    uuid = "GPU-af7b61d8-1111-2222-3333-444444444444"
    assert engine_path("/run/weightkeeper", uuid) == f"/run/weightkeeper/{uuid}.sock"


@pytest.mark.parametrize("device", ["", "../x", "a/b", "a.b", "x" * 65, "a b", "é", "a\0", "cpu-0\n", "control"])
def test_what_is_no_device_name_is_refused(device):
    """No name leads out of the directory or onto the control socket."""
    with pytest.raises(SocketPathError, match="is no device name"):
        engine_path("/run/weightkeeper", device)


def test_a_path_that_is_too_long_is_refused_with_its_length_and_the_remedy():
    """The kernel's limit of 107 bytes is known before anything is loaded. Bytes count, not characters."""
    fits = "/" + "d" * (107 - len("/control.sock") - 1)
    assert len(control_path(fits)) == 107
    with pytest.raises(SocketPathError, match=r"108 bytes, a Unix socket's path has at most 107; .* 1 bytes shorter"):
        control_path(fits + "d")
    with pytest.raises(SocketPathError, match=r"/cpu-00000\.sock: 116 bytes"):
        engine_path("/" + "é" * 50, "cpu-00000")


def test_a_missing_directory_is_made_for_us_alone(tmp_path):
    """With its parents."""
    prepare_directory(str(tmp_path / "a/b"))
    assert mode_of(tmp_path / "a/b") == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777, 0o500])
def test_our_own_directory_is_tightened(tmp_path, mode):
    """A volume is 0755 at first; nobody else has to look into it, let alone write."""
    tmp_path.chmod(mode)
    prepare_directory(str(tmp_path))
    assert mode_of(tmp_path) == 0o700


def test_allowed_users_can_pass_through_but_not_look_or_write(tmp_path):
    """With an allow-list others have to reach the sockets, and no more."""
    prepare_directory(str(tmp_path), {1234})
    assert mode_of(tmp_path) == 0o711


def test_a_link_or_a_file_is_no_socket_directory(tmp_path):
    """Each with what it is."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(SocketPathError, match=f"{tmp_path}/link is a link to real; name the directory itself"):
        prepare_directory(str(tmp_path / "link"))
    for name in ("file", "dangling"):
        with pytest.raises(SocketPathError, match=f"{tmp_path}/{name} is not a directory; remove it"):
            prepare_directory(str(tmp_path / name))
    with pytest.raises(SocketPathError, match=f"{tmp_path}/file/below: Not a directory"):
        prepare_directory(str(tmp_path / "file/below"))


@AS_ROOT
def test_g11_a_root_owned_directory_is_named_with_owner_our_uid_and_the_remedy(open_path):
    """G11: one line says all that is needed to repair a volume that root made."""
    volume = open_path / "volume"
    volume.mkdir(mode=0o755)
    assert as_user(1000, lambda: prepare_directory(str(volume))) == (
        f"SocketPathError: {volume} belongs to uid 0 and we run as uid 1000: `chown 1000 {volume}` once, "
        "or remove the volume so that the image's ownership applies to a new one"
    )
    assert as_user(1000, lambda: prepare_directory(str(open_path / "new"))) == (
        f"SocketPathError: {open_path}/new: Permission denied (we run as uid 1000); "
        "create it for this user or choose another one with --socket-dir"
    )
    os.chown(volume, 1000, 1000)
    assert as_user(1000, lambda: prepare_directory(str(volume))) == "None"


@AS_ROOT
def test_g11_a_directory_of_another_user_is_refused_by_root_too(tmp_path):
    """A keeper that runs as root in a volume of uid 1000 would be believed by nobody."""
    os.chown(tmp_path, 1000, 1000)
    with pytest.raises(SocketPathError, match=f"{tmp_path} belongs to uid 1000 and we run as uid 0: `chown 0 "):
        prepare_directory(str(tmp_path))


@pytest.fixture
def held(tmp_path):
    """A directory that is held, with a listening control socket."""
    directory = SocketDirectory(str(tmp_path / "run"))
    listener = directory.listen(control_path(directory.path))
    yield directory
    listener.close()
    directory.close()


def test_a_socket_is_for_its_owner_alone_and_listens_at_once(held):
    """It has its final mode and answers from the moment its name exists."""
    path = control_path(held.path)
    assert mode_of(path) == 0o600
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(path)
        assert peer_of(client).uid == US
        assert peer_of(client).pid == os.getpid()
        assert check_peer(client).uid == US
    assert sorted(os.listdir(held.path)) == ["control.sock", "keeper.lock"]


def test_a_closed_directory_leaves_only_the_lock_file(tmp_path):
    """Sockets go with their keeper."""
    directory = SocketDirectory(str(tmp_path / "run"))
    listeners = [directory.listen(engine_path(directory.path, name)) for name in ("cpu-0", "cpu-1")]
    assert sorted(os.listdir(directory.path)) == ["cpu-0.sock", "cpu-1.sock", "keeper.lock"]
    directory.remove(engine_path(directory.path, "cpu-0"))
    assert sorted(os.listdir(directory.path)) == ["cpu-1.sock", "keeper.lock"]
    directory.close()
    assert os.listdir(directory.path) == ["keeper.lock"]
    for listener in listeners:
        listener.close()


def test_a_socket_that_was_replaced_is_not_removed(held):
    """Only what was made here is taken away."""
    path = control_path(held.path)
    os.unlink(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(path)
        held.remove(path)
        assert os.path.exists(path)
    os.unlink(path)


def test_a_second_keeper_is_refused_while_the_first_lives(held):
    """It learns who has the directory, and the first goes on."""
    with pytest.raises(
        SocketInUseError, match=rf"{held.path}: a live keeper \(pid {os.getpid()}, .*\) has it; stop it"
    ):
        SocketDirectory(held.path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(control_path(held.path))


def test_a_live_socket_is_not_taken_even_without_its_lock_file(held):
    """Somebody removed the lock file: the answer on the socket still counts."""
    os.unlink(os.path.join(held.path, "keeper.lock"))
    with pytest.raises(SocketInUseError, match=r"control\.sock: a live process answers there; stop it"):
        SocketDirectory(held.path)
    assert os.path.exists(control_path(held.path))


def test_one_live_socket_keeps_all_others_from_being_removed(tmp_path):
    """All leftovers are looked at before the first is removed."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    for name in ("a.sock", "b.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
            dead.bind(str(run / name))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as live:
        live.bind(str(run / "z.sock"))
        live.listen(1)
        with pytest.raises(SocketInUseError, match=r"z\.sock: a live process answers there"):
            SocketDirectory(str(run))
    assert sorted(os.listdir(run)) == ["a.sock", "b.sock", "keeper.lock", "z.sock"]


def test_a_live_socket_whose_queue_is_full_is_still_alive(tmp_path):
    """A busy keeper is not taken for a dead one."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    waiting = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as live:
        live.bind(str(run / "control.sock"))
        live.listen(0)
        for _ in range(4):
            client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            waiting.append(client)
            client.connect_ex(str(run / "control.sock"))
        with pytest.raises(SocketInUseError, match="a live process answers there"):
            SocketDirectory(str(run))
        for client in waiting:
            client.close()


def test_g10_dead_sockets_are_taken_over_with_one_line(tmp_path, caplog):
    """G10: what a killed keeper left is removed, said once, and the rest is left alone."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    for name in ("control.sock", "cpu-0.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
            dead.bind(str(run / name))
    (run / "notes.txt").write_text("x")
    (run / "file.sock").write_text("x")
    (run / "link.sock").symlink_to("notes.txt")
    with caplog.at_level(logging.INFO):
        directory = SocketDirectory(str(run))
        directory.close()
    assert caplog.messages == [
        f"took over {run} from a keeper that ended without cleaning up: removed control.sock, cpu-0.sock"
    ]
    assert sorted(os.listdir(run)) == ["file.sock", "keeper.lock", "link.sock", "notes.txt"]
    assert (run / "notes.txt").read_text() == "x"


@pytest.mark.parametrize("what", ["file", "directory", "link"])
def test_something_else_in_the_control_sockets_place_is_named(tmp_path, what):
    """It is neither removed nor followed."""
    path = tmp_path / "control.sock"
    if what == "file":
        path.write_text("x")
    elif what == "directory":
        path.mkdir()
    else:
        path.symlink_to("elsewhere")
    with pytest.raises(SocketPathError, match=f"{path} is in the way and is not a socket; remove it"):
        SocketDirectory(str(tmp_path))
    assert os.path.lexists(path)


def test_a_link_in_the_lock_files_place_is_not_followed(tmp_path):
    """Nobody can make a keeper write into another file."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "keeper.lock").symlink_to("victim")
    with pytest.raises(SocketPathError, match=r"keeper\.lock: Too many levels of symbolic links"):
        SocketDirectory(str(tmp_path))
    assert (tmp_path / "victim").read_text() == "precious"


def hold(path, go, won):
    """In a process of its own: take the directory at the signal, and keep it until the end."""
    go.wait()
    try:
        directory = SocketDirectory(path)
        listener = directory.listen(control_path(path))
    except SocketInUseError:
        won.put(0)
        return
    won.put(os.getpid())
    signal.pause()
    listener.close()


def test_of_many_keepers_started_at_once_exactly_one_has_the_directory(tmp_path):
    """With the leftovers of a dead one in it, so that every one of them finds something to take over."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    context = multiprocessing.get_context("spawn")
    for _ in range(2):
        go, won = context.Event(), context.Queue()
        processes = [context.Process(target=hold, args=(str(run), go, won)) for _ in range(4)]
        for process in processes:
            process.start()
        go.set()
        results = [won.get(timeout=60) for _ in processes]
        assert sorted(results)[:3] == [0, 0, 0]
        assert max(results) > 0
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(run / "control.sock"))
            assert peer_of(client).pid == max(results)
        for process in processes:
            process.kill()
            process.join()
            process.close()
        won.close()
        wait_for(lambda: os.path.exists(run / "control.sock"), "the leftover of the killed keeper")


def test_a_child_program_does_not_keep_the_lock(tmp_path):
    """A loader that outlives its keeper does not keep the next one out."""
    directory = SocketDirectory(str(tmp_path / "run"))
    with subprocess.Popen(["sleep", "60"], close_fds=False) as child:
        directory.close()
        SocketDirectory(str(tmp_path / "run")).close()
        child.kill()


def test_a_client_believes_our_own_socket(held):
    """Owner and modes are as the keeper makes them."""
    check_owner(control_path(held.path))
    with pytest.raises(FileNotFoundError):
        check_owner(engine_path(held.path, "cpu-0"))
    with pytest.raises(FileNotFoundError):
        check_owner("/nonexistent/control.sock")


def test_a_client_refuses_what_others_can_write(held):
    """Directory or socket, group or all."""
    path = control_path(held.path)
    for target in (held.path, path):
        before = mode_of(target)
        for mode in (0o720, 0o702):
            os.chmod(target, mode)
            with pytest.raises(WrongOwnerError, match=rf"{target} can be written by other users \(mode 0{mode:o}\)"):
                check_owner(path)
        os.chmod(target, before)
    os.chmod(path, 0o666)
    check_owner(path, {1234})


def test_a_client_refuses_what_is_no_socket(tmp_path):
    """A file or a link in the socket's place, and a link in the directory's place."""
    tmp_path.chmod(0o700)
    (tmp_path / "control.sock").write_text("")
    with pytest.raises(WrongOwnerError, match=r"control\.sock is not a socket"):
        check_owner(str(tmp_path / "control.sock"))
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(WrongOwnerError, match="link is not a directory"):
        check_owner(str(tmp_path / "link/control.sock"))


@AS_ROOT
def test_a_client_refuses_another_users_socket_or_directory(held):
    """Unless that user is allowed; the message names both."""
    path = control_path(held.path)
    for target in (path, held.path):
        os.chown(target, 1234, 1234)
        message = (
            f"{target} belongs to uid 1234 and we run as uid 0: run both as one user, or allow the other with WEIGHT"
        )
        with pytest.raises(WrongOwnerError, match=message):
            check_owner(path)
        check_owner(path, {1234})
        os.chown(target, 0, 0)


@AS_ROOT
def test_a_client_that_may_not_look_into_the_directory_says_whose_it_is(open_path):
    """G11 from the engine's side."""
    volume = open_path / "volume"
    volume.mkdir(mode=0o700)
    for path in (f"{volume}/control.sock", f"{volume}/below/control.sock", f"{volume}/a/b/control.sock"):
        assert as_user(1000, lambda path=path: check_owner(path)).startswith(
            f"WrongOwnerError: {volume} belongs to uid 0 and we run as uid 1000: "
        )


def test_the_allow_list_comes_from_the_environment(monkeypatch):
    """Numbers with spaces between; anything else is a mistake."""
    monkeypatch.delenv("WEIGHTKEEPER_ALLOW_UID", raising=False)
    assert allowed_uids() == set()
    monkeypatch.setenv("WEIGHTKEEPER_ALLOW_UID", "1000 1001")
    assert allowed_uids() == {1000, 1001}
    monkeypatch.setenv("WEIGHTKEEPER_ALLOW_UID", "root")
    with pytest.raises(ConfigError, match="WEIGHTKEEPER_ALLOW_UID='root': expected user numbers"):
        allowed_uids()
