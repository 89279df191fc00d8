# Sourced by .ci/run and .ci/full: steps with their times, and new virtual environments.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scratch=$(mktemp -d)
times=()
current=start

finish() {
  local status=$?
  printf '\n%8s  step\n' seconds
  printf '%s\n' "${times[@]}"
  rm -rf "$scratch"
  [ "$status" -eq 0 ] || printf 'FAILED in: %s\n' "$current"
}
trap finish EXIT

# step NAME COMMAND...: runs it, and ends the script if it fails.
step() {
  current=$1
  shift
  printf '\n== %s\n' "$current"
  local began=$SECONDS
  "$@"
  times+=("$(printf '%8d  %s' $((SECONDS - began)) "$current")")
}

# new_environment NAME: activates an empty virtual environment with the torch that CI tests with.
new_environment() {
  local python
  python=$(command -v "${PYTHON:-python3.11}" || command -v python3)
  "$python" -m venv "$scratch/$1"
  # shellcheck disable=SC1091
  . "$scratch/$1/bin/activate"
  pip install --quiet torch==2.13.0
}
