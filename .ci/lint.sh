#!/usr/bin/env bash
# Check style and formatting of all Python in the repository.
source "$(dirname "$0")/setup.sh" all
"$python" -m ruff check .
"$python" -m ruff format --check .
