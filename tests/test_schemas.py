"""What whence writes as plain data is as its published JSON Schemas say.

Run with EXPECTTEST_ACCEPT=1 to write the schema of saved programs anew.
"""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from torch import nn

import whence
from tests.interop.archive.mutations import PROGRAM, members
from tests.interop.archive.programs import KINDS, content, program
from tests.interop.archive.schema import archive_schema
from tests.models import case
from tests.schemas import closed, faults, published
from whence import schema as vocabularies
from whence.cli import main

NAMES = sorted(each.name.removesuffix("-1.json") for each in files("whence").joinpath("schemas").iterdir())
MODEL = "whence.demo:gpt"
MODELS = ("llama", "t5", "mixtral", "running_statistics", "checkpoint")


@pytest.mark.parametrize("name", NAMES)
def test_schemas_are_schemas(name: str) -> None:
    """Each says so itself, and is called by name and version."""
    schema = published(name)
    Draft202012Validator.check_schema(schema)
    assert schema["$id"] == f"urn:whence:{name}:1"


def test_all_that_is_written_as_json_has_one() -> None:
    """Programs, files, and every command that prints plain data."""
    commands = ["check", "demo", "diff", "doctor", "graph", "report", "show", "verify", "view"]
    assert sorted(["program", "archive", *commands]) == NAMES


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", KINDS)
def test_small_programs(kind: str) -> None:
    """As plain data, and in a file."""
    assert faults("program", json.loads(program(kind).to_json())) == []
    assert faults("archive", json.loads(members(content(kind))[PROGRAM])) == []


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    """Training steps of models, as plain data and in a file."""
    found = case(name)
    model, args, kwargs = found.make()
    captured = whence.capture(model, args, kwargs, backward=found.loss)
    assert faults("program", json.loads(captured.to_json())) == []
    saved = whence.interop.bytes_of(captured, weights=False)
    assert faults("archive", json.loads(members(saved)[PROGRAM])) == []


def test_what_values_decided() -> None:
    """A decision is a row of its own."""

    def gate(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if x.sum() > 0 else x.cos()

    captured = whence.capture(gate, (torch.ones(3),), decide="example")
    data = json.loads(captured.to_json())
    assert len(data["decisions"]) == 1 and faults("program", data) == []


def in_lines(schema: dict[str, Any]) -> str:
    """A definition is a line, so that a change of one is a change of one."""
    definitions = schema.pop("$defs")
    head = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in schema.items()]
    defined = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in definitions.items()]
    inner = ",\n  ".join(defined)
    return "{\n" + ",\n".join([*head, f'"$defs": {{\n  {inner}\n}}']) + "\n}\n"


def test_the_schema_of_files_is_that_of_the_records() -> None:
    """It follows from annotations, so it cannot be behind them."""
    path = Path(str(files("whence").joinpath("schemas", "archive-1.json")))
    text = in_lines(archive_schema())
    if "EXPECTTEST_ACCEPT" in os.environ:
        path.write_text(text)
    assert path.read_text() == text


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "arguments",
    [
        ["demo"],
        ["show", MODEL, "--backward"],
        ["show", MODEL, "--select", "blocks.0.mlp"],
        ["show", MODEL, "--history"],
        ["report", MODEL],
        ["report", MODEL, "--forward", "--device", "h100"],
        ["diff", MODEL, MODEL, "--forward"],
        ["diff", MODEL, "hf:GPT2LMHeadModel(n_layer=1, n_embd=32, n_head=2)", "--forward"],
        ["view", MODEL, "--forward"],
        ["graph", MODEL, "--forward"],
        ["graph", MODEL, "--forward", "--format", "trace", "--output", "trace.json"],
        ["verify", MODEL, "--forward"],
        ["verify", MODEL, "--forward", "--by", "call", "--atol", "1e-6"],
        ["check", MODEL, "--forward"],
        ["check", MODEL, "--forward", "--guards"],
        ["check", MODEL, "hf:GPT2LMHeadModel(n_layer=1, n_embd=32, n_head=2)", "--forward"],
        ["doctor"],
    ],
    ids=" ".join,
)
def test_commands(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a command prints with `--json`."""
    monkeypatch.chdir(tmp_path)
    main([*arguments, "--json"])
    assert faults(arguments[0], json.loads(capsys.readouterr().out)) == []


def test_numbers_that_json_has_no_word_for() -> None:
    """A difference that is no number is an object, as everywhere."""

    class Root(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sqrt() if torch.compiler.is_compiling() or x.sum() > 0 else x.abs()

    verification = whence.capture(Root(), (torch.ones(2),)).verify(Root(), (-torch.ones(2),))
    data = json.loads(json.dumps({"schema": 1, **verification.to_dict()}, allow_nan=False))
    assert {"number": "nan"} in [row["difference"] for row in data["rows"]]
    assert faults("verify", data) == []


def test_a_demonstration_is_a_report_and_a_verification() -> None:
    """What stands in two schemas is the same in both."""
    demo, report, verify = map(published, ("demo", "report", "verify"))
    assert {**report["$defs"], **verify["$defs"]} == demo["$defs"]
    assert published("check")["$defs"]["guard"] == published("program")["$defs"]["guard"]


WORDS: list[tuple[str, tuple[str, ...], type]] = [
    ("input", ("properties", "kind"), vocabularies.InputKind),
    ("output", ("properties", "kind"), vocabularies.OutputKind),
    ("origin", ("properties", "phase"), vocabularies.Phase),
    ("origin", ("properties", "quality"), vocabularies.Quality),
    ("guard", ("properties", "kind"), vocabularies.GuardKind),
    ("guard", ("properties", "strictness"), vocabularies.Strictness),
]


@pytest.mark.parametrize(("name", "keys", "kind"), WORDS, ids=lambda each: getattr(each, "__name__", None))
def test_words_are_those_of_the_vocabularies(name: str, keys: tuple[str, ...], kind: Any) -> None:
    """A word that is added is published."""
    found = published("program")["$defs"][name]
    for key in keys:
        found = found[key]
    assert found["enum"] == [word.value for word in kind]


@pytest.mark.parametrize(
    ("change", "fault"),
    [({"schema": 2}, "$.schema"), ({"nodes": [{"name": 1}]}, "$.nodes[0].name"), ({"more": 1}, "$")],
)
def test_other_data_are_no_program(change: dict[str, Any], fault: str) -> None:
    """Each check of these tests fires."""
    data = {**json.loads(program("forward").to_json()), **change}
    assert faults("program", data)[0].startswith(f"{fault}:")


def test_keys_may_be_added() -> None:
    """As the page says: the published schemas allow keys that a later release writes; only tests do not."""
    data = {**json.loads(program("forward").to_json()), "more": 1}
    assert Draft202012Validator(published("program")).is_valid(data)
    assert not Draft202012Validator(closed(published("program"))).is_valid(data)
