#!/usr/bin/env bash
# Run the tests, one process per core. Arguments go to pytest: .ci/test.sh -k layers
source "$(dirname "$0")/setup.sh" all
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the processes share the cores
exec "$python" -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal "$@"
