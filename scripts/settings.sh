# Sourced by every script: where things are, and small words for people. Not a verb.
ROOT=$(cd "$(dirname "$0")/.." && pwd)
WORK=$ROOT/.work
DEPS=$WORK/deps
# Tests run these scripts on a copy of the project's directory, so that a running project is not theirs to touch.
COMPOSE_DIR=${WEIGHTKEEPER_COMPOSE_DIR:-$ROOT/compose}
DEFAULT_MODEL=$WORK/models/SmolLM2-135M-Instruct
MADE_BASE_IMAGE=weightkeeper-base:local

# Compose builds with the engine's own BuildKit, so no buildx is needed; and it asks nothing.
export COMPOSE_BAKE=false COMPOSE_MENU=false

say() { echo "weightkeeper: $*"; }
die() { echo "weightkeeper: $*" >&2; exit 1; }
retry() { for pause in 2 5 0; do "$@" && return 0; sleep $pause; done; return 1; }

# A value of compose/.env, or the second argument.
setting() {
  value=$(sed -n "s/^$1='\{0,1\}\([^']*\)'\{0,1\}$/\1/p" "$COMPOSE_DIR/.env" 2>/dev/null | tail -n 1)
  echo "${value:-${2:-}}"
}
has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

# What was given in the environment is in compose/.env by now. There, the supervisor reads the same.
SETTINGS="MODEL MODEL_BLOBS PORT GPU BASE_IMAGE COMPOSE_PROJECT_NAME COMPOSE_FILE WEIGHTKEEPER_UID WEIGHTKEEPER_GID DOCKER_SOCKET DOCKER_GID PROJECT_DIR"
# shellcheck disable=SC2086
compose() { (unset $SETTINGS; cd "$COMPOSE_DIR" && docker compose "$@"); }
