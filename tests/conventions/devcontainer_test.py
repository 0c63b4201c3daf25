#!/usr/bin/env python3
"""Validates the development container's configuration: properties by the published format, and existence of files it names.

The table below contains names, types and formats of the properties in containers.dev/implementors/json_reference.
Exit status 77: skipped, because jsonschema is not installed.
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
COMMAND = {"anyOf": [TEXT, LIST, {"type": "object", "additionalProperties": {"anyOf": [TEXT, LIST]}}]}  # shell, arguments, several


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


def faults(described, directory):
    """The errors in a configuration whose paths are relative to `directory`."""
    out = [f"{'.'.join(map(str, e.absolute_path))}: {e.message}" for e in
           jsonschema.Draft7Validator(FORMAT).iter_errors(described)]
    if out:
        return out
    build = described["build"]
    recipe = directory / build["dockerfile"]
    if not recipe.is_file() or not (directory / build.get("context", ".")).is_dir():
        return [f"{recipe} or its context is not there"]
    if not re.search(rf"^FROM .* AS {re.escape(build.get('target', ''))}$", recipe.read_text(), re.M):
        out.append(f"{recipe.name} has no target {build.get('target')}")
    program = described["postCreateCommand"].split()[0]
    if not (directory / ".." / program).is_file():
        out.append(f"postCreateCommand: no {program} in a checkout")
    return out


def main():
    directory = pathlib.Path(__file__).resolve().parents[2] / ".devcontainer"
    ours = json.loads((directory / "devcontainer.json").read_text())
    assert faults(ours, directory) == [], faults(ours, directory)
    for path, value in [(["postCreateComand"], "true"), (["build", "dockerFile"], "x"), (["build", "target"], "none"),
                        (["build", "dockerfile"], "../none"), (["hostRequirements", "memory"], "8 GB"),
                        (["hostRequirements", "cpus"], "2"), (["postCreateCommand"], 1), (["postCreateCommand"], "./none"),
                        (["waitFor"], "never"), (["build"], {"context": ".."})]:
        changed = copy.deepcopy(ours)
        at = changed
        for name in path[:-1]:
            at = at[name]
        at[path[-1]] = value
        assert faults(changed, directory), f"{'.'.join(path)} = {value} is not refused"


main()
