#!/usr/bin/env bash
# Run the tests. Arguments go to pytest: .ci/test.sh -k layers
source "$(dirname "$0")/setup.sh"
exec "$python" -m pytest "$@"
