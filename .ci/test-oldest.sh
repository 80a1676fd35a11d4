#!/usr/bin/env bash
# Install the package with the oldest releases that pyproject.toml allows, and test that; see test-install.sh.
exec "$(dirname "$0")/test-install.sh" oldest "$@"
