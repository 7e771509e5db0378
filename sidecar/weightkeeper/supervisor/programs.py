"""What a service's container runs of ours: a launcher, a keeper, or neither. Read off its command; pure."""

import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MODULE = ("-m", "weightkeeper.cli")


@dataclass(frozen=True, slots=True)
class Program:
    """`weightkeeper VERB OPTIONS` in a command.

    Attributes:
        words: with which the program is called in that container, without the verb.
        verb: `engine`, `serve`, `supervise`.
        options: what follows the verb.
    """

    words: tuple[str, ...]
    verb: str
    options: tuple[str, ...]

    def option(self, name: str) -> str:
        """The value of `--name`, the last one where there are several, "" where it is not given."""
        return (self.every(name) or ("",))[-1]

    def every(self, name: str) -> tuple[str, ...]:
        """The values of `--name`, in either spelling and in order. What follows `--` is not ours."""
        ours = self._own()
        values: list[str] = []
        for position, word in enumerate(ours):
            if word == name:
                values.append("".join(ours[position + 1 : position + 2]))
            elif word.startswith(f"{name}="):
                values.append(word.partition("=")[2])
        return tuple(values)

    def has(self, flag: str) -> bool:
        return flag in self._own()

    def _own(self) -> tuple[str, ...]:
        return self.options[: self.options.index("--")] if "--" in self.options else self.options

    def command(self, verb: str, *arguments: str) -> list[str]:
        """A command line for the same container that talks to this program."""
        found: list[str] = []
        for name in ("--name", "--socket-dir"):
            if value := self.option(name):
                found += [name, value]
        return [*self.words, verb, *found, *arguments]

    def alone(self, verb: str, *arguments: str) -> list[str]:
        """A command line for the same container that talks to nobody, and so takes no socket's place."""
        return [*self.words, verb, *arguments]


def find(words: Sequence[str], verb: str) -> Program | None:
    """The program with this verb in a command, as `arguments.words` gives it; None where there is none."""
    return next((program for program in _programs(words) if program.verb == verb), None)


def _programs(words: Sequence[str]) -> Iterator[Program]:
    for position in range(1, len(words)):
        before = words[position - 1]
        if posixpath.basename(before) == "weightkeeper":
            start = position - 1
        elif tuple(words[max(0, position - 2) : position]) == MODULE and position >= 3:
            start = position - 3
        else:
            continue
        yield Program(tuple(words[start:position]), words[position], tuple(words[position + 1 :]))
