"""Saves of a config file as editors and tools make them: in place, by rename, as a link that is swapped."""

import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from edited_projects import Target


class Editor:
    """Saves files as editors and tools do."""

    def __init__(self, target: Target) -> None:
        self._target = target
        present = re.search(rf"^{re.escape(target.option)}\s*:\s*(\S+)", target.engine_yaml.read_text(), re.MULTILINE)
        is_first = present is not None and present[1] == target.values[0]
        self._values = itertools.cycle(reversed(target.values) if is_first else target.values)
        self._levels = itertools.cycle(("two", "one"))
        self._numbers = itertools.count(1)
        self._original = target.engine_yaml.read_bytes()
        self._compose = target.compose_yaml.read_text() if target.compose_yaml else ""
        self._made: list[Path] = []
        self.kinds: dict[str, Callable[[], None]] = {
            "in place": self._in_place, "by rename": self._by_rename, "link swapped": self._link,
        }  # fmt: skip
        if target.compose_yaml:
            self.kinds["compose.yaml"] = self._definition

    def restore(self) -> None:
        """The project's files as they were."""
        self._replace(self._original)
        for file in self._made:
            file.unlink(missing_ok=True)

    def _text(self) -> bytes:
        """The config file with the other value."""
        line = f"{self._target.option}: {next(self._values)}"
        option = re.compile(rf"^{re.escape(self._target.option)}\s*:.*$", re.MULTILINE)
        text, count = option.subn(line, self._original.decode())
        return (text if count else f"{text.rstrip()}\n{line}\n").encode()

    def _in_place(self) -> None:
        self._target.engine_yaml.write_bytes(self._text())

    def _by_rename(self) -> None:
        self._replace(self._text())

    def _replace(self, text: bytes) -> None:
        new = self._target.engine_yaml.with_name(".bench-edit.new")
        new.write_bytes(text)
        shutil.copymode(self._target.engine_yaml, new)
        new.replace(self._target.engine_yaml)

    def _link(self) -> None:
        file = self._target.engine_yaml.with_name(f".bench-edit.{next(self._numbers)}")
        self._made.append(file)
        file.write_bytes(self._text())
        shutil.copymode(self._target.engine_yaml, file)
        link = self._target.engine_yaml.with_name(".bench-edit.link")
        link.symlink_to(file.name)
        link.replace(self._target.engine_yaml)

    def _definition(self) -> None:
        self._target.compose_yaml.write_text(self._compose.replace("LEVEL:-one", f"LEVEL:-{next(self._levels)}"))
