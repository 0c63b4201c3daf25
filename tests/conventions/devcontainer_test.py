#!/usr/bin/env python3
"""The development container's file: its properties by the published format, and what it names is there.

The table below is what containers.dev/implementors/json_reference says of the properties that a file like ours may
have: their names, types and forms. Exit status 77: skipped, there is no jsonschema.
"""
import copy
import json
import pathlib
import re
import sys

try:
    import jsonschema
except ImportError:
    print("skipped: no jsonschema here (python3-jsonschema)")
    sys.exit(77)

TEXT = {"type": "string"}
SIZE = {"type": "string", "pattern": "^[0-9]+([tgmk]b)?$"}
LIST = {"type": "array", "items": TEXT}
COMMAND = {"anyOf": [TEXT, LIST, {"type": "object", "additionalProperties": {"anyOf": [TEXT, LIST]}}]}  # shell, words, several


def fields(known, required=()):
    return {"type": "object", "properties": known, "required": list(required), "additionalProperties": False}


FORMAT = fields({
    "name": TEXT,
    "build": fields({"dockerfile": TEXT, "context": TEXT, "target": TEXT,
                     "args": {"type": "object", "additionalProperties": TEXT},
                     "cacheFrom": {"anyOf": [TEXT, LIST]}, "options": LIST}, ["dockerfile"]),
    "hostRequirements": fields({"cpus": {"type": "integer", "minimum": 1}, "memory": SIZE, "storage": SIZE}),
    "remoteUser": TEXT, "containerUser": TEXT, "workspaceFolder": TEXT, "runArgs": LIST,
    "containerEnv": {"type": "object", "additionalProperties": TEXT},
    "features": {"type": "object"}, "customizations": {"type": "object"},
    "waitFor": {"enum": ["initializeCommand", "onCreateCommand", "updateContentCommand", "postCreateCommand",
                         "postStartCommand"]},
    **{when + "Command": COMMAND
       for when in ("initialize", "onCreate", "updateContent", "postCreate", "postStart", "postAttach")},
}, ["build"])


def faults(described, folder):
    """What is wrong with a file's contents, whose paths begin in that folder."""
    out = [f"{'.'.join(map(str, e.absolute_path))}: {e.message}" for e in
           jsonschema.Draft7Validator(FORMAT).iter_errors(described)]
    if out:
        return out
    build = described["build"]
    recipe = folder / build["dockerfile"]
    if not recipe.is_file() or not (folder / build.get("context", ".")).is_dir():
        return [f"{recipe} or its context is not there"]
    if not re.search(rf"^FROM .* AS {re.escape(build.get('target', ''))}$", recipe.read_text(), re.M):
        out.append(f"{recipe.name} has no target {build.get('target')}")
    program = described["postCreateCommand"].split()[0]
    if not (folder / ".." / program).is_file():
        out.append(f"postCreateCommand: no {program} in a checkout")
    return out


def main():
    folder = pathlib.Path(__file__).resolve().parents[2] / ".devcontainer"
    ours = json.loads((folder / "devcontainer.json").read_text())
    assert faults(ours, folder) == [], faults(ours, folder)
    for path, value in [(["postCreateComand"], "true"), (["build", "dockerFile"], "x"), (["build", "target"], "none"),
                        (["build", "dockerfile"], "../none"), (["hostRequirements", "memory"], "8 GB"),
                        (["hostRequirements", "cpus"], "2"), (["postCreateCommand"], 1), (["postCreateCommand"], "./none"),
                        (["waitFor"], "never"), (["build"], {"context": ".."})]:
        changed = copy.deepcopy(ours)
        at = changed
        for name in path[:-1]:
            at = at[name]
        at[path[-1]] = value
        assert faults(changed, folder), f"{'.'.join(path)} = {value} is not refused"


main()
