"""`etude completion`: a script that completes verbs and recipes in a shell."""

from __future__ import annotations

from etude.cli.verbs import HELP
from etude.core.errors import UsageError

_SCRIPT = """\
_etude() {
    local word=${COMP_WORDS[COMP_CWORD]}
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "VERBS" -- "$word"))
    elif [ "$COMP_CWORD" -eq 2 ]; then
        case ${COMP_WORDS[1]} in
            plan | train) COMPREPLY=($(compgen -W "$(etude list --names)" -- "$word")) ;;
        esac
    fi
}
complete -o default -F _etude etude
"""
_ZSH = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"
SHELLS = {"bash": _SCRIPT, "zsh": _ZSH + _SCRIPT}
USAGE = """\
etude completion prints a script that completes verbs and recipes.

  bash:  echo 'source <(etude completion bash)' >> ~/.bashrc
  zsh:   echo 'source <(etude completion zsh)' >> ~/.zshrc
"""


def run(arguments: list[str], verbs: list[str]) -> int:
    """Print the script of a shell."""
    if not arguments or HELP.intersection(arguments):
        print(USAGE, end="")
        return 0
    if len(arguments) > 1 or arguments[0] not in SHELLS:
        raise UsageError(f"Name one of {' and '.join(SHELLS)}: etude completion bash.")
    print(SHELLS[arguments[0]].replace("VERBS", " ".join(verbs)), end="")
    return 0
