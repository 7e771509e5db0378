"""pip's configuration (`pip config list` on standard input) in uv's words, as far as it means something in a build."""

import json
import sys

found: dict[str, list[str]] = {"index-url": [], "extra-index-url": []}
for line in sys.stdin:
    key, _, value = line.strip().partition("=")
    option = key.rpartition(".")[2]
    if option in found:
        words = value.strip("'\"").replace("\\n", " ").split()
        # Directories of this machine are not there inside a build; scripts/deps stages what is needed of them.
        found[option] += [word for word in words if word.startswith(("http://", "https://"))]
if found["index-url"]:
    print("index-url =", json.dumps(found["index-url"][-1]))
if found["extra-index-url"]:
    print("extra-index-url =", json.dumps(found["extra-index-url"]))
