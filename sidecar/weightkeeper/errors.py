"""Every error that weightkeeper raises on purpose.

One base, one meaning a class. `code` is stable text for logs, `status` and scripts. A message names the thing
(path, tensor, GPU UUID, service) and the remedy; it is written to be read by the person who has to act.
"""

from dataclasses import dataclass


class WeightkeeperError(Exception):
    """Base of all errors below.

    Attributes:
        code: stable snake_case name of the cause.
    """

    code = "error"


class ConfigError(WeightkeeperError):
    """A setting, option or configuration file cannot be used as given."""

    code = "config"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong with a checkpoint.

    Attributes:
        path: the file or directory, as the user named it.
        code: stable snake_case name of the fault.
        message: what is wrong and what to do about it.
    """

    path: str
    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class CheckpointError(WeightkeeperError):
    """A checkpoint is refused; `faults` has every reason found, not only the first."""

    code = "checkpoint"

    def __init__(self, path: str, faults: list[Fault]):
        self.path = path
        self.faults = faults
        lines = "\n".join(f"  - {fault}" for fault in faults)
        super().__init__(f"{path} cannot be served, {len(faults)} fault(s):\n{lines}")


class CheckpointChangedError(WeightkeeperError):
    """A file of the checkpoint changed while it was being read."""

    code = "checkpoint_changed"


class MemoryKindError(WeightkeeperError):
    """Shared memory could not be created, exported, sealed or mapped."""

    code = "memory"


class CudaCallError(MemoryKindError):
    """A call of the CUDA driver failed.

    Attributes:
        number: the driver's own error number, CUresult.
    """

    def __init__(self, message: str, number: int):
        self.number = number
        super().__init__(message)


class TrialError(WeightkeeperError):
    """A process of the doctor's trial did not do what it should: it reported an error, crashed, or was silent.

    Attributes:
        number: of the CUDA error that it reported, or 0.
        is_fault: the driver or the kernel stopped it at what it was doing: a CUDA error, SIGSEGV or SIGBUS.
    """

    code = "trial"

    def __init__(self, message: str, number: int = 0, is_fault: bool = False):
        self.number = number
        self.is_fault = is_fault
        super().__init__(message)


class SocketPathError(WeightkeeperError):
    """A socket path is too long, or its directory cannot be used."""

    code = "socket_path"


class SocketInUseError(WeightkeeperError):
    """A live keeper answers on the socket that this one was told to use."""

    code = "socket_in_use"


class LoadFailedError(WeightkeeperError):
    """The loader ended without publishing a model."""

    code = "load_failed"


class UnverifiedQuantizationError(WeightkeeperError):
    """The model's quantization has no recorded evidence that it can be shared."""

    code = "unverified_quantization"


class ReleaseRefusedError(WeightkeeperError):
    """Weights are not released because engines still map them."""

    code = "release_refused"


class ComposeError(WeightkeeperError):
    """Docker Compose refused the project or could not do what it was asked.

    Attributes:
        command: the command line that was run.
        returncode: its exit code; None when it was ended because it took too long.
        stdout: what it wrote, whole.
        stderr: what it wrote, whole.
    """

    code = "compose"

    def __init__(self, command: list[str], returncode: int | None, stdout: str, stderr: str, message: str):
        self.command = command
        self.returncode = returncode
        self.stdout = stdout
        self.stderr = stderr
        ended = "ended" if returncode is None else f"exit code {returncode}"
        super().__init__(f"{message} (`{' '.join(command)}`, {ended})")


class DockerLostError(WeightkeeperError):
    """Nobody answers on the Docker socket, or the connection broke off."""

    code = "docker_lost"


class ServiceError(WeightkeeperError):
    """A service cannot be acted upon: it has no container, or Docker refused what was asked."""

    code = "service"


class NotSupervisedError(ServiceError):
    """A service does not carry the label that lets the supervisor touch it."""

    code = "not_supervised"


class CacheUnusableError(WeightkeeperError):
    """Base of every cause for which an engine does not use the keeper's weights.

    With `fallback: true` the engine loads from disk and logs the code; with `fallback: false` it ends with the cause.
    """

    code = "unusable"


class NoSocketError(CacheUnusableError):
    """There is no keeper socket at the path."""

    code = "no_socket"


class RefusedError(CacheUnusableError):
    """The socket is there but nobody answers on it, or the keeper turned this user away."""

    code = "refused"


class WrongOwnerError(CacheUnusableError):
    """The socket, its directory or its peer belongs to another user, or others may write there."""

    code = "wrong_owner"


class StillLoadingError(CacheUnusableError):
    """The keeper was still loading when the engine's waiting time was over."""

    code = "still_loading"


class KeeperFailedError(CacheUnusableError):
    """The keeper's last load failed; the message has its cause."""

    code = "keeper_failed"


class NotLoadedError(CacheUnusableError):
    """The keeper holds no weights: they were released, or none was ever loaded."""

    code = "not_loaded"


@dataclass(frozen=True, slots=True)
class Difference:
    """One fingerprint field in which keeper and engine differ."""

    field: str
    keeper: str
    engine: str

    def __str__(self) -> str:
        return f"{self.field}: the keeper has {self.keeper}, the engine has {self.engine}"


class MismatchError(CacheUnusableError):
    """The keeper's weights were made under other conditions than the engine asks for.

    Args:
        device: whose weights they are, as sockets name it; empty where the keeper itself says it.
    """

    code = "mismatch"

    def __init__(self, differences: list[Difference], device: str = ""):
        self.differences = differences
        text = "; ".join(str(difference) for difference in differences)
        super().__init__(f"{text}; {device}: {self._remedy()}" if device else text)

    def _remedy(self) -> str:
        fields = {difference.field for difference in self.differences}
        if fields == {"rank"}:
            return "name the GPUs in one order for sidecar and engine (CUDA_VISIBLE_DEVICES)"
        if fields == {"device"}:
            return (
                "start the engine on a device that the keeper has, or `make load` with this one visible to the sidecar"
            )
        return "`make load` has the keeper load anew; options and variables that shape weights belong on both sides"


class SlotsError(CacheUnusableError):
    """The keeper's tensors do not fit the engine's model one to one."""

    code = "slots"


class LostError(CacheUnusableError):
    """The connection to the keeper broke off in the middle of an answer."""

    code = "lost"


class TimeLimitError(CacheUnusableError):
    """The keeper did not answer within the time limit."""

    code = "timeout"


class ProtocolError(CacheUnusableError):
    """A frame is malformed, over a limit, out of order or of another version."""

    code = "protocol"


class AlreadyHeldError(CacheUnusableError):
    """The keeper does not take published weights because it holds these very ones; the engine can map them instead."""

    code = "already_held"


class BusyError(CacheUnusableError):
    """The keeper is taking over so much from other engines that an offer has to come again later."""

    code = "busy"


class NoRoomError(CacheUnusableError):
    """A disk load would put a second copy of the weights where there is no room for it."""

    code = "no_room"


class BuildFailedError(CacheUnusableError):
    """The last engine that mapped these weights failed while it built its model on them."""

    code = "build_failed"


class UnsupportedError(CacheUnusableError):
    """The engine's options cannot be combined with mapped weights (sleep mode, EPLB)."""

    code = "unsupported"


class TemplateError(WeightkeeperError):
    """The process that servers are forked from is lost, or did not do what it was asked."""

    code = "template"


class EngineLostError(WeightkeeperError):
    """No launcher answers on an engine's control socket."""

    code = "engine_lost"


class AnswerCutError(WeightkeeperError):
    """A model server's answer ended before it was whole, so it is no result."""

    code = "answer_cut"


class NoAnswerError(WeightkeeperError):
    """A request to a model server failed: nobody there, out of time, or an error of the server's own."""

    code = "no_answer"


class LedgerError(WeightkeeperError):
    """An idempotency key was used before for another effect."""

    code = "ledger"


class ServerStartError(WeightkeeperError):
    """A server or keeper that is being measured ended, or was not ready in time; the message has the end of its log."""

    code = "server_start"
