"""How numbers and foreign text are shown to people, in log lines and tables."""


def bytes_text(nbytes: int) -> str:
    """`269.1 MB`; decimal units, as disks and checkpoints are sold."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def printable(text: str, limit: int = 128, keep_lines: bool = False) -> str:
    """Text of another process: control characters as `?`, cut at `limit` characters, in one line unless told."""
    kept = "\n" if keep_lines else ""
    shown = "".join(each if each.isprintable() or each in kept else "?" for each in text[:limit])
    return shown + "…" if len(text) > limit else shown


def one_line(text: str) -> str:
    """Its lines with semicolons between them, none where there was one."""
    lines = [line.strip() for line in text.splitlines()]
    return "; ".join(line for line in lines if line)


def seconds_text(seconds: float) -> str:
    """`12.3 s`, `5 min`, `3 h 20 min`, `2 d 4 h`."""
    if seconds < 60:
        return f"{max(0.0, seconds):.1f} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"
