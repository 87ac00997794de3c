#!/usr/bin/env bash
# The simulated tests on the oldest and the newest torch that pyproject.toml allows, each in an environment of its own.
# usage: benchmarks/compat.sh [version ...]     (PYTHON chooses the interpreter)
set -euo pipefail
cd "$(dirname "$0")/.."
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(2.11.0 2.15.0)
for version in "${versions[@]}"; do
    environment=.venv-torch-$version
    "${PYTHON:-python3}" -m venv "$environment"
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "torch==$version" -e '.[test]'
    echo "== torch $version"
    "$environment/bin/python" -m pytest -q -m "sim and not slow" -n auto
done
