"""One file a command of the `weightkeeper` program; each has a click command called `command`."""
