"""What shells complete of the command line."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from whence.cli import OK, main
from whence.cli.commands import COMMANDS, JSON
from whence.cli.completion import SHELLS, script


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["whence", "gr"], ["graph"]),
        (["whence", "--co"], ["--completion"]),
        (["whence", "--completion", ""], ["bash", "zsh", "fish"]),
        (["whence", "graph", "--f"], ["--format", "--forward"]),
        (
            ["whence", "graph", "model:make", "--format", ""],
            ["dot", "model-explorer", "node-data", "tlparse", "trace", "json"],
        ),
        (["whence", "report", "--format", "m"], ["markdown"]),
        (["whence", "show", "saved"], []),
    ],
)
def test_bash_completes(typed: list[str], offered: list[str], tmp_path: Path) -> None:
    """Commands, options and choices; files everywhere else, which bash does by itself."""
    words = " ".join(f"'{word}'" for word in typed)
    asked = f'COMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; _whence; echo "${{COMPREPLY[@]}}"'
    (tmp_path / "asked.bash").write_text(f"{script('bash')}\n{asked}\n")
    ran = subprocess.run(
        ["bash", str(tmp_path / "asked.bash")], capture_output=True, text=True, check=True, timeout=60
    )
    assert sorted(ran.stdout.split()) == sorted(offered) and ran.stderr == ""


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_knows_every_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The script is printed, and has all commands, options and choices."""
    assert main(["--completion", shell]) == OK
    printed = capsys.readouterr().out
    for command in COMMANDS:
        assert command.name in printed
        for option in (*command.options, JSON):
            names = [name.lstrip("-") for name in option.names if option.is_flag]
            assert all(name in printed for name in (*names, *option.settings.get("choices", ())))


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish here")
def test_fish_reads_its_script(tmp_path: Path) -> None:
    """It is one that fish parses."""
    (tmp_path / "whence.fish").write_text(script("fish"))
    subprocess.run(["fish", "--no-execute", str(tmp_path / "whence.fish")], check=True, timeout=60)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh here")
def test_zsh_reads_its_script(tmp_path: Path) -> None:
    """It is one that zsh parses."""
    (tmp_path / "whence.zsh").write_text(script("zsh"))
    subprocess.run(["zsh", "-n", str(tmp_path / "whence.zsh")], check=True, timeout=60)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh here")
def test_zsh_finds_this_whence_and_keeps_its_own(tmp_path: Path) -> None:
    """It has a command of that name, which says what a name stands for: others' functions ask it."""
    ours = tmp_path / "whence"
    ours.write_text('#!/bin/sh\necho "ours: $*"\n')
    ours.chmod(0o755)
    asked = "whence show model:make; whence --version; whence; whence -w cd"
    (tmp_path / "asked.zsh").write_text(f"PATH={tmp_path}:$PATH\n{script('zsh')}\n{asked}\n")
    ran = subprocess.run(
        ["zsh", "-f", str(tmp_path / "asked.zsh")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "ZDOTDIR": str(tmp_path)},
    )
    assert ran.stdout.splitlines() == ["ours: show model:make", "ours: --version", "ours: ", "cd: builtin"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish here")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("whence gr", ["graph"]),
        ("whence report --fo", ["--format", "--forward"]),
        ("whence report --format m", ["markdown"]),
        ("whence show sav", ["saved.whence"]),
    ],
)
def test_fish_completes(typed: str, offered: list[str], tmp_path: Path) -> None:
    """Commands, options, choices and files."""
    (tmp_path / "saved.whence").touch()
    (tmp_path / "asked.fish").write_text(f"{script('fish')}\ncomplete -C '{typed}'\n")
    asked = ["fish", "--no-config", "asked.fish"]
    ran = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60, cwd=tmp_path)
    assert sorted(line.split("\t")[0] for line in ran.stdout.splitlines()) == offered
