#!/usr/bin/env bash
# Install the package with the newest release of all that the package needs, and test that; see test-install.sh.
exec "$(dirname "$0")/test-install.sh" latest "$@"
