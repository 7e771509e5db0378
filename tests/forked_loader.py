"""The keeper's real loader, forked from a process that has imported vLLM, so that a test does not wait for the imports.

Started by a keeper in place of `python -m weightkeeper.loader`; ends as that loader ends. Tests of how a loader itself
ends or is killed use the real command.
"""

import json
import os
import socket
import sys


def main() -> int:
    path = os.environ.pop("WEIGHTKEEPER_TEST_PREFORK")
    arguments = sys.argv[1:]
    at = arguments.index("--channel")
    channel = int(arguments[at + 1])
    environment = os.environ | {"LOADER_ARGUMENTS": json.dumps(arguments[:at] + arguments[at + 2 :])}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(dict(environment)).encode()], [0, 1, 2, channel])
        os.close(channel)
        told = connection.makefile()
        told.readline()  # its process id
        return int(told.read())


if __name__ == "__main__":
    sys.exit(main())
