"""Options that the container's definition has to agree with."""

CONTAINER: dict[str, str] = {
    "config": "the container's command names the file",
    "host": "published ports reach the server only where it listens on the container's address",
    "port": "ports are published, and health is asked, at a fixed number",
    "uds": "clients reach a Unix socket only through a mounted directory, and then no port",
    "grpc": "another protocol at the same port; health is asked over HTTP",
    "grpc-port": "ports are published at a fixed number",
    "data-parallel-supervisor-port": "ports are published at a fixed number",
}
"""Option → why."""
