"""What became of an action: one line in the log, one record in the history."""

import logging

from weightkeeper.supervisor.follow import Outcome
from weightkeeper.supervisor.history import History, Record, now
from weightkeeper.supervisor.plan import Action

log = logging.getLogger(__name__)

LEVELS = {
    "healthy": logging.INFO,
    "running": logging.INFO,
    "done": logging.INFO,
    "skipped": logging.WARNING,
    "starting": logging.WARNING,
    "undecided": logging.WARNING,
}
"""Of the line about a result; the others are errors."""


def tell(history: History, verb: str, action: Action, outcome: Outcome) -> None:
    """Put an outcome on record and log it: who has read the line finds the record."""
    put(history, verb, action, outcome)
    level = LEVELS.get(outcome.result, logging.ERROR)
    is_noted = outcome.detail and outcome.result in ("healthy", "running")
    log.log(logging.WARNING if is_noted else level, "%s", said(verb, action.service, outcome))


def put(history: History, verb: str, action: Action, outcome: Outcome) -> None:
    """Append to the history. A full disk is said, and keeps no engine from being restarted."""
    shown = [change for change in action.changes if change.before]
    record = Record(
        time=now(),
        service=action.service,
        action=verb,
        cause=action.cause,
        result=outcome.result,
        seconds=round(outcome.seconds, 3),
        before=outcome.before,
        after=outcome.after,
        detail=outcome.detail,
        from_={change.name: change.before for change in shown},
        to={change.name: change.after for change in shown},
        phases=outcome.phases,
    )
    try:
        history.append(record)
    except OSError as error:
        log.error("the history cannot be written: %s", error)


def said(verb: str, service: str, outcome: Outcome) -> str:
    """One line about what became of an action."""
    after = f"{outcome.seconds:.1f} s after {verb}"
    detail = f" ({outcome.detail})" if outcome.detail else ""
    log_of = f": see docker logs {outcome.after[:12]}"
    match outcome.result:
        case "healthy":
            return f"{service} healthy {after}{detail}"
        case "running":
            return f"{service} running {after} (it has no health check){detail}"
        case "done":
            return f"{service} {verb} done after {outcome.seconds:.1f} s{detail}"
        case "exited":
            return f"{service} exited {outcome.detail} {after}{log_of}"
        case "unhealthy":
            return f"{service} unhealthy {after}{detail}{log_of}"
        case "starting":
            return f"{service} still starting {after}{detail}"
        case "undecided":
            return f"{service} {verb} undecided after {outcome.seconds:.1f} s{detail}"
        case "refused":
            return f"{service} goes on as it is: {outcome.detail}"
        case "skipped":
            return f"{service} left down: {outcome.detail}; the change counts when it is started by hand"
        case _:
            return f"{service} {verb} failed: {outcome.detail}"
