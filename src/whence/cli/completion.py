"""What teaches a shell to complete the command line: a script made of the table of commands."""

from collections.abc import Iterator

from whence.cli.commands import COMMANDS, JSON, Command, Option

SHELLS = ("bash", "zsh", "fish")
_GENERAL = ("--help", "--version", "--completion")


def script(shell: str) -> str:
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]()


def _flags(command: Command) -> list[Option]:
    return [option for option in (*command.options, JSON) if option.is_flag]


def _words(command: Command) -> str:
    return " ".join([*(name for option in _flags(command) for name in option.names), "--help"])


def _choices(command: Command) -> Iterator[tuple[Option, str]]:
    for option in _flags(command):
        if "choices" in option.settings:
            yield option, " ".join(option.settings["choices"])


def _bash() -> str:
    """Files complete whatever is no option: programs in files, and where to write."""
    first = _shell_quoted(" ".join([*(command.name for command in COMMANDS), *_GENERAL]))
    words = [f"        {command.name}) offered={_shell_quoted(_words(command))} ;;" for command in COMMANDS]
    chosen = [
        f"        {command.name}:{name}) offered={_shell_quoted(choices)} ;;"
        for command in COMMANDS
        for option, choices in _choices(command)
        for name in option.names
    ]
    return "\n".join(
        [
            "_whence() {",
            '    local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" offered=""',
            '    case "${COMP_WORDS[1]}:$before" in',
            *chosen,
            f"        --completion:*) offered={_shell_quoted(' '.join(SHELLS))} ;;",
            "    esac",
            "    if [[ -z $offered && ( $current == -* || $COMP_CWORD == 1 ) ]]; then",
            '    case "${COMP_WORDS[1]}" in',
            *words,
            f"        *) [[ $COMP_CWORD == 1 ]] && offered={first} ;;",
            "    esac",
            "    fi",
            "    COMPREPLY=()",
            '    if [[ -n $offered ]]; then COMPREPLY=($(compgen -W "$offered" -- "$current")); fi',
            "}",
            "complete -o default -F _whence whence",
            "",
        ]
    )


def _zsh() -> str:
    """What bash reads, once zsh is told how.

    zsh has a command `whence` of its own, which says what a name stands for: it is left what is no command of
    ours, for functions of others that ask it.
    """
    ours = "|".join([*(command.name for command in COMMANDS), *_GENERAL, "-h", "''"])
    return "\n".join(
        [
            "whence() {",
            '    case "${1-}" in',
            f'        {ours}) command whence "$@" ;;',
            '        *) builtin whence "$@" ;;',
            "    esac",
            "}",
            "autoload -U +X compinit && compinit",
            "autoload -U +X bashcompinit && bashcompinit",
            _bash(),
        ]
    )


def _fish() -> str:
    first = "__fish_use_subcommand"
    lines = [f"complete -c whence -n {first} -f -l {name.removeprefix('--')}" for name in _GENERAL[:2]]
    lines.append(f"complete -c whence -n {first} -x -l completion -a {_shell_quoted(' '.join(SHELLS))}")
    for command in COMMANDS:
        lines.append(
            f"complete -c whence -n {first} -f -a {command.name} -d {_shell_quoted(command.purpose)}"
        )
        lines += [_fish_option(command, option) for option in _flags(command)]
    return "\n".join([*lines, ""])


def _fish_option(command: Command, option: Option) -> str:
    names = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
    settings = option.settings
    takes = ["-x", "-a", _shell_quoted(" ".join(settings["choices"]))] if "choices" in settings else []
    takes = takes or ([] if "action" in settings else ["-r"])
    seen = _shell_quoted(f"__fish_seen_subcommand_from {command.name}")
    return " ".join(["complete -c whence -n", seen, *names, *takes, "-d", _shell_quoted(settings["help"])])


def _shell_quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
