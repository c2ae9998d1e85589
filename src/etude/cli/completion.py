"""`etude completion`: a shell script that completes commands, recipes and options."""

from __future__ import annotations

from etude.cli.verbs import HELP
from etude.core.errors import UsageError

_SCRIPT = r"""
# Sets $page to the help of a command; a shell runs it once for each command.
_etude_page() {
    local name="_etude_page_$(printf '%s' "$*" | tr -c 'a-zA-Z0-9' '_')"
    eval "page=\$$name"
    if [ -z "$page" ]; then
        page=$(etude "$@" --help-all 2>/dev/null)
        eval "$name=\$page"
    fi
}
_etude() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
    local verb=${COMP_WORDS[1]} target=${COMP_WORDS[2]} words="" page="" i kinds=()
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="VERBS"
    elif [ "$COMP_CWORD" -eq 2 ] && [ "${word#-}" = "$word" ]; then
        case $verb in
            plan | train | slurm | kubernetes | skypilot) words=$(etude list --names) ;;
            data) words="DATA" ;;
            motion) words="list show check import" ;;
            demo) words="reach pick-place walk-go1" ;;
            completion) words="bash zsh" ;;
        esac
    else
        case $verb in
            list) words="--kinds --names --json" ;;
            plan | train | slurm | kubernetes | skypilot)
                for ((i = 3; i < COMP_CWORD - 1; i++)); do
                    case ${COMP_WORDS[i]} in
                        --*.kind | --env.id | --env.task)
                            kinds+=("${COMP_WORDS[i]}" "${COMP_WORDS[i + 1]}") ;;
                    esac
                done
                _etude_page "$verb" "$target" "${kinds[@]}" ;;
            data | motion) _etude_page "$verb" "$target" ;;
            *) _etude_page "$verb" ;;
        esac
        case $word in
            -*) words="$words $(printf '%s\n' "$page" | sed -n 's/^  \(--[^ ]*\).*/\1/p')" ;;
            *)
                case $before in
                    --*.kind)
                        i=${before#--}
                        words=$(etude list --kinds | awk -v section="${i%.kind}" \
                            '/^[a-z]/ { on = $1 == section; next } on { print $1 }') ;;
                    --*) words=$(printf '%s\n' "$page" | awk -v option="$before" \
                        '$1 == option { print $2 }' | tr '|' '\n' | grep -v '[A-Z]') ;;
                esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _etude etude
"""
DATA = (
    "inspect view import validate record add merge filter clip exclude include export "
    "add-embeddings"
)
"""The commands of `etude data`; importing their table takes seconds."""
_ZSH = "autoload -Uz compinit bashcompinit && compinit && bashcompinit"
SHELLS = {"bash": _SCRIPT.lstrip("\n"), "zsh": _ZSH + _SCRIPT}
USAGE = """\
etude completion prints a shell script that completes commands, recipes, options and values.

  bash:  echo 'source <(etude completion bash)' >> ~/.bashrc
  zsh:   echo 'source <(etude completion zsh)' >> ~/.zshrc

The first Tab after `etude train RECIPE --` loads the recipe, which takes a second or two; the shell
keeps its options.
"""


def run(arguments: list[str]) -> int:
    """Print the script for a shell."""
    from etude.cli.main import VERBS

    if not arguments or HELP.intersection(arguments):
        print(USAGE, end="")
        return 0
    if len(arguments) > 1 or arguments[0] not in SHELLS:
        raise UsageError(f"Name one of {' and '.join(SHELLS)}: etude completion bash.")
    print(SHELLS[arguments[0]].replace("VERBS", " ".join(VERBS)).replace("DATA", DATA), end="")
    return 0
